"""What an operator sets: limits, time, TLS, sockets, proxies; and what the log then says."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine
from serving import Serve, Served, raw_request

from cuengine.api.server import ServerSettings, listen, running_server
from cuengine.errors import ConfigError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODY = {"prompt": "a"}
BODIES = ((CHAT, HI), (COMPLETIONS, BODY), ("/v1/responses", {"input": "a"}))


async def _many(served: Served, count: int, **fields: Any) -> list[asyncio.Task[tuple[int, Any]]]:
    """So many requests, each of which the engine has."""
    before = len(served.engine.calls)
    tasks = [asyncio.create_task(served.post(COMPLETIONS, BODY | fields)) for _ in range(count)]
    await served.engine.until(lambda: len(served.engine.calls) == before + count)
    return tasks


# --- limits -------------------------------------------------------------------------------------


async def test_more_requests_than_may_run_at_once_get_429_until_one_ends(serve: Serve) -> None:
    served = await serve(max_concurrent_requests=2)
    served.engine.gate.clear()
    tasks = await _many(served, 2)
    for path, body in BODIES:
        async with served.session.post(served.server.url + path, json=body) as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) > 0
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "2 requests" in error["message"]
    # What does not run the model is answered all the same.
    assert (await served.post("/tokenize", BODY))[0] == 200
    assert (await served.get("/health"))[0] == 200
    served.engine.gate.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
    assert (await served.post(COMPLETIONS, BODY))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_more_prompts_than_may_wait_get_429_until_one_has_its_first_token(
    serve: Serve, stream: bool
) -> None:
    served = await serve(FakeEngine(text="abc", delay=0.05), max_queued_requests=3)
    served.engine.gate.clear()
    tasks = await _many(served, 3)
    status, error = await served.error(CHAT, HI | {"stream": stream})
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    assert "3 prompts waiting" in error["message"]
    served.engine.gate.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3
    assert (await served.post(CHAT, HI | {"stream": stream}))[0] == 200


async def test_a_request_of_many_prompts_is_taken_when_nothing_waits(serve: Serve) -> None:
    served = await serve(max_queued_requests=3)
    status, answer = await served.post(COMPLETIONS, {"prompt": ["a"] * 10})
    assert (status, len(answer["choices"])) == (200, 10)


async def test_places_are_given_back_however_a_request_ends(serve: Serve) -> None:
    engine = FakeEngine(error=ZeroDivisionError())
    served = await serve(engine, max_concurrent_requests=1, max_queued_requests=1)
    for body in (BODY, BODY | {"stream": True}, {"prompt": 5}, b"{"):
        await served.post(COMPLETIONS, body)
    engine.error = None
    engine.gate.clear()
    (task,) = await _many(served, 1)
    task.cancel()
    await engine.until(lambda: engine.calls[-1].aborted)
    engine.gate.set()
    async with asyncio.timeout(60):
        while (await served.post(COMPLETIONS, BODY))[0] != 200:
            await asyncio.sleep(0.01)


async def test_a_prompt_over_the_operators_limit_is_400(serve: Serve) -> None:
    served = await serve(max_prompt_tokens=25)
    for path, good, bad, param in (
        (COMPLETIONS, {"prompt": "a" * 25}, {"prompt": "a" * 26}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 25}, {"prompt": [1] * 26}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, {"prompt": ["a", "b" * 26]}, "prompt"),
        (CHAT, HI, {"messages": HI["messages"] * 2}, "messages"),
        ("/v1/responses", {"input": "a"}, {"input": "a" * 10}, "input"),
    ):
        assert (await served.post(path, good))[0] == 200
        status, error = await served.error(path, bad)
        assert (status, error["param"]) == (400, param)
        assert error["code"] == "context_length_exceeded"
        assert "this server's limit" in error["message"]
    # Counting tokens is no use of the model.
    assert (await served.post("/tokenize", {"prompt": "a" * 26}))[0] == 200


async def test_an_answer_that_takes_too_long_is_504_and_aborted(serve: Serve) -> None:
    served = await serve(request_timeout=0.2)
    served.engine.gate.clear()
    status, error = await served.error(COMPLETIONS, {"prompt": ["a", "b"]})
    assert (status, error["code"]) == (504, "request_timeout")
    assert "0.2 seconds" in error["message"]
    await served.engine.until(lambda: all(call.aborted for call in served.engine.calls))
    served.engine.gate.set()
    assert (await served.post(COMPLETIONS, BODY))[0] == 200


async def test_a_stream_that_takes_too_long_ends_with_the_error(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abcdefghij" * 9, delay=0.1), request_timeout=1)
    events = await served.events(COMPLETIONS, BODY)
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["code"] == "request_timeout"


# --- ids and the log ----------------------------------------------------------------------------


async def test_a_clients_request_id_comes_back_and_one_that_cannot_be_shown_does_not(
    serve: Serve,
) -> None:
    served = await serve(cors_origins=("*",))
    for path, body in ((COMPLETIONS, BODY), (COMPLETIONS, BODY | {"stream": True}),
                       (COMPLETIONS, {}), ("/v1/nothing", {})):  # fmt: skip
        for given, kept in (("abc-1", True), ("x" * 129, False), ("a b", False), ("", False)):
            async with served.session.post(
                served.server.url + path, json=body, headers={"X-Request-Id": given}
            ) as answer:
                shown = answer.headers["X-Request-Id"]
                assert (shown == given) == kept
                assert 5 <= len(shown) <= 32
    ids = set()
    for _ in range(3):
        async with served.session.get(served.server.url + "/health") as answer:
            ids.add(answer.headers["X-Request-Id"])
    assert len(ids) == 3


async def test_the_access_log_has_a_line_for_every_request(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    with caplog.at_level(logging.INFO, "cuengine.access"):
        await served.post(COMPLETIONS, BODY, headers={"X-Request-Id": "id-7"})
        await served.post("/v1/nothing?a=1", BODY)
        while len(lines := [r for r in caplog.records if r.name == "cuengine.access"]) < 2:
            await asyncio.sleep(0.01)
    assert '127.0.0.1 "POST /v1/completions" 200 ' in lines[0].getMessage()
    assert lines[0].getMessage().endswith(" s id-7")
    fields = lines[1].fields  # type: ignore[attr-defined]
    assert (fields["method"], fields["path"], fields["status"]) == (
        "POST",
        "/v1/nothing?a=1",
        404,
    )
    assert fields["bytes"] > 0
    assert fields["seconds"] >= 0


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "cuengine.access"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
async def test_a_stream_whose_client_leaves_has_a_line_with_its_tokens_so_far(
    serve: Serve, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    engine = FakeEngine(text="x" * 900, delay=0.005)
    served = await serve(engine)
    body = dict(BODIES)[path] | {"stream": True}
    with caplog.at_level(logging.INFO, "cuengine.access"):
        reader, writer = await served.raw(raw_request(path, body, X_Request_Id="id-9"))
        received = await reader.readuntil(b"x") + await reader.readuntil(b"x")
        writer.close()
        await engine.until(lambda: engine.calls[0].aborted)
        while not _lines(caplog):
            await asyncio.sleep(0.01)
    (line,) = _lines(caplog)
    assert f'127.0.0.1 "POST {path}" 200 ' in line.getMessage()
    assert re.search(r" s id-9 \(client left after \d+ tokens?\)$", line.getMessage())
    fields = line.fields  # type: ignore[attr-defined]
    assert (fields["client_left"], fields["request_id"]) == (True, "id-9")
    assert 1 <= fields["tokens"] < 900
    assert fields["bytes"] >= len(received)
    assert fields["seconds"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_leaves_before_anything_was_sent_is_logged_with_499(
    serve: Serve, caplog: pytest.LogCaptureFixture, stream: bool, prompts: int
) -> None:
    engine = FakeEngine(text="abc")
    engine.gate.clear()
    served = await serve(engine)
    body = {"prompt": ["a"] * prompts, "stream": stream}
    with caplog.at_level(logging.INFO, "cuengine.access"):
        _, writer = await served.raw(raw_request(COMPLETIONS, body))
        await engine.until(lambda: len(engine.calls) == prompts)
        writer.close()
        while not _lines(caplog):
            await asyncio.sleep(0.01)
    (line,) = _lines(caplog)
    assert f'127.0.0.1 "POST {COMPLETIONS}" 499 0 B ' in line.getMessage()
    assert line.getMessage().endswith(" (client left)")
    assert line.fields["tokens"] == 0  # type: ignore[attr-defined]


async def test_tokens_of_all_prompts_count_where_the_client_leaves(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(text="x" * 900, delay=0.005)
    served = await serve(engine)
    with caplog.at_level(logging.INFO, "cuengine.access"):
        body = {"prompt": ["a"] * 4, "n": 3, "stream": True}
        reader, writer = await served.raw(raw_request(COMPLETIONS, body))
        for _ in range(24):
            await reader.readuntil(b'"text":"x"')
        writer.close()
        while not _lines(caplog):
            await asyncio.sleep(0.01)
    (line,) = _lines(caplog)
    assert line.fields["tokens"] >= 24  # type: ignore[attr-defined]


async def test_a_stream_that_the_server_ends_is_not_said_to_have_been_left(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(text="x" * 900)
    engine.gate.clear()
    served = await serve(engine)
    with caplog.at_level(logging.INFO, "cuengine.access"):
        _, writer = await served.raw(raw_request(COMPLETIONS, BODY | {"stream": True}))
        await engine.until(lambda: len(engine.calls) == 1)
        await served.server.stop()  # the engine says nothing, so the connection is cut
        assert engine.calls[0].aborted
        writer.close()
    assert not _lines(caplog)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": ("k",)}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        *([({"host": "::"}, True), ({"host": "::1"}, False)] if _has_ipv6() else []),
    ],
)
async def test_a_server_that_all_may_use_says_so_in_one_line(
    serve: Serve, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warned: bool
) -> None:
    with caplog.at_level(logging.INFO, "cuengine.api"):
        served = await serve(**settings)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == warned
    for line in lines:
        assert f"whoever reaches port {served.server.port} may use the model" in line
        assert "--api-key" in line


async def test_the_log_of_a_failure_names_the_request(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(FakeEngine(error=ZeroDivisionError("x")))
    await served.post(COMPLETIONS, BODY, headers={"X-Request-Id": "id-8"})
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "id-8" in record.getMessage()


# --- addresses ----------------------------------------------------------------------------------


async def test_under_a_root_path_every_route_answers_with_it_and_without(serve: Serve) -> None:
    served = await serve(root_path="/llm")
    assert served.server.url.endswith("/llm")
    base = served.server.url.removesuffix("/llm")
    for prefix in ("", "/llm"):
        async with served.session.post(f"{base}{prefix}{COMPLETIONS}", json=BODY) as answer:
            assert answer.status == 200
        async with served.session.get(f"{base}{prefix}/") as answer:
            assert "<!doctype html>" in await answer.text()
        async with served.session.get(f"{base}{prefix}/openapi.json") as answer:
            assert (await answer.json())["servers"] == [{"url": "/llm"}]
    async with served.session.get(f"{base}/other/health") as answer:
        assert answer.status == 404


@pytest.mark.parametrize("root_path", ["", "/llm", "/v1", "/v1/v1"])
async def test_no_root_path_leads_past_the_api_key(serve: Serve, root_path: str) -> None:
    served = await serve(api_keys=("k",), root_path=root_path)
    base = served.server.url.removesuffix(root_path)
    for path in ("/v1/models", COMPLETIONS, "/v1/nothing", "/dashboard/events"):
        for prefix in ("", root_path):
            async with served.session.post(f"{base}{prefix}{path}", json=BODY) as answer:
                assert answer.status == 401


def _curl_over(path: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))


async def test_a_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    settings = ServerSettings(uds=str(path))
    async with running_server(FakeEngine(), settings) as server:
        assert server.url == f"unix:{path}"
        async with (
            _curl_over(path) as session,
            session.post(f"http://x{COMPLETIONS}", json=BODY | {"stream": True}) as answer,
        ):
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(ConfigError, match="another server listens there"):
            listen(settings)
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()


async def test_a_socket_file_left_behind_is_taken_over_and_another_file_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listen(ServerSettings(uds=str(path))).close()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        listen(ServerSettings(uds=str(path)))
    assert path.read_text() == "precious"
    for bad in (tmp_path / "none" / "s", tmp_path / ("s" * 200)):
        with pytest.raises(ConfigError, match="cannot listen at"):
            listen(ServerSettings(uds=str(bad)))


# --- TLS ----------------------------------------------------------------------------------------


def _certificate(folder: Path, name: str, *options: str) -> tuple[str, str]:
    """Files with a certificate for localhost, which is its own authority, and with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: install openssl")
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out"]
    command += [str(certificate), "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *(options or ("-nodes",))], check=True, capture_output=True)
    return str(certificate), str(key)


async def test_https_is_served_and_a_client_may_have_to_show_a_certificate(
    tmp_path: Path,
) -> None:
    certificate, key = _certificate(tmp_path, "one")
    other = _certificate(tmp_path, "other")
    for ca, good, bad in ((None, None, None), (certificate, (certificate, key), other)):
        settings = ServerSettings(
            port=0, ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=ca
        )
        async with running_server(FakeEngine(), settings) as server:
            assert server.url.startswith("https://")
            assert await _status_over_tls(server.url, certificate, good) == 200
            if ca is not None:
                for refused in (None, bad):
                    with pytest.raises((aiohttp.ClientError, OSError)):
                        await _status_over_tls(server.url, certificate, refused)
                assert await _status_over_tls(server.url, certificate, good) == 200


async def _status_over_tls(url: str, ca: str, own: tuple[str, str] | None) -> int:
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(*own)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + COMPLETIONS, json=BODY, ssl=context) as answer,
    ):
        await answer.read()
        return answer.status


def test_files_that_are_no_use_for_tls_are_named(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "one")
    _, other = _certificate(tmp_path, "other")
    locked, locked_key = _certificate(tmp_path, "locked", "-passout", "pass:secret")
    text = tmp_path / "text"
    text.write_text("hello")
    for files, says in (
        ((certificate, "none.key", None), "No such file"),
        (("none.crt", key, None), "No such file"),
        ((certificate, other, None), "the key is not that of the certificate"),
        ((str(text), None, None), "no certificate or key in PEM"),
        ((str(tmp_path), None, None), "cannot use"),
        ((certificate, None, None), "no certificate or key in PEM"),
        ((certificate, key, str(text)), "as certificate authorities"),
        ((locked, locked_key, None), "encrypted"),
    ):
        settings = ServerSettings(
            port=0, ssl_certfile=files[0], ssl_keyfile=files[1], ssl_ca_certs=files[2]
        )
        with pytest.raises(ConfigError, match=says):
            listen(settings)


@pytest.mark.parametrize(
    "bad",
    [{"ssl_keyfile": "x"}, {"ssl_ca_certs": "x"}, {"root_path": "llm"}, {"root_path": "/llm/"},
     {"root_path": "/a//b"}, {"root_path": "/{x}"}, {"max_n": 0}, {"max_n": 129},
     {"max_concurrent_requests": 0}, {"max_queued_requests": 0}, {"max_prompt_tokens": 0},
     {"request_timeout": 0}, {"tool_call_parser": "other"}],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))[:3]):
        ServerSettings(**bad)
