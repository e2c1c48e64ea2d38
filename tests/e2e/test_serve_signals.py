"""`cuengine serve` with its engine's process: what becomes of both when signals come, or -9.

A stream is held up by stopping the engine's process (SIGSTOP), not by hoping that it lasts.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from engine_control import PATIENCE, alive

STREAM = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}


class Server:
    """Both processes in a terminal of their own, and what they have shown in it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "cuengine.cli.main", "serve", str(folder), "--port", "0"]
        self.shown = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ["NUMBA_NUM_THREADS"] = "1"
            os.execv(command[0], [*command, "--kv-cache-memory", "64MB"])

    def _read(self) -> str:
        assert select.select([self._terminal], [], [], PATIENCE)[0], f"nothing after {self.shown}"
        try:
            return os.read(self._terminal, 1 << 16).decode()
        except OSError:  # EIO: the server has left its terminal
            return ""

    def read_until(self, pattern: str) -> re.Match[str]:
        while not (found := re.search(pattern, self.shown)):
            piece = self._read()
            assert piece, f"the log ends without {pattern!r}:\n{self.shown}"
            self.shown += piece
        return found

    def engine(self) -> int:
        """Its one child, as soon as it has one."""
        for _ in range(PATIENCE * 100):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                with suppress(OSError):  # a thread that has ended meanwhile
                    if children := (task / "children").read_text().split():
                        return int(children[0])
            time.sleep(0.01)
        raise TimeoutError

    def press_ctrl_c(self) -> None:
        """All processes of the terminal get SIGINT."""
        os.write(self._terminal, b"\x03")

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def stream(self) -> socket.socket:
        """A request that the server has begun to answer, with a stream."""
        port = int(self.read_until(r"Serving .*:(\d+)\s")[1])
        peer = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        body = json.dumps(STREAM)
        fields = "Host: x\r\nContent-Type: application/json\r\nExpect: 100-continue"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\nContent-Length: {len(body)}\r\n\r\n"
        peer.sendall(head.encode())
        assert peer.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(body.encode())
        return peer

    def end(self) -> int:
        """Waits until it has ended by itself; its exit code."""
        while piece := self._read():
            self.shown += piece
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        if alive(server.pid):
            os.kill(server.pid, signal.SIGKILL)


def read_all(peer: socket.socket) -> bytes:
    with peer:
        return b"".join(iter(lambda: peer.recv(1 << 16), b""))


def wait_until_ended(pid: int) -> None:
    for _ in range(PATIENCE * 100):
        if not alive(pid):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine's process outlives the server")


WAYS: list[Callable[[Server], None]] = [Server.terminate, Server.press_ctrl_c]


@pytest.mark.parametrize("ask_to_end", WAYS)
def test_after_one_signal_streams_come_to_their_end_and_after_two_they_do_not(
    tiny_chat_model: Path, ask_to_end: Callable[[Server], None]
):
    for signals in (1, 2):
        with serving(tiny_chat_model) as server:
            server.read_until("Serving")
            engine = server.engine()
            os.kill(engine, signal.SIGSTOP)
            peer = server.stream()
            ask_to_end(server)
            server.read_until("Draining: 1 request in flight")
            if signals == 1:
                os.kill(engine, signal.SIGCONT)
                assert b"data: [DONE]" in read_all(peer)
            else:
                ask_to_end(server)
                assert b'"engine_stopped"' in read_all(peer)
            assert server.end() == 0
            assert not alive(engine)
            assert "Traceback" not in server.shown


def test_a_server_that_is_killed_takes_its_engine_with_it(tiny_chat_model: Path):
    with serving(tiny_chat_model) as server, server.stream():
        engine = server.engine()
        os.kill(server.pid, signal.SIGKILL)
        assert server.end() == -signal.SIGKILL
        wait_until_ended(engine)


def test_sigterm_while_the_model_is_loaded_is_handled_and_ends_both(tiny_chat_model: Path):
    with serving(tiny_chat_model) as server:
        engine = server.engine()
        server.terminate()
        # By a handler: to the default, which gives -SIGTERM, a container's first process is deaf.
        assert server.end() == 128 + signal.SIGTERM
        wait_until_ended(engine)
        # Silent, but for what loading still said where Python's compiler swallowed the exception.
        assert not re.search("Serving|Traceback", server.shown)


def test_ctrl_c_while_the_model_is_loaded_ends_both_quietly(tiny_chat_model: Path):
    with serving(tiny_chat_model) as server:
        engine = server.engine()
        server.press_ctrl_c()
        assert server.end() in (130, -2)  # as the shell shows both: 130
        wait_until_ended(engine)
        # As with SIGTERM: a KeyboardInterrupt can be swallowed, too.
        assert not re.search("Serving|Traceback", server.shown)
