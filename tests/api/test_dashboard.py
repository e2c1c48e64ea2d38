"""/dashboard/events: pictures of the engine, for as many as watch and only while somebody does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine
from serving import Serve, Served

from cuengine.api.watchers import INTERVAL, Latency
from cuengine.engine_view import EngineView
from cuengine.stats import EngineStats

EVENTS = "/dashboard/events"


class Watcher:
    """One client of the stream."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> dict[str, Any] | None:
        """The next picture; None where the stream has ended."""
        async with asyncio.timeout(60):
            while line := await self.answer.content.readline():
                if line.startswith(b"data: "):
                    picture: dict[str, Any] = json.loads(line[6:])
                    return picture
        return None


@asynccontextmanager
async def watching(served: Served, query: str = "", **headers: str) -> AsyncIterator[Watcher]:
    url = served.server.url + EVENTS + query
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        yield Watcher(answer)


async def nobody_watches(served: Served) -> None:
    async with asyncio.timeout(60):
        while served.server.in_flight:
            await asyncio.sleep(0.01)


def step(engine: FakeEngine) -> None:
    engine.figures = replace(engine.figures, num_steps=engine.figures.num_steps + 1)


async def test_a_watcher_gets_a_picture_at_once_and_another_when_something_has_happened(
    serve: Serve,
) -> None:
    engine = FakeEngine(figures=EngineStats(num_preemptions=3, num_accepted_tokens_per_pos=(2, 1)))
    served = await serve(engine)
    async with watching(served) as watcher:
        first = await watcher.next()
        assert first is not None
        assert (first["model"], first["status"], first["ttft"]) == ("fake-model", "running", None)
        assert first["view"]["stats"]["num_preemptions"] == 3
        assert first["view"]["stats"]["num_accepted_tokens_per_pos"] == [2, 1]
        assert engine.views == 1
        await asyncio.sleep(4 * INTERVAL)
        assert engine.views == 1
        step(engine)
        second = await watcher.next()
        assert second is not None
        assert second["view"]["stats"]["num_steps"] == 1
        assert engine.views == 2


async def test_no_view_is_taken_while_nobody_watches(serve: Serve) -> None:
    engine = FakeEngine()
    served = await serve(engine)

    async def busy() -> None:
        for _ in range(5):
            step(engine)
            await served.post("/v1/completions", {"prompt": "a"})
            await asyncio.sleep(INTERVAL)

    await busy()
    assert engine.views == 0
    async with watching(served) as watcher:
        await watcher.next()
    await nobody_watches(served)
    views = engine.views
    await busy()
    assert engine.views == views


async def test_many_watchers_share_the_views_and_see_the_same(serve: Serve) -> None:
    engine = FakeEngine()
    served = await serve(engine)
    async with watching(served) as one:
        await one.next()
        views = engine.views

        async def one_more() -> Any:
            async with watching(served) as watcher:
                return await watcher.next()

        pictures = await asyncio.gather(*[one_more() for _ in range(40)])
        assert all(picture == pictures[0] for picture in pictures)
        # All came within a few intervals.
        assert engine.views - views < 20
        await asyncio.sleep(2 * INTERVAL)
        assert served.server.in_flight == 1


@pytest.mark.parametrize("reset", [False, True])
async def test_a_watcher_that_leaves_while_nothing_happens_is_forgotten(
    serve: Serve, reset: bool
) -> None:
    served = await serve()
    reader, writer = await served.raw(f"GET {EVENTS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"data: ")
    if reset:
        writer.transport.abort()
    writer.close()
    await nobody_watches(served)
    step(served.engine)
    views = served.engine.views
    await asyncio.sleep(3 * INTERVAL)
    assert served.engine.views == views


async def test_a_slow_watcher_misses_pictures_and_does_not_hold_others(serve: Serve) -> None:
    engine = FakeEngine()
    # More than the buffers between the two take, in one picture.
    engine.seen = big_view(engine, 4_000_000)
    served = await serve(engine, write_timeout=1.0)
    reader, writer = await served.raw(f"GET {EVENTS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"data: ")
    async with watching(served) as quick:
        for number in range(1, 8):
            step(engine)
            engine.seen = big_view(engine, 10_000)
            picture = await quick.next()
            while picture is not None and picture["view"]["stats"]["num_steps"] < number:
                picture = await quick.next()
            assert picture is not None
        # The slow one has taken nothing of what came since, and is dropped in the end.
        async with asyncio.timeout(60):
            while served.server.in_flight > 1:
                step(engine)
                await asyncio.sleep(0.05)
    writer.transport.abort()


def big_view(engine: FakeEngine, num_blocks: int) -> EngineView:
    return EngineView(
        time=0.0, block_size=16, ref_counts=bytes(num_blocks), cached=bytes(num_blocks // 8),
        running=[], queue=[], queued={}, num_host_blocks=0, num_free_host_blocks=0, steps=[],
        token_budget=512, speculative=False, stats=engine.figures,
    )  # fmt: skip


async def test_the_api_key_is_asked_for(serve: Serve) -> None:
    served = await serve(api_keys=("k",))
    status, answer = await served.get(EVENTS)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert (await served.get("/dashboard"))[0] == 200
    assert served.engine.views == 0
    async with watching(served, Authorization="Bearer k") as watcher:
        assert await watcher.next() is not None


async def test_a_watcher_does_not_keep_the_server_from_draining(serve: Serve) -> None:
    served = await serve()
    async with watching(served) as watcher:
        await watcher.next()
        async with asyncio.timeout(60):
            await served.server.drain()
        assert await watcher.next() is None
    assert (await served.get(EVENTS))[0] == 503


async def test_an_engine_that_is_gone_shows_as_that_and_when_it_is_back(serve: Serve) -> None:
    served = await serve()
    engine = served.engine
    async with watching(served) as watcher:
        for gone, restarting, status in (
            (False, False, "running"),
            (True, True, "restarting"),
            (False, False, "running"),
            (True, False, "stopped"),
        ):
            engine.stopped, engine.restarting, engine.failed = gone, restarting, status == "stopped"
            picture = await watcher.next()
            assert picture is not None
            assert picture["status"] == status
            assert (picture["view"] is None) == gone


async def test_a_view_that_cannot_be_taken_ends_the_streams_and_is_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.seen = object()  # type: ignore[assignment]
    served = await serve(engine)
    with caplog.at_level(logging.ERROR):
        async with watching(served) as watcher:
            assert await watcher.next() is None
    assert any("dashboard" in record.getMessage() for record in caplog.records)
    assert (await served.post("/v1/completions", {"prompt": "a"}))[0] == 200
    # The next one who comes has better luck, if the engine has.
    engine.seen = None
    async with watching(served) as watcher:
        assert await watcher.next() is not None


async def test_latencies_of_the_last_requests_are_in_the_picture(serve: Serve) -> None:
    engine = FakeEngine(text="abcd", delay=0.02)
    served = await serve(engine)
    await served.post("/v1/completions", {"prompt": "a"})
    async with watching(served) as watcher:
        picture = await watcher.next()
        assert picture is not None
        for name in ("ttft", "tpot"):
            assert 0.019 <= picture[name]["median"] <= picture[name]["p95"]


def test_latencies_are_ranked() -> None:
    assert Latency.of([]) is None
    assert Latency.of([3.0]) == Latency(3.0, 3.0)
    assert Latency.of([float(i) for i in range(100, 0, -1)]) == Latency(50.0, 95.0)
    assert Latency.of([1.0, 2.0, 30.0]) == Latency(2.0, 30.0)


async def test_head_asks_for_no_stream(serve: Serve) -> None:
    served = await serve()
    async with (
        asyncio.timeout(60),
        served.session.head(served.server.url + EVENTS) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
    assert served.engine.views == 0


async def test_of_several_engines_the_one_that_is_named_is_shown_else_the_first(
    serve: Serve,
) -> None:
    engine = FakeEngine(figures_of={"b": EngineStats(), "a": EngineStats()})
    served = await serve(engine)
    for query, shown in (("", "a"), ("?replica=b", "b"), ("?replica=a", "a")):
        async with watching(served, query) as watcher:
            picture = await watcher.next()
        assert picture is not None
        assert (picture["replica"], picture["replicas"]) == (shown, ["a", "b"])
        assert engine.viewed == shown


async def test_a_replica_that_is_not_there_is_answered_with_those_that_are(serve: Serve) -> None:
    served = await serve(FakeEngine(figures_of={"b": EngineStats(), "a": EngineStats()}))
    status, answer = await served.get(EVENTS + "?replica=c")
    assert status == 404
    assert "'c', but: a, b" in answer["error"]["message"]
    served = await serve(FakeEngine())
    status, answer = await served.get(EVENTS + "?replica=c")
    assert status == 404
    assert "none with a name" in answer["error"]["message"]


async def test_watchers_of_a_replica_do_not_keep_the_server_from_draining(serve: Serve) -> None:
    served = await serve(FakeEngine(figures_of={"a": EngineStats()}))
    async with watching(served, "?replica=a") as watcher:
        assert await watcher.next() is not None
        async with asyncio.timeout(10):
            await served.server.drain()
        assert await watcher.next() is None
