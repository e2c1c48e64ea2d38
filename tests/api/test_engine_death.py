"""A real server whose engine process is killed, as its clients and its operator see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_control import Control, kill, patiently, until
from serving import Served

from cuengine.api.server import ServerSettings, running_server
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig

CHAT = "/v1/chat/completions"
LONG = {
    "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "ignore_eos": True,
    "temperature": 1, "seed": 4,
}  # fmt: skip


@pytest.fixture
async def served(tiny_chat_model: Path, control: Control) -> AsyncIterator[Served]:
    engine = AsyncEngine.from_config(EngineConfig(model=str(tiny_chat_model), device="cpu"))
    async with (
        running_server(engine, ServerSettings(port=0)) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Served(engine, server, session)


Events = list[dict[str, Any]]


def text_of(events: Events) -> str:
    return "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )


async def kill_amid_a_stream(served: Served, control: Control) -> asyncio.Task[Events]:
    """A stream that goes on once control lets the next engine be loaded."""
    begun, loads = control.begun, control.loads
    control.close()
    stream = asyncio.create_task(served.events(CHAT, LONG))
    control.allow(20)
    await until(lambda: control.begun == begun + 21)
    control.set("held")
    kill(served.engine)
    await until(lambda: control.loads == loads + 1)
    control.open()
    return stream


async def test_a_stream_goes_on_and_the_server_says_what_happens(
    served: Served, control: Control
) -> None:
    assert await served.get("/health") == (200, {"status": "ok"})
    expected = text_of(await served.events(CHAT, LONG))
    stream = await kill_amid_a_stream(served, control)
    assert await served.get("/health") == (200, {"status": "restarting"})
    assert (await served.get("/ready"))[0] == 503
    new = asyncio.create_task(served.post(CHAT, LONG | {"max_tokens": 3}))
    await until(lambda: served.server.in_flight == 2)
    assert not stream.done()
    control.unset("held")
    assert text_of(await patiently(stream)) == expected
    status, answer = await new
    assert status == 200
    assert expected.startswith(answer["choices"][0]["message"]["content"])
    assert await served.get("/ready") == (200, {"status": "ok"})
    _, metrics = await served.get("/metrics")
    assert "cuengine_engine_restarts_total 1.0" in metrics


async def test_draining_waits_for_streams_that_the_engine_comes_back_for(
    served: Served, control: Control
) -> None:
    expected = text_of(await served.events(CHAT, LONG))
    stream = await kill_amid_a_stream(served, control)
    draining = asyncio.create_task(served.server.drain())
    await asyncio.sleep(0)
    control.unset("held")
    await patiently(draining)
    assert text_of(await stream) == expected
