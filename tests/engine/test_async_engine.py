"""The engine behind its async interface: streams, aborts, failure, draining, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_control import Control

from cuengine import AsyncEngine, EngineConfig, EngineStoppedError, RequestError, SamplingParams

TIMEOUT = 30


@pytest.fixture
async def engine(tiny_chat_model: Path, control: Control) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_chat_model), device="cpu", max_model_len=256)
    engine = AsyncEngine.from_config(config)
    yield engine
    await engine.stop()


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields})  # type: ignore[arg-type]


async def tokens_of(
    engine: AsyncEngine, request_id: str, prompt: list[int], params: SamplingParams
) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(TIMEOUT):
        async for delta in engine.generate(prompt, params, request_id=request_id):
            for sequence in delta.sequences:
                tokens += sequence.token_ids
    return tokens


async def until(condition: object) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


def idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    nobody = stats.num_running == stats.num_waiting == 0
    return nobody and stats.num_free_blocks == stats.num_blocks


async def test_concurrent_requests_get_what_each_gets_alone(engine: AsyncEngine):
    prompts = [[10 + i, 20, 30] for i in range(12)]
    alone = [await tokens_of(engine, f"a{i}", p, greedy()) for i, p in enumerate(prompts)]
    together = await asyncio.gather(
        *(tokens_of(engine, f"b{i}", p, greedy()) for i, p in enumerate(prompts))
    )
    assert together == alone
    assert all(len(tokens) == 8 for tokens in alone)
    await until(lambda: idle(engine))


async def test_deltas_come_token_by_token_and_the_last_is_finished(engine: AsyncEngine):
    deltas = [d async for d in engine.generate([5, 6], greedy(max_tokens=3), request_id="r")]
    assert [len(delta.sequences[0].token_ids) for delta in deltas] == [1, 1, 1]
    assert [delta.finished for delta in deltas] == [False, False, True]
    assert [delta.sequences[0].finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[0].prompt_token_ids == [5, 6]


async def test_a_request_that_cannot_be_served_raises_with_the_first_delta(engine: AsyncEngine):
    stream = engine.generate([5] * 300, greedy(), request_id="r")
    with pytest.raises(RequestError, match="Shorten it to at most 255") as caught:
        await anext(stream)
    assert caught.value.code == "context_length_exceeded"
    # Its id is free again, and the engine goes on.
    assert len(await tokens_of(engine, "r", [5], greedy())) == 8


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(engine: AsyncEngine, control: Control):
    control.close()
    first = asyncio.create_task(tokens_of(engine, "r", [5], greedy()))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="request_id='r' is in use"):
        await tokens_of(engine, "r", [6], greedy())
    control.open()
    assert len(await first) == 8


async def test_closing_a_stream_aborts_within_one_step(engine: AsyncEngine, control: Control):
    stream = engine.generate([5], greedy(max_tokens=200), request_id="r")
    await anext(stream)
    control.close()
    steps = engine.stats().num_steps
    await stream.aclose()
    control.open()
    await until(lambda: idle(engine))
    # Steps whose news was on its way, the one that was held up, and one before the abort was read.
    assert engine.stats().num_steps <= steps + 4


async def test_cancelling_a_reader_aborts_its_request_only(engine: AsyncEngine, control: Control):
    control.close()
    other = asyncio.create_task(tokens_of(engine, "other", [7], greedy(max_tokens=100)))
    reader = asyncio.create_task(tokens_of(engine, "r", [5], greedy(max_tokens=200)))
    control.allow(3)
    await until(lambda: engine.stats().num_running == 2)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    control.open()
    assert len(await other) == 100
    await until(lambda: idle(engine))


async def test_a_queued_request_can_be_aborted(tiny_chat_model: Path, control: Control):
    config = EngineConfig(
        model=str(tiny_chat_model), device="cpu", max_model_len=256, max_num_seqs=1
    )
    engine = AsyncEngine.from_config(config)
    control.close()
    first = asyncio.create_task(tokens_of(engine, "first", [5], greedy(max_tokens=100)))
    second = asyncio.create_task(tokens_of(engine, "second", [5], greedy(max_tokens=100)))
    control.allow(3)
    await until(lambda: engine.stats().num_waiting == 1)
    second.cancel()
    control.open()
    assert len(await first) == 100
    await until(lambda: idle(engine))
    await engine.stop()


async def test_abort_ends_the_stream_with_finish_reason_abort(engine: AsyncEngine):
    deltas = []
    async for delta in engine.generate([5], greedy(n=2, max_tokens=200), request_id="r"):
        deltas.append(delta)
        if len(deltas) == 2:
            await engine.abort("r")
    assert deltas[-1].finished
    assert [sequence.finish_reason for sequence in deltas[-1].sequences] == ["abort", "abort"]
    await engine.abort("r")
    await engine.abort("never heard of")
    await until(lambda: idle(engine))


async def test_a_stop_string_ends_the_sample_and_what_was_drawn_after_it_is_nobodys(
    engine: AsyncEngine, control: Control
):
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    plain = await tokens_of(engine, "plain", [5], greedy(temperature=1, seed=3, max_tokens=30))
    text = tokenizer.decode(plain)
    place = next(i for i in range(3, 25) if text[i].isascii() and text[i] not in text[:i])
    steps = engine.stats().num_steps
    params = greedy(temperature=1, seed=3, max_tokens=30, stop=[text[place]])
    got, said = [], ""
    async for delta in engine.generate([5], params, request_id="r"):
        got += delta.sequences[0].token_ids
        said += delta.sequences[0].text
    assert said == text[:place]
    assert delta.sequences[0].stop_reason == text[place]
    assert got == plain[: len(got)]
    await until(lambda: idle(engine))
    assert len(got) <= engine.stats().num_steps - steps < 30


async def test_draining_waits_for_running_requests_and_takes_no_new_ones(
    engine: AsyncEngine, control: Control
):
    control.close()
    running = asyncio.create_task(tokens_of(engine, "r", [5], greedy()))
    await asyncio.sleep(0)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    with pytest.raises(EngineStoppedError, match="shutting down"):
        await tokens_of(engine, "late", [5], greedy())
    assert not draining.done()
    control.open()
    await draining
    assert len(await running) == 8


async def test_stopping_ends_what_still_runs(engine: AsyncEngine, control: Control):
    control.close()
    reader = asyncio.create_task(tokens_of(engine, "r", [5], greedy(max_tokens=250)))
    control.allow(2)
    await until(lambda: engine.stats().num_running == 1)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    control.open()
    await stopping
    with pytest.raises(EngineStoppedError, match="shutting down"):
        await reader
    await engine.stop()


def test_an_engine_made_outside_a_loop_runs_in_one(tiny_chat_model: Path):
    engine = AsyncEngine.from_config(
        EngineConfig(model=str(tiny_chat_model), device="cpu", max_model_len=64)
    )
    assert engine.max_model_len == 64
    assert engine.model_config.vocab_size == 256
    assert engine.chat_template is not None

    async def main() -> list[int]:
        tokens = await tokens_of(engine, "r", [5], greedy())
        await engine.stop()
        return tokens

    assert len(asyncio.run(main())) == 8
