"""The engine behind its async interface: streams, aborts, failure, draining, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_control import Control, idle, patiently, until

from cuengine import AsyncEngine, EngineConfig, EngineStoppedError, RequestError, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def start(folder: Path, **fields: int) -> AsyncEngine:
    config = EngineConfig(model=str(folder), device="cpu", max_model_len=256, **fields)  # type: ignore[arg-type]
    return await asyncio.to_thread(AsyncEngine.from_config, config)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tiny_chat_model: Path, module_control: Control) -> AsyncIterator[AsyncEngine]:
    engine = await start(tiny_chat_model)
    yield engine
    await engine.stop()
    assert engine.num_restarts == 0


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: AsyncEngine, control: Control) -> AsyncIterator[AsyncEngine]:
    """With nothing to do, before a test and after it."""
    yield shared
    control.open()
    await until(lambda: idle(shared))


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(tiny_chat_model: Path, control: Control) -> AsyncIterator[AsyncEngine]:
    """For a test that ends it; it runs one request at a time."""
    engine = await start(tiny_chat_model, max_num_seqs=1)
    yield engine
    await engine.stop()


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields})  # type: ignore[arg-type]


async def tokens_of(
    engine: AsyncEngine, request_id: str, prompt: list[int], params: SamplingParams
) -> list[int]:
    async def listen() -> list[int]:
        tokens: list[int] = []
        async for delta in engine.generate(prompt, params, request_id=request_id):
            for sequence in delta.sequences:
                tokens += sequence.token_ids
        return tokens

    return await patiently(listen())


async def test_concurrent_requests_get_what_each_gets_alone(engine: AsyncEngine):
    prompts = [[10 + i, 20, 30] for i in range(12)]
    alone = [await tokens_of(engine, f"a{i}", p, greedy()) for i, p in enumerate(prompts)]
    together = await asyncio.gather(
        *(tokens_of(engine, f"b{i}", p, greedy()) for i, p in enumerate(prompts))
    )
    assert together == alone
    assert all(len(tokens) == 8 for tokens in alone)


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
    begun, orders = control.begun, control.orders
    control.close()
    stream = engine.generate([5], greedy(max_tokens=200), request_id="r")
    first = asyncio.create_task(anext(stream))
    control.allow(1)
    await first
    await until(lambda: control.begun == begun + 2)
    await stream.aclose()
    await until(lambda: control.orders == orders + 2)
    control.open()
    await until(lambda: idle(engine))
    assert control.begun == begun + 2


async def test_cancelling_a_reader_aborts_its_request_only(engine: AsyncEngine, control: Control):
    orders = control.orders
    control.close()
    other = asyncio.create_task(tokens_of(engine, "other", [7], greedy(max_tokens=100)))
    reader = asyncio.create_task(tokens_of(engine, "r", [5], greedy(max_tokens=200)))
    await until(lambda: control.orders == orders + 2)
    control.allow(2)  # the first one may have begun before the reader's came
    await until(lambda: engine.stats().num_running == 2)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    control.open()
    assert len(await other) == 100


async def test_a_queued_request_can_be_aborted(own_engine: AsyncEngine, control: Control):
    engine, orders = own_engine, control.orders
    control.close()
    first = asyncio.create_task(tokens_of(engine, "first", [5], greedy(max_tokens=100)))
    second = asyncio.create_task(tokens_of(engine, "second", [5], greedy(max_tokens=100)))
    await until(lambda: control.orders == orders + 2)
    control.allow(2)
    await until(lambda: engine.stats().num_waiting == 1)
    second.cancel()
    control.open()
    assert len(await first) == 100
    await until(lambda: idle(engine))


async def test_abort_ends_the_stream_with_finish_reason_abort(
    engine: AsyncEngine, control: Control
):
    control.close()
    control.allow(3)
    deltas = []
    async for delta in engine.generate([5], greedy(n=2, max_tokens=200), request_id="r"):
        deltas.append(delta)
        if len(deltas) == 2:
            await engine.abort("r")
    assert deltas[-1].finished
    assert [sequence.finish_reason for sequence in deltas[-1].sequences] == ["abort", "abort"]
    await engine.abort("r")
    await engine.abort("never heard of")
    control.open()


async def test_a_stop_string_ends_the_sample_and_what_was_drawn_after_it_is_nobodys(
    engine: AsyncEngine, control: Control
):
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    plain = await tokens_of(engine, "plain", [5], greedy(temperature=1, seed=3, max_tokens=30))
    text = tokenizer.decode(plain)
    place = next(i for i in range(3, 25) if text[i].isascii() and text[i] not in text[:i])
    await until(lambda: idle(engine))
    begun, orders = control.begun, control.orders
    control.close()
    params = greedy(temperature=1, seed=3, max_tokens=30, stop=[text[place]])
    got, said = [], ""
    control.allow(1)
    async for delta in engine.generate([5], params, request_id="r"):
        got += delta.sequences[0].token_ids
        said += delta.sequences[0].text
        if not delta.finished:
            control.allow(1)
    assert said == text[:place]
    assert delta.sequences[0].stop_reason == text[place]
    assert got == plain[: len(got)]
    await until(lambda: control.orders >= orders + 2)
    control.open()
    await until(lambda: idle(engine))
    assert control.begun <= begun + len(got) + 1


async def test_draining_waits_for_running_requests_and_takes_no_new_ones(
    own_engine: AsyncEngine, control: Control
):
    engine = own_engine
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


async def test_stopping_ends_what_still_runs(own_engine: AsyncEngine, control: Control):
    engine = own_engine
    control.close()
    reader = asyncio.create_task(tokens_of(engine, "r", [5], greedy(max_tokens=250)))
    control.allow(2)
    await until(lambda: engine.stats().num_running == 1)
    await engine.stop()
    with pytest.raises(EngineStoppedError, match="before the answer"):
        await reader
    await engine.stop()


async def test_an_engine_made_outside_a_loop_runs_in_one(tiny_chat_model: Path, control: Control):
    def make_and_run() -> list[int]:
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

        return asyncio.run(main())

    assert len(await asyncio.to_thread(make_and_run)) == 8
