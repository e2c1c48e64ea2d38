"""A process that is started here, never outlives this one, and leaves nothing behind.

What it does is its own business, and how one talks to it that of engine_link.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

_DEAF_TO = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C and service managers signal all processes; what it means, this one decides alone."""

_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """Runs a command, which never hears SIGINT and SIGTERM.

    A thread of its own starts it and waits for its end: signals that this thread has blocked are
    blocked in the child from its first instruction on, what has ended is no zombie, and Linux's
    "end with your parent" means the thread that was the parent.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> None:
        """Raises OSError where it cannot be started."""
        started: Future[subprocess.Popen[bytes]] = Future()
        self._ended = threading.Event()
        threading.Thread(
            target=self._run, args=(command, pass_fds, started), name="cuengine-child", daemon=True
        ).start()
        self._process = started.result()
        self.pid = self._process.pid

    def _run(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int],
        started: Future[subprocess.Popen[bytes]],
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
        try:
            process = subprocess.Popen(
                command, pass_fds=pass_fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._ended.set()

    def kill(self) -> None:
        """Whatever it does, it ends now."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its status, as subprocess has it; None where it has not ended within so many seconds."""
        return self._process.returncode if self._ended.wait(timeout) else None


def end_with_parent() -> None:
    """Called in the child: on Linux it is killed when its parent ends, even where it cannot notice.

    (It hangs in code that holds the GIL, or was stopped. Elsewhere it is up to the child.)
    """
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL))
