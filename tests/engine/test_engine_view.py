"""A view of the engine through its async interface: of one that runs, and of one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_control import Control, kill, patiently, until

from cuengine import AsyncEngine, EngineConfig, EngineStoppedError, SamplingParams
from cuengine.engine_view import EngineView

TIMEOUT = 60


@pytest.fixture
async def engine(tiny_chat_model: Path, control: Control) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_chat_model), device="cpu", max_model_len=1024)
    engine = AsyncEngine.from_config(config)
    yield engine
    await engine.stop()


async def test_a_view_shows_what_runs_under_the_names_that_requests_came_with(
    control: Control, engine: AsyncEngine
) -> None:
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True, n=3)
    control.close()
    stream = engine.generate([5] * 40, params, request_id="mine")
    first = asyncio.create_task(anext(stream))
    control.allow(1)
    async with asyncio.timeout(TIMEOUT):
        await first
        looking = asyncio.create_task(engine.view())
        control.allow(1)
        view = await looking
        control.open()
        assert [(s.request_id, s.index, s.prompt_len) for s in view.running] == [
            ("mine", 0, 40), ("mine", 1, 40), ("mine", 2, 40),
        ]  # fmt: skip
        # 40 tokens: two full blocks of 16 are common, the third is copied when it is written to.
        assert sorted(view.ref_counts)[-2:] == [3, 3]
        assert (await engine.view()).stats.num_steps >= view.stats.num_steps
        await stream.aclose()
        while (await engine.view()).running:
            await asyncio.sleep(0.01)
        assert not any((await engine.view()).ref_counts)


async def test_views_are_taken_of_an_idle_engine_too_and_side_by_side(engine: AsyncEngine) -> None:
    async with asyncio.timeout(TIMEOUT):
        views = await asyncio.gather(*[engine.view() for _ in range(5)])
    assert all(view.stats.num_steps == 0 for view in views)
    assert all(len(view.ref_counts) == view.stats.num_blocks for view in views)


async def test_who_waits_for_a_view_hears_that_the_engine_has_stopped(engine: AsyncEngine) -> None:
    async with asyncio.timeout(TIMEOUT):
        waiting = [asyncio.create_task(engine.view()) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.stop()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineView | EngineStoppedError)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await engine.view()


async def test_an_engine_that_died_is_seen_again_when_another_one_has_taken_over(
    control: Control, engine: AsyncEngine
) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    control.close()
    begun, orders = control.begun, control.orders
    stream = engine.generate([5] * 40, params, request_id="mine")
    first = asyncio.create_task(anext(stream))
    control.allow(1)
    await patiently(first)
    looking = asyncio.create_task(engine.view())
    await until(lambda: control.orders == orders + 2)
    control.allow(1)
    before = await patiently(looking)
    await until(lambda: control.begun == begun + 3)
    waiting = asyncio.create_task(engine.view())
    await until(lambda: control.orders == orders + 3)
    kill(engine)
    with pytest.raises(EngineStoppedError, match="being started again"):
        await patiently(waiting)
    with pytest.raises(EngineStoppedError, match="being started again"):
        await engine.view()
    control.open()
    await until(lambda: engine.num_restarts == 1 and not engine.restarting)
    steps = engine.stats().num_steps
    await until(lambda: engine.stats().num_steps > steps)
    after = await patiently(engine.view())
    assert [s.request_id for s in after.running] == ["mine"]
    assert after.running[0].num_tokens >= before.running[0].num_tokens
    # Totals go on from those of the engine before.
    assert after.stats.num_steps > before.stats.num_steps
    await stream.aclose()
