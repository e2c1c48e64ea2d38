"""Random requests, some of them abandoned at random moments: nothing may be left behind.

The long run, with a bound on memory, is bench/soak.py.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from engine_control import Control, idle, patiently, until

from cuengine import AsyncEngine, EngineConfig, SamplingParams

NUM_REQUESTS = 120
CONCURRENCY = 8


async def one_request(engine: AsyncEngine, name: str, rng: random.Random) -> bool:
    """True where the request was heard to its end."""
    prompt = [9] * rng.choice([0, 40]) + [rng.randrange(3, 256) for _ in range(rng.randint(1, 80))]
    params = SamplingParams(
        n=rng.choice([1, 1, 2, 3]), max_tokens=rng.randint(1, 30), stop=rng.choice([[], ["e"]])
    )
    patience = rng.choice([0, rng.randint(1, 20), 1000, 1000, 1000])
    stream = engine.generate(prompt, params, request_id=name, priority=rng.randint(0, 2))

    async def listen() -> bool:
        nonlocal patience
        async for delta in stream:
            patience -= 1
            if delta.finished or not patience:
                return delta.finished
        raise AssertionError("the stream ended without its last delta")

    try:
        if patience:
            return await patiently(listen())
        async with asyncio.timeout(0.005):
            return await listen()
    except TimeoutError:
        assert patience <= 0, f"request {name} hangs"
        return False
    finally:
        await stream.aclose()


async def test_nothing_is_left_of_many_requests_some_of_them_abandoned(
    tiny_chat_model: Path, control: Control
):
    engine = AsyncEngine.from_config(
        EngineConfig(
            model=str(tiny_chat_model),
            device="cpu",
            max_model_len=192,
            max_num_seqs=CONCURRENCY,
            max_num_batched_tokens=48,
            num_blocks=24,
            block_size=8,
        )
    )
    rng = random.Random(0)
    names = iter(range(NUM_REQUESTS))
    finished = 0

    async def worker() -> None:
        nonlocal finished
        for name in names:
            ended = await one_request(engine, str(name), rng)
            finished += ended

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    # A request after all others: when it is through, so are their aborts.
    async for _ in engine.generate([5], SamplingParams(max_tokens=1), request_id="last"):
        pass
    await until(lambda: idle(engine))
    stats = engine.stats()
    await engine.stop()
    assert NUM_REQUESTS / 3 < finished < NUM_REQUESTS
    assert stats.num_preemptions > 0
    assert engine.num_restarts == 0
    assert not engine._processor._states
    assert not len(engine._roster)
    assert not engine._flights
