"""The engine's process dies or hangs: streams go on with the tokens they would have had."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_control import COMMAND, Control, alive, idle, kill, patiently, until

from cuengine import (
    AsyncEngine,
    EngineConfig,
    EngineStoppedError,
    SamplingParams,
    engine_keeper,
)
from cuengine.errors import EngineDiedError
from cuengine.llm import append_delta
from cuengine.outputs import RequestOutput
from cuengine.sampling_params import BeamSearchParams, RequestParams
from cuengine.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def start(folder: Path, *, step_timeout: float = 0) -> AsyncEngine:
    config = EngineConfig(model=str(folder), device="cpu", max_model_len=96)
    return await asyncio.to_thread(AsyncEngine.from_config, config, step_timeout=step_timeout)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tiny_chat_model: Path, module_control: Control) -> AsyncIterator[AsyncEngine]:
    engine = await start(tiny_chat_model)
    yield engine
    await engine.stop()
    assert not alive(engine.pid)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: AsyncEngine, control: Control) -> AsyncIterator[AsyncEngine]:
    """It runs, and has nothing to do, before a test and after it."""
    yield shared
    control.reset()
    await until(lambda: not shared.restarting and idle(shared))
    assert not shared._flights
    assert not len(shared._roster)
    assert not shared._processor._states
    assert not shared._suspicion


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(tiny_chat_model: Path, control: Control) -> AsyncIterator[AsyncEngine]:
    """For a test that ends it."""
    engine = await start(tiny_chat_model)
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(shared: AsyncEngine) -> list[RequestOutput]:
    """What all KINDS get from an engine that lives."""
    return await asyncio.gather(*submit(shared))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **fields})


NUMBERS = StructuredOutputsParams(regex="[0-9]{8}(a|bc){3,9}x")
KINDS: list[RequestParams] = [
    params(),
    params(temperature=1, seed=5, n=2),
    params(temperature=1, seed=6, logprobs=2, prompt_logprobs=1),
    params(frequency_penalty=0.7, repetition_penalty=1.2, max_tokens=20),
    params(temperature=1, seed=7, best_of=3, n=2),
    params(temperature=1, seed=8, min_tokens=12, ignore_eos=False, stop_token_ids=[*range(80)]),
    params(temperature=1, seed=9, n=3, stop=["e", "a"], max_tokens=60),
    params(temperature=1, seed=10, max_tokens=None),
    params(temperature=1, seed=11, n=2, structured_outputs=NUMBERS),
    BeamSearchParams(3, 12, ignore_eos=True),
]


async def answer(
    engine: AsyncEngine, name: str, prompt: list[int], wanted: RequestParams
) -> RequestOutput:
    async def listen() -> RequestOutput:
        output = RequestOutput(name, None, prompt, None)
        async for delta in engine.generate(prompt, wanted, request_id=name):
            append_delta(output, delta)
        return output

    return await patiently(listen())


def submit(engine: AsyncEngine) -> list[asyncio.Task[RequestOutput]]:
    return [
        asyncio.create_task(answer(engine, f"{i}", [20 + i, 9, 30 + i], wanted))
        for i, wanted in enumerate(KINDS)
    ]


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Floats nearly: after a death a prefill adds up what steps have added up before it. And what
    was found in the prefix cache depends on who came before.
    """
    for output, wanted in zip(outputs, expected, strict=True):
        assert logprobs(output.prompt_logprobs) == logprobs(wanted.prompt_logprobs)
        for sample, other in zip(output.outputs, wanted.outputs, strict=True):
            assert sample.token_ids == other.token_ids
            assert sample.text == other.text
            assert sample.finish_reason == other.finish_reason
            assert sample.stop_reason == other.stop_reason
            assert logprobs(sample.logprobs) == logprobs(other.logprobs)
            assert sample.score == pytest.approx(other.score, abs=1e-4)


def logprobs(entries: Any) -> Any:
    return entries and [
        at and {token: pytest.approx(entry.logprob, abs=1e-3) for token, entry in at.items()}
        for at in entries
    ]


async def test_streams_go_on_as_they_would_have_when_the_process_is_killed_at_random_moments(
    engine: AsyncEngine, control: Control, expected: list[RequestOutput]
):
    rng = random.Random(1)
    begun, steps, restarts = control.begun, engine.stats().num_steps, engine.num_restarts
    control.close()
    tasks = submit(engine)
    completed = 0
    for i in range(3):
        moment = rng.randint(0, 15)
        control.allow(moment)
        begun += moment + 1
        await until(lambda: control.begun == begun)  # noqa: B023
        completed += moment
        pid = engine.pid
        kill(engine)
        await until(lambda: engine.num_restarts == restarts + i + 1)  # noqa: B023
        await until(lambda: not Path(f"/proc/{pid}").exists())  # noqa: B023 (no zombie, either)
        await until(lambda: not engine.restarting)
    control.open()
    assert_same(await asyncio.gather(*tasks), expected)
    assert engine.num_restarts == restarts + 3
    assert engine.stats().num_steps > steps + completed


async def test_a_step_that_fails_is_a_death(
    engine: AsyncEngine,
    control: Control,
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
):
    begun = control.begun
    control.close()
    tasks = submit(engine)
    control.allow(5)
    await until(lambda: control.begun == begun + 6)
    with caplog.at_level(logging.ERROR, "cuengine"):
        control.set("fail")
        control.open()
        assert_same(await asyncio.gather(*tasks), expected)
    assert "the machine is on fire" in caplog.text
    assert "engine: The engine failed" in caplog.text  # who speaks
    assert "ended with status 1" in caplog.text


async def test_a_step_that_hangs_is_a_death(
    tiny_chat_model: Path,
    control: Control,
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
):
    engine = await start(tiny_chat_model, step_timeout=3)
    control.set("hang")
    with caplog.at_level(logging.ERROR, "cuengine"):
        assert_same(await asyncio.gather(*submit(engine)), expected)
    assert engine.num_restarts >= 1
    assert re.search(r"longer than 3 s: .* may take 6 s\. .* give --step-timeout more", caplog.text)
    await engine.stop()


async def test_of_all_requests_in_the_batch_only_those_that_kill_are_refused(
    engine: AsyncEngine, control: Control, expected: list[RequestOutput]
):
    """One by a token in its prompt, one by its grammar."""
    drawn = {token for one in expected for sample in one.outputs for token in sample.token_ids}
    poison = next(token for token in range(60, 256) if token not in drawn)
    orders, restarts = control.orders, engine.num_restarts
    control.poison(poison)
    control.close()
    deadly = params(structured_outputs=StructuredOutputsParams(regex="deadly"))
    killers = [
        asyncio.create_task(answer(engine, "poisoned", [5, poison], params())),
        asyncio.create_task(answer(engine, "deadly", [5, 6], deadly)),
    ]
    tasks = submit(engine)
    await until(lambda: control.orders >= orders + len(KINDS) + 2 or engine.num_restarts > restarts)
    control.open()
    for killer in killers:
        with pytest.raises(EngineDiedError, match="alone"):
            await killer
    assert_same(await asyncio.gather(*tasks), expected)
    # At least two that make both suspects, and two of each that runs alone.
    assert 6 <= engine.num_restarts - restarts <= 12
    assert (await answer(engine, "poisoned", [5, 6], params())).outputs


async def test_new_requests_wait_while_the_engine_is_started_again_and_may_be_aborted(
    engine: AsyncEngine, control: Control
):
    expected = await answer(engine, "r", [5], params())
    control.set("held")
    loads = control.loads
    kill(engine)
    await until(lambda: control.loads == loads + 1)
    assert engine.restarting
    kept = asyncio.create_task(answer(engine, "kept", [5], params()))
    gone = asyncio.create_task(answer(engine, "gone", [6], params()))
    await until(lambda: len(engine._flights) == 2)
    gone.cancel()
    await until(lambda: len(engine._flights) == 1)
    control.unset("held")
    assert (await kept).outputs == expected.outputs
    assert gone.cancelled()


async def test_a_process_that_dies_while_it_loads_is_followed_by_another(
    engine: AsyncEngine, control: Control, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_keeper, "PAUSES", (0, 0, 0))
    expected = await answer(engine, "r", [5], params())
    restarts, loads = engine.num_restarts, control.loads
    control.set("held")
    kill(engine)
    for i in (1, 2):
        await until(lambda: control.loads == loads + i)  # noqa: B023
        kill(engine)
    control.unset("held")
    assert (await answer(engine, "r", [5], params())).outputs == expected.outputs
    assert engine.num_restarts == restarts + 1
    assert not engine.failed


async def test_an_engine_that_cannot_be_loaded_again_has_failed(
    own_engine: AsyncEngine, control: Control, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_keeper, "PAUSES", (0, 0))
    engine, orders = own_engine, control.orders
    control.close()
    running = asyncio.create_task(answer(engine, "r", [5], params()))
    await until(lambda: control.orders == orders + 1)
    control.set("unloadable")
    kill(engine)
    with pytest.raises(EngineStoppedError, match="has failed"):
        await running
    assert engine.failed
    assert not engine.restarting
    with pytest.raises(EngineStoppedError, match="has failed"):
        await answer(engine, "late", [5], params())
    await engine.drain()


async def test_stopping_while_the_engine_is_started_again_leaves_no_process(
    own_engine: AsyncEngine, control: Control
):
    engine, loads = own_engine, control.loads
    await answer(engine, "r", [5], params())
    control.set("held")
    kill(engine)
    await until(lambda: control.loads == loads + 1)
    waiting = asyncio.create_task(answer(engine, "kept", [5], params()))
    await until(lambda: engine._flights)
    await patiently(engine.stop())
    with pytest.raises(EngineStoppedError, match="before the answer"):
        await waiting
    assert not Path(f"/proc/{engine.pid}").exists()
    assert engine.num_restarts == 1


async def test_an_engine_that_dies_before_it_is_used_is_followed_by_another(
    own_engine: AsyncEngine,
):
    kill(own_engine)
    await until(lambda: not alive(own_engine.pid))
    assert (await answer(own_engine, "r", [5], params())).outputs
    assert own_engine.num_restarts == 1


SERVER = """
import asyncio, sys
from cuengine import AsyncEngine, EngineConfig, SamplingParams, engine_link
folder, when, *engine_link.COMMAND = sys.argv[1:]
config = EngineConfig(model=folder, device="cpu")
async def main(engine):
    await engine.start()
    if when == "running":
        await anext(engine.generate([5], SamplingParams(), request_id="r"))
    print(engine.pid, flush=True)
    await asyncio.sleep(1000)
if when == "loading":
    link = engine_link.EngineLink()
    print(link.pid, flush=True)
    link.start(config)
    link.wait_ready()
else:
    asyncio.run(main(AsyncEngine.from_config(config)))
"""


@pytest.mark.parametrize("when", ["loading", "running", "unable"])
async def test_the_process_ends_when_its_server_is_killed(
    tiny_chat_model: Path, control: Control, when: str
):
    """unable: a process that was stopped notices nothing."""
    loads = control.loads
    if when == "loading":
        control.set("held")
    command = [sys.executable, "-P", "-c", SERVER, str(tiny_chat_model), when, *COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(await asyncio.to_thread(server.stdout.readline))
        await until(lambda: control.loads == loads + 1)
        if when == "unable":
            os.kill(pid, signal.SIGSTOP)
        server.kill()
    try:
        await until(lambda: not alive(pid))
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
