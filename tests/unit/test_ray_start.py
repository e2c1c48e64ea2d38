"""How the Ray backend starts, ends and logs, as far as that needs no Ray.

The rest is in tests/many_machines/test_ray_start.py.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cuengine.errors import ConfigError
from cuengine.ray_backend import address, environment
from cuengine.ray_backend.address import AUTO, check_reachable, cluster_address
from cuengine.ray_backend.ray_log import LogLines, failure_in, into_our_log
from cuengine.ray_backend.replica_log import MAX_RECORDS, ReplicaLog
from cuengine.ray_backend.settings import RaySettings
from cuengine.ray_backend.watch import Outlook, Watch
from cuengine.wire import Log

SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """A port at which whoever has said something gets `answer`; None: and hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                assert peer.recv(1000).startswith(b"PRI * HTTP/2.0\r\n")
                if answer is not None:
                    peer.sendall(answer)
                else:
                    done.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        done.set()
        thread.join()


def test_what_speaks_rays_protocol_is_reachable():
    with listening(SETTINGS_FRAME) as port:
        check_reachable(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is something else"),
        (b"-ERR\r\n", "what listens there is something else"),
        (b"", "what listens there is something else"),
        (None, "something listens there, and does not answer within 0.1 s"),
    ],
)
def test_a_port_of_something_else_is_said_to_be_that(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, says: str
):
    monkeypatch.setattr(address, "_ANSWER_SECONDS", 0.1 if answer is None else 60)
    with listening(answer) as port, pytest.raises(ConfigError) as error:
        check_reachable(f"127.0.0.1:{port}")
    assert f"no Ray cluster at 127.0.0.1:{port}: {says}" in str(error.value)
    assert "`ray start --head`" in str(error.value)


def test_a_port_where_nothing_listens_and_an_unknown_host_are_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: nothing listens there"):
        check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=r"host name 'no\.such\.host\.invalid' is not known"):
        check_reachable("no.such.host.invalid:6379")


def test_a_host_that_drops_what_it_is_sent_is_given_up(monkeypatch: pytest.MonkeyPatch):
    def drops(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", drops)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:6379: nothing answers within 5 s"):
        check_reachable("10.0.0.1:6379")


def test_with_tls_a_listener_is_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check_reachable(f"127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.parametrize(
    "wrong", ["ray://10.0.0.1:10001", "http://h:8265", "10.0.0.1", "h:", ":6379", "h:0", "h:65536"]
)
def test_what_is_no_address_is_refused_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch, wrong: str
):
    with pytest.raises(ConfigError, match=f"ray_address={wrong} is "):
        RaySettings(address=wrong)
    monkeypatch.setenv("RAY_ADDRESS", wrong)
    with pytest.raises(ConfigError, match=rf"\$RAY_ADDRESS={wrong} is "):
        cluster_address(None)


@pytest.mark.parametrize(
    ("flag", "environ", "meant"),
    [
        (None, None, None), (None, "", None), ("", None, None), ("local", "h:1", None),
        (None, "local", None), (None, "h:1", "h:1"), (None, "auto", AUTO), ("auto", None, AUTO),
        ("auto", "h:1", "h:1"), ("g:2", "h:1", "g:2"), ("[::1]:6379", None, "[::1]:6379"),
    ],
)  # fmt: skip
def test_the_flag_and_the_environment_say_which_cluster(
    monkeypatch: pytest.MonkeyPatch, flag: str | None, environ: str | None, meant: str | None
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environ is not None:
        monkeypatch.setenv("RAY_ADDRESS", environ)
    assert cluster_address(flag) == meant


def test_a_ray_of_our_own_has_a_token_of_its_own_and_a_cluster_its_rules(
    monkeypatch: pytest.MonkeyPatch,
):
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    environment.prepare(starts_ray=False)
    assert not [name for name in environ if "AUTH" in name]
    environment.prepare(starts_ray=True)
    assert environ["RAY_AUTH_MODE"] == "token"
    assert len(environ["RAY_AUTH_TOKEN"]) == 64
    chosen = {"RAY_AUTH_MODE": "disabled"}
    monkeypatch.setattr(os, "environ", chosen)
    environment.prepare(starts_ray=True)
    assert chosen["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in chosen


def test_rays_loggers_and_what_it_prints_reach_our_handlers(caplog: pytest.LogCaptureFixture):
    printed: list[str] = []

    class Prints(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.append(record.getMessage())

    names = ("ray", "ray.serve", "ray._private.worker")
    try:
        for name in names:
            logging.getLogger(name).addHandler(Prints())
            logging.getLogger(name).propagate = False
        logging.getLogger("ray._private.worker").handlers.clear()
        logging.getLogger("ray._private.worker").propagate = True
        into_our_log()
        logging.getLogger("ray._private.worker").warning("SIGTERM handler is not set because ...")
        logging.getLogger("ray._private.worker").warning("a worker is slow")
        logging.getLogger("ray.serve").warning("one line for each request")
        logging.getLogger("ray.serve").error("bad")
        print("(raylet) a node", file=LogLines(), end="")
        out = LogLines()
        print("(raylet) a node\nis dead", file=out)
    finally:
        logging.captureWarnings(False)
        for name in names:
            log = logging.getLogger(name)
            log.handlers.clear()
            log.filters.clear()
            log.propagate = True
            log.setLevel(logging.NOTSET)
    assert not printed
    assert caplog.messages == ["a worker is slow", "bad", "(raylet) a node", "is dead"]


@pytest.mark.parametrize(
    ("messages", "failure"),
    [
        (
            ["Failed.", "Error: \x1b[36mray::X()\x1b[39m\nTraceback:\n"
             "  cuengine.errors.ModelError: no file x: y\n\nThe above\nRuntimeError: z\n"],
            "no file x: y",
        ),
        (["Failed.", "Error: \x1b[36mray::X()\x1b[39m\n  File x\nMemoryError: \x1b[31mall\n"],
         "MemoryError: all"),
        (["Failed.", ""], "Failed."),
        ([], "Ray does not say why"),
    ],
)  # fmt: skip
def test_of_rays_messages_the_error_is_told(messages: list[str], failure: str):
    assert failure_in(messages) == failure


def record(text: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "cuengine", "levelno": 20, "msg": text, **more})


def test_a_replicas_log_has_each_record_once_for_each_who_asks():
    log = ReplicaLog()
    assert log.since(0) == (0, [])
    log.handle(record("a"))
    log.handle(record("b", exc_text="Traceback"))
    number, records = log.since(0)
    assert number == 2
    assert [(one.message, one.exception) for one in records] == [("a", None), ("b", "Traceback")]
    assert log.since(2) == (2, [])
    for i in range(MAX_RECORDS + 10):
        log.handle(record(str(i)))
    number, records = log.since(2)
    assert number == MAX_RECORDS + 12
    assert [one.message for one in records] == [str(i) for i in range(10, MAX_RECORDS + 10)]
    assert [one.message for one in log.since(number - 1)[1]] == [str(MAX_RECORDS + 9)]


class Replicas:
    """What Watch asks."""

    def __init__(self) -> None:
        self.logs = {"r1": ReplicaLog(), "r2": ReplicaLog()}
        self.seen = Outlook(wanted=3)
        self.lost: set[str] = set()

    def replicas(self) -> list[str]:
        return [*self.logs, *self.lost]

    def outlook(self) -> Outlook:
        if self.seen.wanted < 0:
            raise RuntimeError("Ray cannot be asked")
        return self.seen

    def log_since(self, replica: str, number: int) -> tuple[int, list[Log]]:
        if replica in self.lost:
            raise RuntimeError("it is gone")
        return self.logs[replica].since(number)


def test_replicas_log_lines_are_shown_once_with_the_replicas_name(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "cuengine")
    replicas = Replicas()
    watch = Watch(replicas)
    replicas.logs["r1"].handle(record("engine: loaded"))
    replicas.lost.add("r0")
    watch.look()
    watch.look()
    replicas.logs["r2"].handle(record("hangs", levelno=40))
    replicas.logs["r1"].handle(record("more"))
    watch.look()
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "replica r1: engine: loaded"),
        ("INFO", "replica r1: more"),
        ("ERROR", "replica r2: hangs"),
    ]


def test_what_ray_says_is_wrong_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture):
    replicas = Replicas()
    watch = Watch(replicas)
    for problem in (None, "no GPU", "no GPU", None, "no GPU", "no CPU"):
        replicas.seen = Outlook(2, problem)
        watch.look()
    replicas.seen = Outlook(-1)
    watch.look()
    assert watch.wanted == 2
    said = [message.rpartition(": ")[2] for message in caplog.messages]
    assert said == ["no GPU", "no GPU", "no CPU"]


LEAVES = """
import signal, sys, threading, time
from cuengine.ray_backend import leaving

class Fleet:
    def end(self):
        print("ends", flush=True)
        {end}

def handler(number, frame):
    raise {error}

signal.signal(signal.SIGTERM, handler)
leaving.SECONDS = {seconds}
threading.Thread(target=threading.Event().wait).start()  # Python's own end waits for it
try:
    print("waits", flush=True)
    threading.Event().wait()
except BaseException as error:
    leaving.leave(Fleet(), error)
"""


@pytest.fixture
def leaving() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(**how: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-c", LEAVES.format(**how)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ends\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("error", "code"),
    [("SystemExit(143)", 143), ("KeyboardInterrupt", 130), ("SystemExit('x')", 1)],
)
def test_a_signal_ends_the_fleet_and_the_process_whatever_else_runs(
    leaving: Callable[..., subprocess.Popen[str]], error: str, code: int
):
    process = leaving(error=error, end="pass", seconds=60)
    assert process.wait() == code
    assert process.communicate()[1] == ""


def test_neither_a_fleet_that_does_not_end_nor_one_that_fails_holds_it_up(
    leaving: Callable[..., subprocess.Popen[str]],
):
    hangs = leaving(error="SystemExit(143)", end="threading.Event().wait()", seconds=0.01)
    assert hangs.wait() == 143
    assert hangs.communicate()[1] == "Ray does not answer; replicas may still run\n"
    fails = leaving(error="SystemExit(143)", end="raise RuntimeError('no Ray')", seconds=60)
    assert fails.wait() == 143
    assert fails.communicate()[1] == "Replicas may still run: no Ray\n"


def test_a_second_signal_waits_for_nothing(leaving: Callable[..., subprocess.Popen[str]]):
    process = leaving(error="SystemExit(143)", end="threading.Event().wait()", seconds=3600)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
