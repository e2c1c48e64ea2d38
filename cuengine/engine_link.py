"""One engine process as the server sees it: started, loaded, talked to, ended.

What the process does is in engine_process.py; when one is started, and why, in engine_keeper.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from cuengine.child_process import ChildProcess
from cuengine.config import EngineConfig
from cuengine.errors import ConfigError, EngineStoppedError, ModelError
from cuengine.wire import (
    Command,
    FrameReader,
    LoadFailed,
    Log,
    Ready,
    Report,
    Start,
    WireError,
    frame,
)

logger = logging.getLogger("cuengine")

# -P: the engine is what is installed, whatever lies in the working folder. -I: nor in PYTHONPATH.
COMMAND = [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "cuengine.engine_process"]

_LOAD_ERRORS = {"ModelError": ModelError, "ConfigError": ConfigError}
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", as the system does where memory runs out",
    signal.SIGILL: ": kernels for another CPU; see NUMBA_CPU_NAME and NUMBA_CPU_FEATURES",
    signal.SIGBUS: ": a file that was mapped has become shorter, or /dev/shm is full",
}
_SECONDS_TO_END = 5.0
_READ_SIZE = 1 << 16


def log_levels() -> dict[str, int]:
    """By logger: of the root and of ours what holds, of our modules what is set for them alone."""
    levels = {name: logging.getLogger(name).getEffectiveLevel() for name in ("", "cuengine")}
    for name, known in list(logging.root.manager.loggerDict.items()):
        if name.startswith("cuengine.") and isinstance(known, logging.Logger) and known.level:
            levels[name] = known.level
    return levels


class EngineLink:
    """A process that was started and waits to be told what to load.

    pid       of the process
    attached  commands can be sent, and reports come
    """

    def __init__(self) -> None:
        """Raises OSError where no process can be started."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = ChildProcess([*COMMAND, str(fd)], pass_fds=[fd])
        self.pid = self._process.pid
        self._reader: FrameReader[Report] = FrameReader(Report)
        self._unheard: list[Report] = []
        self._transport: asyncio.Transport | None = None
        self.attached = False
        self._killed = False

    def start(self, config: EngineConfig) -> None:
        """Have the engine loaded; log records come as far as they are wanted here."""
        with suppress(OSError):  # it has ended already, which `wait_ready` will say
            self._socket.sendall(frame(Start(config, log_levels())))

    def wait_ready(self) -> Ready:
        """Wait, in the calling thread, until the engine is loaded.

        Raises ModelError and ConfigError as loading did, EngineStoppedError where it has ended,
        and WireError where what it says is no message.
        """
        while data := self._receive():
            self._unheard += self._reader.feed(data)
            while self._unheard:
                match report := self._unheard.pop(0):
                    case Log():
                        log_here(report)
                    case Ready():
                        return report
                    case LoadFailed():
                        raise _LOAD_ERRORS[report.error](report.message)
        raise EngineStoppedError(
            f"The engine's process {self.wait_ended()} while the engine was loaded"
        )

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_READ_SIZE)
        except OSError:
            return b""

    async def attach(
        self, on_report: Callable[[Report], None], on_lost: Callable[[], None]
    ) -> None:
        """From now on reports go to the running loop, which hears of the process's end, too."""
        protocol = _Protocol(self, on_report, on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=self._socket)

    def send(self, command: Command) -> None:
        """Raises WireError for a command that cannot be encoded. The process may have ended."""
        assert self._transport is not None, "nobody has attached it"
        data = frame(command)
        if not self._transport.is_closing():
            self._transport.write(data)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._killed = True
        self._process.kill()

    def wait_ended(self) -> str:
        """Wait, in the calling thread, for a process that is about to end; says how it did."""
        status = self._process.wait(_SECONDS_TO_END)
        if status is None:
            self.kill()
            status = self._process.wait()
            assert status is not None
        if status < 0:
            hint = "" if self._killed else _HINTS.get(-status, "")
            return f"was ended by signal {-status} ({signal.strsignal(-status)}{hint})"
        return f"ended with status {status}"

    def close(self) -> None:
        """Hang up, at which the process ends. May be called at any time, and more than once."""
        if self._transport is not None:
            self._transport.abort()
        with suppress(OSError):  # a thread may be in `wait_ready`
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Protocol(asyncio.Protocol):
    def __init__(
        self,
        link: EngineLink,
        on_report: Callable[[Report], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._link = link
        self._on_report = on_report
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # (No isinstance: uvloop, which Ray runs replicas on, has classes of its own.)
        self._link._transport = cast(asyncio.Transport, transport)
        self._link.attached = True
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        link = self._link
        try:
            link._unheard += link._reader.feed(data)
        except WireError as error:
            logger.error("The engine's process cannot be understood: %s", error)
            link.kill()
            link.close()
            return
        while link._unheard:
            report = link._unheard.pop(0)
            if isinstance(report, Log):
                log_here(report)
            else:
                self._on_report(report)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._read_rest()
        self._link.attached = False
        self._on_lost()

    def _read_rest(self) -> None:
        """asyncio gives up when a write fails; what came before that says whom it worked on."""
        with suppress(OSError):
            while data := self._link._socket.recv(_READ_SIZE):
                self.data_received(data)


def log_here(log: Log) -> None:
    """Log what another process did."""
    to = logging.getLogger(log.logger)
    if to.isEnabledFor(log.level):
        record = logging.makeLogRecord(
            {
                "name": log.logger,
                "levelno": log.level,
                "levelname": logging.getLevelName(log.level),
                "msg": log.message,
                "created": log.created,
                "exc_text": log.exception,
            }
        )
        to.handle(record)
