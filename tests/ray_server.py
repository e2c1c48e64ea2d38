"""`cuengine serve` with engines on Ray, as a process of its own, and what it logs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

SECONDS = 1200
"""For what is sure to come, on a machine that has better things to do."""


class Server:
    """The command, and what it logs."""

    def __init__(self, folder: Path, flags: str, cwd: Path | None = None, **environ: str) -> None:
        command = [sys.executable, "-P", "-m", "cuengine.cli.main", "serve", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--kv-cache-memory", "16MB", "--max-model-len", "128", *flags.split()],
            cwd=cwd,
            env={**os.environ, **environ},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.log: list[str] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log.append(line)
                self._news.notify_all()
        with self._news:
            self.log.append("(the end)")
            self._news.notify_all()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def until(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            ended = "(the end)" in self.log
            match = re.search(pattern, "".join(self.log))
            assert match or not ended, "".join(self.log)
            return match

        with self._news:
            match = self._news.wait_for(found, timeout=SECONDS)
        assert match, f"no {pattern!r} in:\n{''.join(self.log)}"
        return match


def start_server(folder: Path, flags: str, cwd: Path | None = None, **environ: str) -> Server:
    """It serves, or says why it doesn't.

    Ray gives a node 30 seconds to start, which a busy machine may take longer for.
    """
    for attempts_left in (3, 2, 1, 0):
        server = Server(folder, flags, cwd, **environ)
        try:
            outcome = server.until(
                r"Serving .* at|replicas do not start|Ray cannot be started here"
            )
        except BaseException:
            server.kill()
            raise
        if not outcome[0].startswith("Ray"):
            return server
        assert attempts_left, "".join(server.log)
        server.process.wait()
    raise AssertionError
