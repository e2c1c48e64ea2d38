"""Starting, draining on SIGTERM and stopping, in a process of its own."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import raw_request

from cuengine.api.server import ServerSettings, create_app, run_server
from cuengine.errors import ConfigError

SCRIPT = Path(__file__).with_name("fake_engine.py")


class Process:
    """A server as an operator sees it: its log, its port, signals and its exit status."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.first_line = self.read_line()
        self.port = int(self.first_line.rpartition(":")[2])

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def read_until(self, text: str) -> str:
        while text not in (line := self.read_line()):
            assert line or self.process.poll() is None, f"the log ended without {text!r}"
        return line

    def signal(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)

    def status_of(self, path: str) -> int:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=60
            ) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def stream(self) -> socket.socket:
        """A stream that has had its first token."""
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        peer.sendall(
            raw_request("/v1/completions", {"prompt": "a", "max_tokens": 99, "stream": True})
        )
        assert peer.recv(100_000)
        return peer


@contextmanager
def process(**options: Any) -> Iterator[Process]:
    server = Process(**options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def _read_all(peer: socket.socket) -> bytes:
    data = b""
    while piece := peer.recv(100_000):
        data += piece
    return data


def test_the_first_log_line_names_the_model_and_the_port_that_was_free() -> None:
    with process() as server:
        assert server.first_line == f"Serving fake-model at http://127.0.0.1:{server.port}"
        assert server.status_of("/health") == 200


def test_sigterm_lets_running_streams_end_and_refuses_new_requests() -> None:
    with process(text="0123456789", delay=0.3) as server:
        peer = server.stream()
        server.signal()
        server.read_until("Draining: 1 request in flight")
        assert server.status_of("/ready") == 503
        assert server.status_of("/v1/models") == 503
        # Alive it is, or it would be killed before its streams have ended.
        assert server.status_of("/health") == 200
        assert server.status_of("/v1/models") == 503
        rest = _read_all(peer)
        assert b'"text":"9"' in rest
        assert b"data: [DONE]" in rest
        assert server.process.wait(20) == 0


def test_after_the_drain_timeout_running_streams_end_with_an_error() -> None:
    options = {"text": "x" * 98, "delay": 0.5, "settings": {"drain_timeout": 0.1}}
    with process(**options) as server:
        peer = server.stream()
        server.signal()
        server.read_until("Stopping with 1 request unfinished")
        assert b'data: {"error":' in _read_all(peer)
        assert server.process.wait(20) == 0


def test_a_second_sigterm_stops_at_once() -> None:
    with process(text="x" * 98, delay=0.5, settings={"drain_timeout": 1000}) as server:
        peer = server.stream()
        server.signal()
        server.read_until("Draining")
        server.signal()
        assert server.process.wait(20) == 0
        peer.close()


def test_a_port_in_use_is_one_clear_error_and_the_engine_is_not_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = FakeEngine()
        with pytest.raises(ConfigError, match=f"port {port} is in use .* --port"):
            run_server(engine, ServerSettings(port=port))
        assert engine.started == 0


def test_a_host_that_is_none_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host"):
        run_server(FakeEngine(), ServerSettings(host="no.such.host.invalid", port=0))


@pytest.mark.parametrize(
    "bad",
    [{"port": 70000}, {"keepalive_seconds": 0}, {"api_keys": ("",)}, {"max_body_bytes": 0},
     {"drain_timeout": -1}, {"drain_timeout": math.nan}, {"drain_timeout": math.inf},
     {"request_timeout": math.inf}, {"write_timeout": math.nan}, {"max_queued_requests": 2**31},
     {"max_body_bytes": 2**31}, {"served_model_names": ("",)}],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**bad)


async def test_the_app_starts_the_engine_and_stops_it() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings())
    app.freeze()
    await app.startup()
    assert (engine.started, engine.stopped) == (1, 0)
    await app.cleanup()
    assert engine.stopped >= 1
