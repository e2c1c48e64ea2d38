"""`cuengine serve` with engines on Ray: two replicas, an update by SIGHUP under load, the end."""

from __future__ import annotations

import json
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_server import SECONDS, Server, start_server

pytest.importorskip("ray", reason="needs the package ray, of the extra `ray`")

pytestmark = pytest.mark.accept

FLAGS = "--port 0 --data-parallel-size 2 --data-parallel-backend ray --ray-replica-cpus 0.4"


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


@pytest.fixture
def server(tiny_chat_model: Path) -> Iterator[Server]:
    server = start_server(tiny_chat_model, FLAGS)
    yield server
    server.kill()


def replicas(url: str) -> set[str]:
    metrics = ask(url, "/metrics")
    return set(re.findall(r'^cuengine_requests_running\{replica="(\w+)"\}', metrics, re.MULTILINE))


def test_requests_are_answered_while_sighup_replaces_the_replicas_and_sigterm_ends_all(
    server: Server,
) -> None:
    url = server.until(r"Serving .* at (http://\S+)")[1]
    wanted = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = json.loads(ask(url, "/v1/completions", wanted))["choices"]
    answered = 0
    errors: list[Exception] = []
    done = threading.Event()

    def load() -> None:
        nonlocal answered
        while not done.is_set():
            try:
                answer = json.loads(ask(url, "/v1/completions", wanted))
                assert answer["choices"] == expected
                answered += 1
            except Exception as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    old: set[str] = set()
    while len(old) < 2:
        old = replicas(url)
    server.process.send_signal(signal.SIGHUP)
    server.until("All replicas have been replaced")
    new = old
    while old & new or len(new) < 2:
        new = replicas(url)
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert json.loads(ask(url, "/health"))["status"] == "ok"
    print(f"\n{answered} requests answered over HTTP while SIGHUP replaced both replicas")
    server.process.terminate()
    assert server.process.wait(SECONDS) == 0
    assert "Stopped" in "".join(server.log)


def test_an_engine_that_cannot_be_loaded_is_one_line(tiny_chat_model: Path) -> None:
    server = start_server(tiny_chat_model, f"{FLAGS} --kv-cache-memory 20KB")
    try:
        server.until(r"cuengine: The replicas do not start: --max-model-len 128 needs 8 KV")
        assert server.process.wait(SECONDS) == 1
    finally:
        server.kill()
