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
from slot_usage import SlotUsage

from cuengine import EngineConfig, SamplingParams
from cuengine.batch import Batch, SamplerOutput, SamplingBatch
from cuengine.engine import Engine, LoadedModel

VOCAB_SIZE = 32000


class MadeUpTokens:
    """A runner that draws every token evenly: no two outputs are alike, and none ends early."""

    overlaps = False

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def range(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, batch: Batch, sampling: SamplingBatch) -> SamplerOutput:
        rows = len(batch.logits_indices)
        none = np.empty((rows, 0))
        return SamplerOutput(
            token_ids=self._rng.integers(VOCAB_SIZE, size=rows, dtype=np.int32),
            logprobs=np.full(rows, np.nan, np.float32),
            ranks=np.zeros(rows, np.int32),
            top_ids=none.astype(np.int32),
            top_logprobs=none.astype(np.float32),
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is of it, and how it is cut."""

    num_slots: int
    block_size: int
    max_model_len: int

    def engine(self, seed: int) -> Engine:
        """Nothing but memory limits what runs at once."""
        return Engine(
            EngineConfig(block_size=self.block_size, max_num_seqs=self.num_slots),
            LoadedModel(vocab_size=VOCAB_SIZE),
            MadeUpTokens(seed),
            num_blocks=self.num_slots // self.block_size,
            max_model_len=self.max_model_len,
        )


@dataclass(slots=True)
class BlockSharing:
    """Blocks, averaged over steps.

    saved      sum over steps of (logical - physical) / logical blocks
    sequences  sequences that ran, times steps
    """

    steps: int = 0
    saved: float = 0.0
    sequences: int = 0

    def add_step(self, *, logical: int, physical: int, sequences: int) -> None:
        """logical: blocks that the sequences would hold if each had its own."""
        self.steps += 1
        self.saved += (logical - physical) / logical
        self.sequences += sequences

    @property
    def mean_saved(self) -> float:
        return self.saved / self.steps

    @property
    def mean_sequences(self) -> float:
        return self.sequences / self.steps


def replay_alone(requests: Sequence[tuple[int, int]], memory: Memory, seed: int) -> SlotUsage:
    """One sample of every request; what the slots of all memory are used for."""
    engine, usage = memory.engine(seed), SlotUsage(memory.num_slots)

    def count() -> None:
        for sequence in engine.scheduler.running:
            usage.add_sequence(
                cached=sequence.num_computed,
                final=sequence.max_len - 1,  # the last token is never put into the cache
                reserved=len(sequence.table.blocks) * memory.block_size,
            )
        usage.end_step()

    _replay(engine, requests, 1, seed, count)
    return usage


def replay_samples(
    requests: Sequence[tuple[int, int]], memory: Memory, n: int, seed: int
) -> BlockSharing:
    """`n` samples of every request, all of the output length that the trace has."""
    engine, sharing = memory.engine(seed), BlockSharing()

    def count() -> None:
        # Until its prompt is through one sequence stands for all samples.
        running = engine.scheduler.running
        sharing.add_step(
            logical=sum(sequence.width * len(sequence.table.blocks) for sequence in running),
            physical=engine.pool.num_blocks - engine.pool.num_free,
            sequences=engine.scheduler.num_running,
        )

    _replay(engine, requests, n, seed, count)
    return sharing


def _replay(
    engine: Engine,
    requests: Sequence[tuple[int, int]],
    n: int,
    seed: int,
    count: Callable[[], None],
) -> None:
    """Run all requests, and count after each step for which one waits: under load, that is."""
    draw = random.Random(seed)
    for i, (prompt, output) in enumerate(requests):
        params = SamplingParams(n=n, max_tokens=output, ignore_eos=True)
        engine.add_request(str(i), draw.choices(range(VOCAB_SIZE), k=prompt), params)
    while engine.has_unfinished():
        engine.step()
        if engine.scheduler.waiting:
            count()
    if engine.pool.num_free != engine.pool.num_blocks:
        raise RuntimeError(f"{engine.pool.num_blocks - engine.pool.num_free} blocks were lost")
