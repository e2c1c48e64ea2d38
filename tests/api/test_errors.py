"""Every error has OpenAI's shape and the right status, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Serve, Served, raw_request

from cuengine.api.connection import Connection
from cuengine.errors import EngineDiedError, EngineStoppedError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_an_unknown_model_is_404_and_the_served_ones_are_listed(serve: Serve) -> None:
    served = await serve(served_model_names=("one", "two"))
    for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        status, error = await served.error(path, body | {"model": "gpt-4"})
        assert status == 404
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "one, two" in error["message"]
    assert (await served.post(CHAT, HI | {"model": "two"}))[1]["model"] == "two"
    assert (await served.post(CHAT, HI))[1]["model"] == "one"


async def test_models_are_listed_and_found_by_name_with_slashes(serve: Serve) -> None:
    served = await serve(served_model_names=("org/model", "short"))
    _, answer = await served.get("/v1/models")
    assert [model["id"] for model in answer["data"]] == ["org/model", "short"]
    status, model = await served.get("/v1/models/org/model")
    assert status == 200
    assert model["object"] == "model"
    assert (await served.get("/v1/models/other"))[0] == 404


async def test_an_unknown_route_is_404_and_a_wrong_method_405_with_allow(serve: Serve) -> None:
    served = await serve()
    status, answer = await served.get("/v1/embeddings")
    assert status == 404
    assert "/v1/embeddings" in answer["error"]["message"]
    async with served.session.get(served.server.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "POST" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "Expected `object`"),
        (b'"text"', "Expected `object`"),
        (b'{"prompt": "a"} x', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": ' + b"[" * 100_000, "nested"),
        (b'{"unknown": ' + b'{"a":' * 100_000, "nested"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "out of range"),
    ],
)
async def test_a_body_that_is_no_json_is_400_and_says_why(
    serve: Serve, body: bytes, says: str
) -> None:
    served = await serve()
    status, error = await served.error(COMPLETIONS, body)
    assert status == 400
    assert says in error["message"]
    assert (await served.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


async def test_only_json_is_read(serve: Serve) -> None:
    served = await serve()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, error = await served.error(
            COMPLETIONS, {"prompt": "a"}, headers={"Content-Type": kind}
        )
        assert status == 415
        assert kind in error["message"]


async def test_a_prompt_too_long_for_the_context_says_so_streamed_or_not(serve: Serve) -> None:
    served = await serve(FakeEngine(context=10))
    for stream in (False, True):
        status, error = await served.error(COMPLETIONS, {"prompt": "a" * 20, "stream": stream})
        assert status == 400
        assert error["code"] == "context_length_exceeded"


async def test_text_that_cannot_fit_is_refused_without_tokenizing_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(FakeEngine(context=10))
    monkeypatch.setattr(served.engine.tokenizer, "encode", None)
    for path, body in (
        (COMPLETIONS, {"prompt": "a" * 11}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 11}]}),
    ):
        status, error = await served.error(path, body)
        assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_and_states_the_limit(
    serve: Serve, chunked: bool
) -> None:
    served = await serve(max_body_bytes=1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()

    async def pieces() -> Any:
        yield body

    async with served.session.post(
        served.server.url + COMPLETIONS,
        data=pieces() if chunked else body,
        headers={"Content-Type": "application/json"},
    ) as response:
        assert response.status == 413
        assert "1000 bytes" in (await response.json())["error"]["message"]
    assert (await served.post(COMPLETIONS, {"prompt": "a" * 900}))[0] == 200


async def test_a_body_that_does_not_arrive_is_408(serve: Serve) -> None:
    served = await serve(body_timeout=0.1)
    request = raw_request(COMPLETIONS, {"prompt": "a"})
    reader, writer = await served.raw(request[:-3])
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error":' in answer
    writer.close()


async def test_headers_that_do_not_arrive_are_408(serve: Serve) -> None:
    served = await serve(header_timeout=0.1)
    reader, writer = await served.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()
    assert (await served.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


async def test_the_deadline_for_headers_does_not_end_a_long_answer(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abcd", delay=0.1), header_timeout=0.05)
    status, answer = await served.post(COMPLETIONS, {"prompt": "a"})
    assert (status, answer["choices"][0]["text"]) == (200, "abcd")


async def test_broken_chunked_encoding_is_400(serve: Serve) -> None:
    served = await serve()
    reader, writer = await served.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n"
    )
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer[8:13] == b" 400 "
    assert b'{"error":' in answer
    writer.close()
    assert (await served.post(COMPLETIONS, {"prompt": "a"}))[0] == 200


async def test_an_expectation_that_is_none_is_417_in_the_same_shape(serve: Serve) -> None:
    served = await serve()
    for path in (COMPLETIONS, "/nothing"):
        status, error = await served.error(path, {"prompt": "a"}, headers={"Expect": "wonders"})
        assert status == 417
        assert "wonders" in error["message"]


async def test_a_failure_nobody_expected_is_500_without_its_traceback(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(FakeEngine(error=ZeroDivisionError("secret detail")))
    status, error = await served.error(COMPLETIONS, {"prompt": "a"})
    assert status == 500
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert any(record.exc_info for record in caplog.records)


async def test_a_stopped_engine_is_503_with_retry_after(serve: Serve) -> None:
    served = await serve(FakeEngine(error=EngineStoppedError("the engine has stopped")))
    async with served.session.post(
        served.server.url + COMPLETIONS, json={"prompt": "a", "stream": True}
    ) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "engine_stopped"


async def test_a_failed_engine_shows_in_health(serve: Serve) -> None:
    served = await serve()
    assert await served.get("/health") == (200, {"status": "ok"})
    served.engine.failed = True
    assert (await served.get("/health"))[0] == 503


async def test_while_the_engine_is_started_again_the_server_is_alive_but_not_ready(
    serve: Serve,
) -> None:
    served = await serve()
    served.engine.restarting = True
    assert await served.get("/health") == (200, {"status": "restarting"})
    status, answer = await served.get("/ready")
    assert (status, answer["error"]["code"]) == (503, "engine_restarting")
    served.engine.restarting = False
    assert await served.get("/ready") == (200, {"status": "ok"})


async def test_a_request_that_the_engine_dies_of_is_500_and_says_so(serve: Serve) -> None:
    served = await serve(FakeEngine(error=EngineDiedError("it died of this request")))
    status, error = await served.error(CHAT, HI)
    assert (status, error["code"], error["type"]) == (500, "engine_died", "server_error")
    assert error["message"] == "it died of this request"


async def test_unknown_fields_are_ignored_and_logged_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    with caplog.at_level(logging.WARNING, "cuengine.api"):
        for _ in range(3):
            status, _ = await served.post(CHAT, HI | {"frobnicate": 1, "user": "me"})
            assert status == 200
    assert len([r for r in caplog.records if "frobnicate" in r.getMessage()]) == 1
    assert not [r for r in caplog.records if "user" in r.getMessage()]


async def test_what_a_client_sends_fills_neither_answers_nor_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    status, error = await served.error(CHAT, HI | {"model": "m" * 100_000})
    assert status == 404
    assert len(error["message"]) < 3000
    with caplog.at_level(logging.WARNING, "cuengine.api"):
        for i in range(5):
            await served.post(CHAT, HI | {f"made up {i} {j}": 1 for j in range(1000)})
    assert sum(len(record.getMessage()) for record in caplog.records) < 30_000


async def test_health_can_be_asked_by_head(serve: Serve) -> None:
    served = await serve()
    async with served.session.head(served.server.url + "/health") as response:
        assert response.status == 200


async def test_tokenize_and_detokenize_have_vllms_shapes(serve: Serve) -> None:
    served = await serve()
    _, answer = await served.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert answer["tokens"] == [104, 195, 169]
    assert (answer["count"], answer["max_model_len"]) == (3, 100_000)
    assert answer["token_strs"][0] == "h"
    _, answer = await served.post("/tokenize", HI)
    assert bytes(answer["tokens"]).decode() == "<user>hi<assistant>"
    _, answer = await served.post("/detokenize", {"tokens": [104, 195, 169]})
    assert answer == {"prompt": "hé"}
    assert (await served.error("/detokenize", {"tokens": [300]}))[1]["param"] == "tokens"
    assert (await served.error("/tokenize", {}))[1]["param"] == "prompt"


# --- API keys and CORS --------------------------------------------------------------------------


async def test_with_api_keys_v1_needs_one_and_the_rest_is_open(serve: Serve) -> None:
    served = await serve(api_keys=("key-1", "key-2"))
    for header in (None, "Bearer wrong", "Basic key-1", "key-1", "Bearer ", "Bearer \u00fc"):
        headers = {} if header is None else {"Authorization": header}
        status, error = await served.error(CHAT, HI, headers=headers)
        assert status == 401
        assert error["code"] == "invalid_api_key"
        assert (await served.get("/v1/nothing", headers=headers))[0] == 401
    for key in ("key-1", "key-2"):
        assert (await served.post(CHAT, HI, headers={"Authorization": f"Bearer {key}"}))[0] == 200
    for path in ("/health", "/version", "/metrics", "/"):
        assert (await served.get(path))[0] == 200


async def test_only_allowed_origins_get_cors_headers(serve: Serve) -> None:
    served = await serve(cors_origins=("https://good.example",), api_keys=("k",))
    for origin, allowed in (("https://good.example", True), ("https://bad.example", False)):
        async with served.session.options(
            served.server.url + CHAT,
            headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
        ) as response:
            assert ("Access-Control-Allow-Origin" in response.headers) == allowed
        async with served.session.post(
            served.server.url + CHAT,
            json=HI | {"stream": True},
            headers={"Origin": origin, "Authorization": "Bearer k"},
        ) as response:
            assert response.status == 200
            assert ("Access-Control-Allow-Origin" in response.headers) == allowed


# --- malformed requests -------------------------------------------------------------------------

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "n", "temperature", "top_p", "top_k", "stop", "seed", "stream",
     "stream_options", "logprobs", "top_logprobs", "logit_bias", "echo", "max_tokens", "best_of",
     "response_format", "tools", "tool_choice", "chat_template_kwargs", "prompt_logprobs", "user",
     "stop_token_ids", "priority", "cache_salt", "documents", "tokens", "anything"]
)  # fmt: skip
_BODIES = st.binary(max_size=60) | st.dictionaries(_FIELDS, _VALUES, max_size=6).map(
    lambda fields: json.dumps(fields).encode()
)
_GOOD_BODIES = st.tuples(
    st.sampled_from([HI, {"prompt": "a"}, {"messages": HI["messages"], "prompt": [1, 2]}]),
    st.dictionaries(_FIELDS, _VALUES, max_size=2),
).map(lambda pair: json.dumps(pair[1] | pair[0]).encode())


async def test_malformed_bodies_never_make_a_5xx_and_the_server_goes_on(serve: Serve) -> None:
    served = await serve()
    loop = asyncio.get_running_loop()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
        body=_BODIES | _GOOD_BODIES,
    )
    def send(path: str, body: bytes) -> None:
        status, content = asyncio.run_coroutine_threadsafe(served.post(path, body), loop).result(20)
        assert status in (200, 400, 404), (status, content, body)

    await asyncio.to_thread(send)
    await _assert_serves(served)


async def test_malformed_http_never_makes_a_5xx_and_the_server_goes_on(serve: Serve) -> None:
    served = await serve(header_timeout=0.2, body_timeout=0.2)
    good = raw_request(COMPLETIONS, {"prompt": "a"})
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n{}",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        good.replace(b"application/json", b"application/json\r\nContent-Encoding: gzip"),
        good.replace(b"application/json", b";;;="),
        good[:40],
    ):
        reader, writer = await served.raw(data)
        answer = await asyncio.wait_for(reader.read(20), 60)
        assert answer[9:10] != b"5", (data[:60], answer)
        writer.close()
    await _assert_serves(served)


async def test_a_body_that_cannot_be_read_is_no_failure_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    for method, path in (("POST", COMPLETIONS), ("GET", "/health"), ("GET", "/nothing")):
        good = raw_request(path, {"prompt": "a"}).replace(b"POST", method.encode(), 1)
        for coding in (b"gzip", b"deflate", b"br"):
            data = good.replace(b"Host:", b"Content-Encoding: %b\r\nHost:" % coding, 1)
            # In one piece with its headers, and after them, when they may have been answered.
            head, body = data.split(b"\r\n\r\n")
            for pieces in ([data], [head + b"\r\n\r\n", body]):
                reader, writer = await served.connect()
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.02)
                answer = await asyncio.wait_for(reader.read(12), 60)
                assert answer[9:10] in (b"2", b"4"), (data, answer)
                writer.close()
    await _assert_serves(served)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_connection_given_up_before_its_body_is_read_is_no_failure_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that stood still: the deadline for headers passes as they are taken in."""
    take = Connection.data_received

    def take_slowly(connection: Connection, data: bytes) -> None:
        take(connection, data)
        time.sleep(0.3)

    served = await serve(header_timeout=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "data_received", take_slowly)
        reader, writer = await served.raw(raw_request(COMPLETIONS, {"prompt": "a"})[:-3])
        assert (await asyncio.wait_for(reader.read(12), 60)).endswith(b"408")
    writer.close()
    await _assert_serves(served)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def _assert_serves(served: Served) -> None:
    status, answer = await served.post(COMPLETIONS, {"prompt": "a"})
    assert (status, answer["choices"][0]["text"]) == (200, "Hello!")
    assert served.server.in_flight == 0
