"""`cuengine serve` in a process of its own, seen from outside: its log, figures, memory and files.

Also the least that is needed to talk to it by hand: answers read from a raw connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from throughput import descendants, resident_bytes

START_SECONDS = 600.0
_MAX_LOG_LINES = 50_000
_LOG_ENTRY = re.compile(r"\d\d:\d\d:\d\d ")


class ServedModel:
    """A server on a free port of localhost; as a context manager it is stopped in the end.

    log     its lines so far, the last 50,000 of them
    status  how it ended; None: it runs
    """

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "cuengine.cli.main", "serve", model, "--port", "0"]
        self.status: int | None = None
        self.log: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._address: re.Match[str] | None = None
        self._serves = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._serves.wait(START_SECONDS) or self._address is None:
            self._process.kill()
            raise SystemExit("\n".join(["the server does not start:", *self.log]))
        self.url = self._address[1]
        self.port = int(self._address[2])

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGTERM, by which it finishes what runs."""
        self._process.terminate()
        self.status = self._process.wait(120)
        self._reader.join(10)

    def resident_bytes(self) -> int:
        """Of the server's processes together."""
        return resident_bytes(self._process.pid)

    def open_files(self) -> int:
        """File descriptors of the server's processes together."""
        processes = list(descendants(self._process.pid))
        return sum(len(os.listdir(f"/proc/{process}/fd")) for process in processes)

    def problems(self) -> list[str]:
        """What the log says of failures: each line of that kind with the traceback after it."""
        entries: list[str] = []
        for line in list(self.log):
            if _LOG_ENTRY.match(line) or not entries:
                entries.append(line)
            else:
                entries[-1] += "\n" + line
        return [entry for entry in entries if re.search("Traceback|ERROR|CRITICAL", entry)]

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.log.append(line.rstrip())
                if self._address is None:
                    self._address = re.search(r"Serving .* at (http://[^\s:]+:(\d+))", line)
                    if self._address is not None:
                        self._serves.set()
        self._serves.set()


def figures(url: str) -> dict[str, float]:
    """What /metrics says now, by name with labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def is_idle(now: dict[str, float]) -> bool:
    """No request is left, and no block of the KV cache is held."""
    names = ("requests_running", "requests_waiting", "kv_blocks_used")
    return not any(now[f"cuengine_{name}"] for name in names)


def seconds_until_idle(url: str, limit: float) -> float | None:
    """How long it takes until nothing runs and all blocks are free; None: longer than `limit`."""
    start = time.perf_counter()
    while True:
        asked = time.perf_counter()
        if is_idle(figures(url)):
            return asked - start
        if asked - start > limit:
            return None
        time.sleep(0.01)


def lowest(count: Callable[[], int], enough: int) -> int:
    """What `count` says once it is no more than `enough`, or after ten seconds."""
    for _ in range(100):
        if (now := count()) <= enough:
            break
        time.sleep(0.1)
    return now


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class CutOff(Exception):
    """The connection ended within an answer."""


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """The next answer on a connection, past any 100 Continue; None where it ends without one.

    Raises CutOff.
    """
    try:
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 1"):
            pass
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if getattr(error, "partial", b""):
            raise CutOff(repr(error)) from None
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    status = int(first.split(" ")[1])
    try:
        if headers.get("transfer-encoding") == "chunked":
            body = await _read_chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise CutOff(f"{status}, then {error!r}") from None
    return Answer(status, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes, after which the connection ends."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def model_path(name: str) -> str:
    """As it is, where it is a folder: `serve` takes names, too."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
