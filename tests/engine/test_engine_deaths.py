"""The engine's process dies or hangs: streams go on with the tokens they would have had."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_control import Control, kill

from cuengine import (
    AsyncEngine,
    EngineConfig,
    EngineStoppedError,
    SamplingParams,
    async_engine,
    engine_link,
)
from cuengine.errors import EngineDiedError
from cuengine.llm import append_delta
from cuengine.outputs import RequestOutput
from cuengine.sampling_params import BeamSearchParams, RequestParams
from cuengine.structured_outputs import StructuredOutputsParams

TIMEOUT = 60


async def start(folder: Path, *, step_timeout: float = 60, **fields: Any) -> AsyncEngine:
    config = EngineConfig(model=str(folder), device="cpu", max_model_len=96, **fields)
    return await asyncio.to_thread(AsyncEngine.from_config, config, step_timeout=step_timeout)


@pytest.fixture
async def engine(tiny_chat_model: Path, control: Control) -> AsyncIterator[AsyncEngine]:
    engine = await start(tiny_chat_model)
    yield engine
    await engine.stop()


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
    output = RequestOutput(name, None, prompt, None)
    async with asyncio.timeout(TIMEOUT):
        async for delta in engine.generate(prompt, wanted, request_id=name):
            append_delta(output, delta)
    # What was found in the prefix cache depends on who came before.
    output.num_cached_tokens = 0
    for sample in output.outputs:
        sample.cumulative_logprob = None
        sample.logprobs = rounded(sample.logprobs)
    output.prompt_logprobs = rounded(output.prompt_logprobs)
    return output


def rounded(logprobs: Any) -> Any:
    """Token ids with log-probabilities to three places: a prefill adds up in another order."""
    return logprobs and [
        at and {token: round(entry.logprob, 3) for token, entry in at.items()} for at in logprobs
    ]


def submit(engine: AsyncEngine, prefix: str = "") -> list[asyncio.Task[RequestOutput]]:
    return [
        asyncio.create_task(answer(engine, f"{prefix}{i}", [20 + i, 9, 30 + i], wanted))
        for i, wanted in enumerate(KINDS)
    ]


async def until(condition: Any) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)


async def test_streams_go_on_as_they_would_have_when_the_process_is_killed_at_random_moments(
    engine: AsyncEngine, control: Control
):
    expected = await asyncio.gather(*submit(engine, "x"))
    steps = engine.stats().num_steps
    rng = random.Random(1)
    control.close()
    tasks = submit(engine, "x")
    for _ in range(3):
        before = engine.stats().num_steps
        moment = rng.randint(0, 15)
        control.allow(moment)
        await until(lambda: engine.stats().num_steps >= before + moment)  # noqa: B023
        kill(engine)
        await until(lambda: engine.restarting)
        await until(lambda: not engine.restarting)
    control.open()
    assert await asyncio.gather(*tasks) == expected
    assert engine.num_restarts == 3
    stats = engine.stats()
    assert stats.num_steps > 2 * steps - 3
    await until(lambda: engine.stats().num_used_blocks == 0)
    assert not engine._by_key


async def test_a_step_that_fails_is_a_death(
    engine: AsyncEngine, control: Control, caplog: pytest.LogCaptureFixture
):
    expected = await asyncio.gather(*submit(engine))
    control.close()
    tasks = submit(engine)
    control.allow(5)
    await until(lambda: engine.stats().num_running > 5)
    with caplog.at_level(logging.ERROR, "cuengine"):
        control.set("fail")
        control.open()
        await until(lambda: engine.restarting)
        control.unset("fail")
        assert await asyncio.gather(*tasks) == expected
    assert "the machine is on fire" in caplog.text
    assert "ended with status 1" in caplog.text


async def test_a_step_that_hangs_is_a_death(tiny_chat_model: Path, control: Control):
    engine = await start(tiny_chat_model, step_timeout=0.5)
    expected = await asyncio.gather(*submit(engine))
    # An engine with nothing to do does not hang.
    await asyncio.sleep(1)
    assert engine.num_restarts == 0
    control.set("hang")
    assert await asyncio.gather(*submit(engine)) == expected
    assert engine.num_restarts == 1
    await engine.stop()


async def test_of_all_requests_in_the_batch_only_the_one_that_kills_is_refused(
    engine: AsyncEngine, control: Control
):
    expected = await asyncio.gather(*submit(engine))
    drawn = {token for one in expected for sample in one.outputs for token in sample.token_ids}
    poison = next(token for token in range(60, 256) if token not in drawn)
    control.poison(poison)
    control.close()
    tasks = submit(engine)
    poisoned = asyncio.create_task(answer(engine, "poisoned", [5, poison], params()))
    await asyncio.sleep(0)
    control.open()
    with pytest.raises(EngineDiedError, match="alone"):
        await poisoned
    assert await asyncio.gather(*tasks) == expected
    # Two that make all suspects, and two of the one that runs alone.
    assert 4 <= engine.num_restarts <= 6
    assert (await answer(engine, "poisoned", [5, 6], params())).outputs


async def test_new_requests_wait_while_the_engine_is_started_again_and_may_be_aborted(
    engine: AsyncEngine,
):
    expected = await answer(engine, "r", [5], params())
    kill(engine)
    await until(lambda: engine.restarting)
    kept = asyncio.create_task(answer(engine, "kept", [5], params()))
    gone = asyncio.create_task(answer(engine, "gone", [6], params()))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await kept).outputs == expected.outputs
    assert gone.cancelled()
    assert not engine._flights


async def test_an_engine_that_cannot_be_loaded_again_has_failed(
    engine: AsyncEngine, control: Control, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(async_engine, "PAUSES", (0, 0))
    control.close()
    running = asyncio.create_task(answer(engine, "r", [5], params()))
    await asyncio.sleep(0)
    control.set("unloadable")
    kill(engine)
    with pytest.raises(EngineStoppedError, match="has failed"):
        await running
    assert engine.failed
    assert not engine.restarting
    with pytest.raises(EngineStoppedError, match="has failed"):
        await answer(engine, "late", [5], params())
    await engine.drain()


async def test_stopping_while_the_engine_is_started_again_leaves_no_process(engine: AsyncEngine):
    await answer(engine, "r", [5], params())
    kill(engine)
    await until(lambda: engine.restarting)
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(answer(engine, "kept", [5], params()))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await engine.stop()
    with pytest.raises(EngineStoppedError, match="shutting down"):
        await waiting
    assert not alive(engine._link.pid)


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_when_its_server_is_killed(
    tiny_chat_model: Path, control: Control, busy: bool
):
    script = (
        "import asyncio, sys, time\n"
        "from cuengine import AsyncEngine, EngineConfig, engine_link, SamplingParams\n"
        f"engine_link.COMMAND = {engine_link.COMMAND!r}\n"
        "async def main():\n"
        f"    config = EngineConfig(model={str(tiny_chat_model)!r}, device='cpu')\n"
        "    engine = AsyncEngine.from_config(config)\n"
        "    await engine.start()\n"
        f"    if {busy}:\n"
        "        await anext(engine.generate([5], SamplingParams(), request_id='r'))\n"
        "    print(engine._link.pid, flush=True)\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-P", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        control.set("delay", "50")  # seconds: it is amid a step
        server.kill()
    for _ in range(500):
        if not alive(pid):
            return
        asyncio.run(asyncio.sleep(0.01))
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine's process outlives its server")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
