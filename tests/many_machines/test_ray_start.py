"""`cuengine serve` with engines on Ray: how it starts and ends, and what it leaves behind.

What does not need Ray is tested in tests/unit/test_ray_start.py.
"""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_server import SECONDS, Server, start_server

ray = pytest.importorskip("ray", reason="needs the package ray, of the extra `ray`")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from cuengine.errors import ConfigError  # noqa: E402
from cuengine.ray_backend import connection  # noqa: E402

pytestmark = pytest.mark.accept

FLAGS = "--port 0 --data-parallel-backend ray --ray-replica-cpus 0.4"
TOO_MUCH = "--port 0 --data-parallel-backend ray --ray-replica-cpus 1000"
"""CPUs that no machine has: the replicas are being started for ever."""

WAYS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


def processes_with(mark: str) -> list[str]:
    """Command lines of those that have it in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another user's
            pass
    return found


def wait_until_gone(mark: str) -> None:
    left = processes_with(mark)
    for _ in range(SECONDS * 10):
        if not left:
            return
        time.sleep(0.1)
        left = processes_with(mark)
    raise AssertionError(f"still there: {left}")


@contextmanager
def server_of(folder: Path, flags: str, **environ: str) -> Iterator[Server]:
    server = Server(folder, flags, **environ)
    try:
        yield server
    finally:
        server.kill()


def said(server: Server) -> str:
    """All of it; the server has ended."""
    server.until(r"\(the end\)")
    return "".join(server.log).replace("(the end)", "")


def assert_quiet(log: str) -> None:
    """Nothing but our own lines."""
    assert not re.search("Traceback|\x1b|\\*\\*\\* SIG|ServeReplica|raylet", log), log
    assert all(re.match(r"\d\d:\d\d:\d\d (INFO|WARNING) ", line) for line in log.splitlines()), log


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:9", "nothing listens there"),
        ("no.such.host.invalid:6379", "the host name 'no.such.host.invalid' is not known"),
    ],
)
def test_a_wrong_address_is_one_line(tiny_chat_model: Path, address: str, why: str):
    with server_of(tiny_chat_model, f"{FLAGS} --ray-address {address}") as server:
        assert server.process.wait(SECONDS) == 1
        log = said(server)
    lines = [line for line in log.splitlines() if " INFO " not in line]
    assert len(lines) == 1, log
    assert lines[0].startswith(f"cuengine: There is no Ray cluster at {address}: {why}")
    assert "ray start --head" in lines[0]


def test_auto_on_a_machine_without_a_cluster_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def finds_none(_address: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection, "canonicalize_bootstrap_address", finds_none)
    with pytest.raises(ConfigError, match="auto is for a machine that belongs to a Ray cluster"):
        connection.Connection().connect("auto")


@pytest.mark.parametrize(("number", "code"), WAYS)
def test_a_signal_while_ray_starts_ends_all_of_it_without_a_word(
    tiny_chat_model: Path, number: int, code: int
):
    mark = uuid.uuid4().hex
    with server_of(tiny_chat_model, FLAGS, MARK=mark) as server:
        while not any("gcs_server" in process for process in processes_with(mark)):
            assert server.process.poll() is None, said(server)
            time.sleep(0.01)
        server.process.send_signal(number)
        assert server.process.wait(SECONDS) == code
        assert_quiet(said(server))
        wait_until_gone(mark)


@pytest.mark.parametrize(("number", "code"), WAYS)
def test_a_signal_while_replicas_start_in_a_ray_of_our_own_ends_all_of_it(
    tiny_chat_model: Path, number: int, code: int
):
    mark = uuid.uuid4().hex
    with server_of(tiny_chat_model, TOO_MUCH, MARK=mark) as server:
        server.until("Ray starts the replicas")
        server.process.send_signal(number)
        assert server.process.wait(SECONDS) == code
        assert_quiet(said(server))
        wait_until_gone(mark)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_server_with_a_ray_of_its_own(tiny_chat_model: Path, number: int):
    mark = uuid.uuid4().hex
    server = start_server(tiny_chat_model, FLAGS, MARK=mark)
    try:
        assert len(processes_with(mark)) > 4
        server.process.send_signal(number)
        assert server.process.wait(SECONDS) == (0 if number == signal.SIGTERM else -number)
        wait_until_gone(mark)
        assert_quiet(said(server))
    finally:
        server.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address; this process is connected to it."""
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    for attempts_left in (3, 2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(**node)
            break
        except Exception:  # a busy machine takes longer than Ray's 30 seconds
            cluster.shutdown()
            if not attempts_left:
                raise
    ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def applications() -> set[str]:
    return set(serve.status().applications)


def wait_for_applications(expected: set[str]) -> None:
    for _ in range(SECONDS * 10):
        if applications() == expected:
            return
        time.sleep(0.1)
    raise AssertionError(f"there are {applications()}, not {expected}")


@pytest.mark.parametrize(("number", "code"), WAYS)
def test_a_signal_while_replicas_start_on_a_cluster_deletes_the_application(
    tiny_chat_model: Path, cluster: str, number: int, code: int
):
    with server_of(tiny_chat_model, f"{TOO_MUCH} --ray-address {cluster}") as server:
        name = server.until(r"Ray starts the replicas, as the application (\S+)")[1]
        assert applications() == {name}
        server.process.send_signal(number)
        assert server.process.wait(SECONDS) == code
        assert_quiet(said(server))
    wait_for_applications(set())


def test_an_application_that_the_flag_names_stays(tiny_chat_model: Path, cluster: str):
    flags = f"{TOO_MUCH} --ray-address {cluster} --ray-app named"
    with server_of(tiny_chat_model, flags) as server:
        server.until("Ray starts the replicas, as the application named")
        server.process.terminate()
        assert server.process.wait(SECONDS) == 143
        assert_quiet(said(server))
    assert applications() == {"named"}
    serve.delete("named")


def metrics(server: Server) -> str:
    url = json.loads(server.until(r".*Serving .* at .*")[0])["message"].rpartition(" ")[2]
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def test_in_json_each_line_is_an_object_also_those_of_replicas(tiny_chat_model: Path, cluster: str):
    flags = f"{FLAGS} --ray-address {cluster} --log-format json"
    with server_of(tiny_chat_model, flags) as server:
        server.until("replica [0-9a-z]+: engine: ")
        text = metrics(server)
        assert "cuengine_replicas 1.0" in text
        assert "cuengine_replicas_wanted 1.0" in text
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0
        lines = [json.loads(line) for line in said(server).splitlines()]
    assert {line["level"] for line in lines} == {"info"}, lines
    assert lines[-1]["message"] == "Stopped"
    wait_for_applications(set())


def test_a_second_server_updates_a_shared_application_and_the_first_one_s_end_loses_nothing(
    tiny_chat_model: Path, cluster: str
):
    flags = f"{FLAGS} --ray-address {cluster} --ray-app shared --log-format json"
    with server_of(tiny_chat_model, flags) as first:
        first.until("Serving")
        with server_of(tiny_chat_model, f"{flags} --max-num-seqs 7") as second:
            second.until("Serving")
            first.process.terminate()
            assert first.process.wait(SECONDS) == 0
            assert applications() == {"shared"}
            assert "cuengine_replicas 1.0" in metrics(second)
            url = json.loads(second.until(r".*Serving .* at .*")[0])["message"].split()[-1]
            body = json.dumps({"prompt": "abc", "max_tokens": 3, "ignore_eos": True}).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
            second.process.terminate()
            assert second.process.wait(SECONDS) == 0
    assert applications() == {"shared"}
    serve.delete("shared")


def test_replicas_are_what_is_installed_whatever_lies_in_the_working_folder(
    tiny_chat_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "cuengine"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('not the one')")
    server = start_server(tiny_chat_model, FLAGS, tmp_path)
    try:
        server.until(r"Serving .* at")
        server.process.send_signal(signal.SIGHUP)
        server.until("All replicas have been replaced")
        assert "could not be looked at" not in "".join(server.log)
    finally:
        server.kill()
