"""A view of the engine through its async interface: of one that runs, and of one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cuengine import AsyncEngine, EngineConfig, EngineStoppedError, SamplingParams

TIMEOUT = 60


@pytest.fixture
async def engine(tiny_chat_model: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_chat_model), device="cpu", max_model_len=1024)
    engine = AsyncEngine.from_config(config)
    yield engine
    await engine.stop()


async def test_a_view_shows_what_runs_under_the_names_that_requests_came_with(
    engine: AsyncEngine,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True, n=3)
    stream = engine.generate([5] * 40, params, request_id="mine")
    async with asyncio.timeout(TIMEOUT):
        await anext(stream)
        view = await engine.view()
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
            assert not isinstance(result, BaseException) or isinstance(result, EngineStoppedError)
        with pytest.raises(EngineStoppedError):
            await engine.view()
