"""500 requests of random lengths, 16 at a time, 30 % aborted at random moments: nothing may leak.

    python bench/soak.py                  the tiny model and smollm2-135m, one after the other
    python bench/soak.py --model NAME     another one

Fails where a request hangs, where a block of the pool is not free at the end, where anything of a
request is left in the engine, or where the resident memory of this process, or of the engine's,
grows over the second half: the median over its last half may be at most 1 % + 4 MiB above the
median over its first half. The KV cache is kept small, so that sequences are preempted; a first
request fills all of it, so that it is in memory from the start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from cuengine import AsyncEngine, EngineConfig, RequestDelta, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "golden" / "tiny" / "llama3_rope"
NUM_BLOCKS = 64

MAX_STEPS = 5000
"""Steps without news after which a request is said to hang: more than all others together need."""

MAX_LOOKS = 120
"""The same for the engine: looks, a second apart, at which a step is not through on a busy machine.
(Time in which this process did not run either proves nothing.)
"""


@dataclass(slots=True)
class Counts:
    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    rss: dict[str, list[float]] = field(default_factory=lambda: {"server": [], "engine": []})


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def next_delta(engine: AsyncEngine, stream: AsyncIterator[RequestDelta]) -> RequestDelta:
    """The stream's next delta; RuntimeError where the request, or the whole engine, hangs."""
    news = asyncio.ensure_future(anext(stream))
    first = last = engine.stats().num_steps
    silent = 0
    try:
        while not (await asyncio.wait([news], timeout=1))[0]:
            steps = engine.stats().num_steps
            silent = silent + 1 if steps == last else 0
            if silent > MAX_LOOKS or steps - first > MAX_STEPS:
                raise RuntimeError(f"no news in {steps - first} steps of the engine")
            last = steps
        return await news
    finally:
        news.cancel()
        await asyncio.wait([news])  # or the stream could not be closed


async def one_request(engine: AsyncEngine, name: str, rng: random.Random, counts: Counts) -> None:
    """Run a request to its end, or stop listening: in mid-stream, or before the first token."""
    vocab_size = engine.model_config.vocab_size
    # Some share a beginning, so that the prefix cache has work.
    prompt = [7] * rng.choice([0, 0, 40])
    prompt += [rng.randrange(vocab_size) for _ in range(rng.randint(1, 160))]
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randint(1, 48),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None] * 7 + [0]),
    )
    abort = rng.random() < 0.3
    patience = rng.choice([0, 0, rng.randint(1, 48)])
    stream = engine.generate(prompt, params, request_id=name, priority=rng.randint(0, 2))
    deltas = 0
    try:
        if abort and not patience:
            async with asyncio.timeout(rng.random() / 10):
                await anext(stream)
        while True:
            delta = await next_delta(engine, stream)
            deltas += 1
            counts.tokens += sum(len(sequence.token_ids) for sequence in delta.sequences)
            if abort and deltas > patience:
                break
    except TimeoutError:
        pass
    except StopAsyncIteration:
        counts.finished += 1
        return
    finally:
        await stream.aclose()
    counts.aborted += 1


async def soak(model: str, num_requests: int, concurrency: int, seed: int) -> dict[str, object]:
    tiny = model == str(TINY)
    engine = AsyncEngine.from_config(
        EngineConfig(
            model=model,
            skip_tokenizer_init=tiny,
            max_model_len=16 * NUM_BLOCKS,
            block_size=16,
            max_num_seqs=concurrency,
            max_num_batched_tokens=256,
            num_blocks=NUM_BLOCKS,
        )
    )
    rng = random.Random(seed)
    counts = Counts()
    names = iter(range(num_requests))
    start = time.monotonic()

    async def worker() -> None:
        for name in names:
            await one_request(engine, str(name), rng, counts)
            counts.rss["server"].append(resident_mib(os.getpid()))
            counts.rss["engine"].append(resident_mib(engine.pid))

    whole = [rng.randrange(engine.model_config.vocab_size) for _ in range(engine.max_model_len - 1)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    async for _ in engine.generate(whole, params, request_id="first"):
        pass
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await engine.drain()
    # The last abort may still be on its way to the engine.
    for _ in range(1000):
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == stats.num_used_blocks == 0:
            break
        await asyncio.sleep(0.01)
    await engine.stop()
    gc.collect()

    problems = []
    resident = {}
    for process, rss in counts.rss.items():
        half = rss[len(rss) // 2 :]
        early = statistics.median(half[: len(half) // 2])
        late = statistics.median(half[len(half) // 2 :])
        resident[process] = [round(early, 1), round(late, 1)]
        if late > early * 1.01 + 4:
            problems.append(f"the {process}'s memory grew from {early:.1f} to {late:.1f} MiB")
    if stats.num_used_blocks or stats.num_running or stats.num_waiting:
        problems.append(f"the engine is not empty: {stats}")
    if engine.num_restarts:
        problems.append(f"the engine died {engine.num_restarts} times")
    left = [engine._processor._states, [*engine._roster], engine._flights]
    if any(left):
        problems.append(f"requests are left behind: {left}")
    if counts.finished + counts.aborted != num_requests:
        problems.append(f"{counts.finished} + {counts.aborted} requests of {num_requests} ended")
    return {
        "model": Path(model).name,
        "requests": num_requests,
        "finished": counts.finished,
        "aborted": counts.aborted,
        "tokens": counts.tokens,
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "prefix_hits": stats.prefix_hits,
        "rss_mib_third_and_last_quarter": resident,
        "seconds": round(time.monotonic() - start, 1),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", help="may be given several times")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = False
    for model in args.model or [str(TINY), "smollm2-135m"]:
        result = asyncio.run(soak(model, args.requests, args.concurrency, args.seed))
        print(json.dumps(result), flush=True)
        failed |= bool(result["problems"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
