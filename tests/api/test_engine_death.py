"""A real server whose engine process is killed, as its clients and its operator see it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from serving import Served

from cuengine.api.server import ServerSettings, running_server
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig

CHAT = "/v1/chat/completions"
LONG = {
    "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True,
    "temperature": 1, "seed": 4,
}  # fmt: skip


@pytest.fixture
async def served(tiny_chat_model: Path) -> AsyncIterator[Served]:
    engine = AsyncEngine.from_config(EngineConfig(model=str(tiny_chat_model), device="cpu"))
    async with (
        running_server(engine, ServerSettings(port=0)) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Served(engine, server, session)


def text_of(events: list[dict[str, object]]) -> str:
    return "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


async def kill_amid_a_stream(served: Served) -> None:
    steps = served.engine.stats().num_steps
    await until(lambda: served.engine.stats().num_steps > steps + 50)
    os.kill(served.engine._link.pid, signal.SIGKILL)
    await until(lambda: served.engine.restarting)


async def test_a_stream_goes_on_and_the_server_says_what_happens(served: Served) -> None:
    expected = text_of(await served.events(CHAT, LONG))
    stream = asyncio.create_task(served.events(CHAT, LONG))
    await kill_amid_a_stream(served)
    assert not stream.done()
    assert await served.get("/health") == (200, {"status": "restarting"})
    assert (await served.get("/ready"))[0] == 503
    new = asyncio.create_task(served.post(CHAT, LONG | {"max_tokens": 3}))
    assert text_of(await stream) == expected
    status, answer = await new
    assert status == 200
    assert expected.startswith(answer["choices"][0]["message"]["content"])
    assert await served.get("/ready") == (200, {"status": "ok"})
    _, metrics = await served.get("/metrics")
    assert "cuengine_engine_restarts_total 1.0" in metrics


async def test_draining_waits_for_streams_that_the_engine_comes_back_for(served: Served) -> None:
    expected = text_of(await served.events(CHAT, LONG))
    stream = asyncio.create_task(served.events(CHAT, LONG))
    await kill_amid_a_stream(served)
    async with asyncio.timeout(60):
        await served.server.drain()
    assert text_of(await stream) == expected
