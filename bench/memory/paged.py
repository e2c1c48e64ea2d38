"""A trace in this engine's KV memory: the real engine, with tokens made up in place of a model's.

All that decides about memory is the engine's own: admission, chunks of prompts, blocks claimed,
shared, copied and freed, preemption. Only lengths come from the trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from memory_counts import BlockSharing, SlotUsage

from cuengine import EngineConfig, SamplingParams
from cuengine.batch import Batch, SamplerOutput, SamplingBatch
from cuengine.engine import Engine, LoadedModel

VOCAB_SIZE = 32000


class MadeUpTokens:
    """A runner that draws every token evenly: no two outputs are alike, and none ends early.

    during_step  called while a step has all its blocks, and nothing of it has been given back
    """

    overlaps = False

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.during_step: Callable[[], None] = lambda: None

    def range(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, batch: Batch, sampling: SamplingBatch) -> _Step:
        return _Step(self, len(batch.logits_indices))

    def draw(self, rows: int) -> SamplerOutput:
        none = np.empty((rows, 0))
        return SamplerOutput(
            token_ids=self._rng.integers(VOCAB_SIZE, size=rows, dtype=np.int32),
            logprobs=np.full(rows, np.nan, np.float32),
            ranks=np.zeros(rows, np.int32),
            top_ids=none.astype(np.int32),
            top_logprobs=none.astype(np.float32),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    runner: MadeUpTokens
    rows: int

    def fetch(self) -> SamplerOutput:
        self.runner.during_step()
        return self.runner.draw(self.rows)


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is of it, in tokens, and how it is cut."""

    num_slots: int
    block_size: int
    max_model_len: int

    def engine(self, runner: MadeUpTokens) -> Engine:
        """One in which nothing but memory limits what runs at once."""
        return Engine(
            EngineConfig(block_size=self.block_size, max_num_seqs=self.num_slots),
            LoadedModel(vocab_size=VOCAB_SIZE),
            runner,
            num_blocks=self.num_slots // self.block_size,
            max_model_len=self.max_model_len,
        )


def replay_alone(requests: Sequence[tuple[int, int]], memory: Memory, seed: int) -> SlotUsage:
    """One sample of every request: what the slots of all memory are used for."""
    usage = SlotUsage(memory.num_slots)

    def count(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            usage.add_sequence(
                cached=sequence.num_computed,
                final=sequence.max_len - 1,  # the last token is never put into the cache
                reserved=len(sequence.table.blocks) * memory.block_size,
            )
        usage.end_step()

    _replay(requests, 1, memory, seed, count)
    return usage


def replay_samples(
    requests: Sequence[tuple[int, int]], n: int, memory: Memory, seed: int
) -> BlockSharing:
    """`n` samples of every request, all of the output length that the trace has."""
    sharing = BlockSharing()

    def count(engine: Engine) -> None:
        # Until its prompt is through, one sequence stands for all samples.
        running = engine.scheduler.running
        sharing.add_step(
            logical=sum(sequence.width * len(sequence.table.blocks) for sequence in running),
            physical=engine.pool.num_blocks - engine.pool.num_free,
            sequences=engine.scheduler.num_running,
        )

    _replay(requests, n, memory, seed, count)
    return sharing


def prompts_alone(requests: Sequence[tuple[int, int]], n: int, block_size: int) -> float:
    """Share of blocks saved where `n` samples share their prompt and nothing else.

    What the lengths allow: all samples run from the first step, whose partly full block they share,
    to the last, none is preempted, and each step puts one more token into the cache.
    """
    logical = shared = 0
    for prompt, output in requests:
        blocks = [-(-(prompt + step) // block_size) for step in range(output)]
        logical += n * sum(blocks)
        shared += (n - 1) * (blocks[0] + (output - 1) * (prompt // block_size))
    return shared / logical


def _replay(
    requests: Sequence[tuple[int, int]],
    n: int,
    memory: Memory,
    seed: int,
    count: Callable[[Engine], None],
) -> None:
    """Run all requests, and count in each step for which one waits: under load, that is.

    Raises RuntimeError where a block is not free at the end.
    """
    runner = MadeUpTokens(seed)
    engine = memory.engine(runner)
    runner.during_step = lambda: count(engine) if engine.scheduler.waiting else None
    draw = random.Random(seed)
    for i, (prompt, output) in enumerate(requests):
        params = SamplingParams(n=n, max_tokens=output, ignore_eos=True)
        engine.add_request(str(i), draw.choices(range(VOCAB_SIZE), k=prompt), params)
    while engine.has_unfinished():
        engine.step()
    if engine.pool.num_free != engine.pool.num_blocks:
        raise RuntimeError(f"{engine.pool.num_blocks - engine.pool.num_free} blocks were lost")
