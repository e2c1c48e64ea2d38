"""Streams that wait, fail or are read slowly, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Serve, Served, raw_request

from cuengine.errors import RequestError

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 1000}


async def test_a_stream_has_the_headers_that_proxies_need(serve: Serve) -> None:
    served = await serve()
    async with served.session.post(
        served.server.url + COMPLETIONS, json=BODY | {"stream": True}
    ) as response:
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"


async def test_tokens_are_sent_as_they_come(serve: Serve) -> None:
    engine = FakeEngine(text="abc")
    served = await serve(engine)
    engine.gate.clear()
    reader, writer = await served.raw(raw_request(COMPLETIONS, BODY | {"stream": True}))
    await engine.until(lambda: len(engine.calls) == 1)
    for letter in "abc":
        engine.gate.set()
        await asyncio.sleep(0)
        engine.gate.clear()
        line = await asyncio.wait_for(reader.readuntil(b"}\n\n"), 60)
        event = json.loads(line[line.index(b"data: ") + 6 :])
        assert event["choices"][0]["text"] == letter
    assert await asyncio.wait_for(reader.readuntil(b"[DONE]\n\n"), 60)
    writer.close()


async def test_a_waiting_stream_gets_comment_lines_before_and_between_tokens(serve: Serve) -> None:
    engine = FakeEngine(text="ab")
    served = await serve(engine, keepalive_seconds=0.05)
    engine.gate.clear()
    reader, writer = await served.raw(raw_request(COMPLETIONS, BODY | {"stream": True}))
    comment = b": keep-alive\n\n"
    for _ in range(3):
        await asyncio.wait_for(reader.readuntil(comment), 60)
    engine.gate.set()
    await asyncio.sleep(0)
    engine.gate.clear()
    await asyncio.wait_for(reader.readuntil(b'"text":"a"'), 60)
    for _ in range(2):
        await asyncio.wait_for(reader.readuntil(comment), 60)
    engine.gate.set()
    rest = await asyncio.wait_for(reader.readuntil(b"[DONE]\n\n"), 60)
    assert b'"text":"b"' in rest
    writer.close()


async def test_a_request_refused_after_a_wait_ends_its_stream_with_the_error(serve: Serve) -> None:
    engine = FakeEngine(error=RequestError("too long", code="context_length_exceeded"))
    served = await serve(engine, keepalive_seconds=0.05)
    engine.gate.clear()
    answer = asyncio.create_task(served.events(COMPLETIONS, BODY))
    await asyncio.sleep(0.2)
    engine.gate.set()
    (event,) = await answer
    assert event["error"]["code"] == "context_length_exceeded"


async def test_an_error_in_mid_stream_is_an_event_and_the_stream_ends(serve: Serve) -> None:
    engine = FakeEngine(text="abc", error=ZeroDivisionError("secret"), error_at=2)
    served = await serve(engine)
    events = await served.events(COMPLETIONS, BODY)
    assert [e["choices"][0]["text"] for e in events[:2]] == ["a", "b"]
    assert events[2]["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(events)
    assert len(events) == 3


async def test_one_failing_prompt_of_several_aborts_the_others(serve: Serve) -> None:
    engine = FakeEngine(text="abc", error=RequestError("no", param="prompt"), error_at=1)
    served = await serve(engine)
    status, error = await served.error(COMPLETIONS, BODY | {"prompt": ["a", "b"]})
    assert (status, error["param"]) == (400, "prompt")
    assert all(call.aborted for call in engine.calls)


# --- clients that go away -----------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
async def test_a_streaming_client_that_leaves_is_aborted(serve: Serve, reset: bool) -> None:
    engine = FakeEngine(text="x" * 900, delay=0.005)
    served = await serve(engine)
    reader, writer = await served.raw(raw_request(COMPLETIONS, BODY | {"stream": True}))
    await reader.readuntil(b'"text":"x"')
    await _leave_and_expect_abort(served, writer, reset)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_before_its_whole_answer_is_aborted(
    serve: Serve, reset: bool
) -> None:
    engine = FakeEngine(text="x" * 900, delay=0.005)
    served = await serve(engine)
    _, writer = await served.raw(raw_request(COMPLETIONS, BODY))
    await engine.until(lambda: len(engine.calls) == 1)
    await _leave_and_expect_abort(served, writer, reset)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_leaves_while_queued_is_aborted(
    serve: Serve, stream: bool, prompts: int
) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    served = await serve(engine)
    body = BODY | {"stream": stream, "prompt": ["a"] * prompts}
    _, writer = await served.raw(raw_request(COMPLETIONS, body))
    await engine.until(lambda: len(engine.calls) == prompts)
    await _leave_and_expect_abort(served, writer, reset=False)


async def test_a_client_that_stops_reading_and_then_leaves_is_aborted(serve: Serve) -> None:
    # What was sent and not read keeps asyncio from reporting the connection as lost.
    engine = FakeEngine(text="x" * 90_000)
    served = await serve(engine)
    peer = _small_socket(served)
    peer.sendall(raw_request(COMPLETIONS, BODY | {"stream": True, "max_tokens": 90_000, "n": 20}))
    await engine.until(lambda: len(engine.calls) == 1)
    await asyncio.sleep(0.3)
    assert not engine.calls[0].finished
    peer.shutdown(socket.SHUT_WR)
    await engine.until(lambda: engine.calls[0].aborted)
    peer.close()


async def test_a_reader_that_takes_nothing_is_dropped_and_does_not_hold_others(
    serve: Serve,
) -> None:
    engine = FakeEngine(text="x" * 90_000)
    served = await serve(engine, write_timeout=0.5, keepalive_seconds=0.2)
    peer = _small_socket(served)
    peer.sendall(raw_request(COMPLETIONS, BODY | {"stream": True, "max_tokens": 90_000, "n": 20}))
    await engine.until(lambda: len(engine.calls) == 1)
    events = await served.events(COMPLETIONS, {"prompt": "b", "max_tokens": 50})
    assert len(events) == 50
    assert not engine.calls[0].finished
    await engine.until(lambda: engine.calls[0].aborted)
    peer.close()


def _small_socket(served: Served) -> socket.socket:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(("127.0.0.1", served.server.port))
    return peer


async def _leave_and_expect_abort(
    served: Served, writer: asyncio.StreamWriter, reset: bool
) -> None:
    if reset:
        # Linger of 0 seconds: close sends RST, as a client that was killed may.
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    await served.engine.until(lambda: all(call.aborted for call in served.engine.calls))
    assert not any(call.finished for call in served.engine.calls)
    async with asyncio.timeout(60):
        while served.server.in_flight:
            await asyncio.sleep(0.01)
    text = served.engine.text
    served.engine.text = "ok"
    served.engine.gate.set()
    status, answer = await served.post(COMPLETIONS, {"prompt": "a"})
    assert (status, answer["choices"][0]["text"]) == (200, "ok"), text
