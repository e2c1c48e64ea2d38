"""A trace in this engine's KV memory: the real engine, with tokens made up in place of a model's.

All that decides about memory is the engine's own: admission, chunks of prompts, blocks claimed,
shared, copied and freed, preemption, which beams fork and which are dropped. Only lengths come from
the trace, and the scores of what may follow a beam from a recording (record_beams.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from memory_counts import BlockSharing, SlotUsage

from cuengine import BeamSearchParams, EngineConfig, SamplingParams
from cuengine.batch import Batch, Float32, SamplerOutput, SamplingBatch
from cuengine.engine import Engine, LoadedModel
from cuengine.sampling_params import RequestParams

VOCAB_SIZE = 32000

NO_RECORDING = np.empty((1, 1, 0), np.float32)

Params = Callable[[int], RequestParams]
"""What a request asks for, by the length of its output."""


def parallel(n: int) -> Params:
    """`n` samples, all of the output length that the trace has."""
    return lambda output: SamplingParams(n=n, max_tokens=output, ignore_eos=True)


def beam(width: int) -> Params:
    return lambda output: BeamSearchParams(width, output, ignore_eos=True)


def read_recording(path: Path) -> Float32:
    """Log-probabilities [steps, beams, candidates] from a file of record_beams.py."""
    recorded = json.loads(path.read_text())
    return np.array(recorded["steps"], np.float32) / recorded["scale"]


class MadeUpTokens:
    """A runner that draws every token evenly: no two outputs are alike, and none ends early.

    Likely tokens, where they are asked for, are made up as well, with recorded log-probabilities:
    each search goes through the recording step by step, from a place that its seed says, and each
    beam has the line of its rank. How the scores of beams drift apart over the steps decides how
    long they live side by side; lines drawn at random would let them part and meet too often.

    recording    float32 [steps, beams, candidates]: log-probabilities, best first
    during_step  called while a step has all its blocks, and nothing of it has been given back
    """

    overlaps = False

    def __init__(self, recording: Float32, seed: int) -> None:
        self._recording = recording
        self._rng = np.random.default_rng(seed)
        self.during_step: Callable[[], None] = lambda: None

    def range(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, batch: Batch, sampling: SamplingBatch) -> _Step:
        return _Step(self, sampling)

    def draw(self, sampling: SamplingBatch) -> SamplerOutput:
        rows, most = len(sampling.seeds), max(0, int(sampling.num_logprobs.max(initial=0)))
        token_ids = self._rng.integers(VOCAB_SIZE, size=rows, dtype=np.int32)
        num_steps, num_beams, _ = self._recording.shape
        steps = (sampling.seeds % np.uint64(num_steps)).astype(np.int64) + sampling.positions
        beams = sampling.sample_indices % num_beams
        return SamplerOutput(
            token_ids=token_ids,
            logprobs=np.full(rows, np.nan, np.float32),
            ranks=np.zeros(rows, np.int32),
            # One after the other, so that a row has none twice.
            top_ids=(token_ids[:, None] + np.arange(most, dtype=np.int32)) % VOCAB_SIZE,
            top_logprobs=self._recording[steps % num_steps, beams, :most],
        )


@dataclass(frozen=True, slots=True)
class _Step:
    runner: MadeUpTokens
    sampling: SamplingBatch

    def fetch(self) -> SamplerOutput:
        self.runner.during_step()
        return self.runner.draw(self.sampling)


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

    _replay(requests, parallel(1), memory, MadeUpTokens(NO_RECORDING, seed), count)
    return usage


def replay_shared(
    requests: Sequence[tuple[int, int]], params: Params, memory: Memory, runner: MadeUpTokens
) -> BlockSharing:
    """Several samples or beams of every request: how many blocks they share."""
    sharing = BlockSharing()

    def count(engine: Engine) -> None:
        # Until its prompt is through, one sequence stands for all of its request.
        running = engine.scheduler.running
        sharing.add_step(
            logical=sum(sequence.width * len(sequence.table.blocks) for sequence in running),
            physical=engine.pool.num_blocks - engine.pool.num_free,
            sequences=engine.scheduler.num_running,
        )

    _replay(requests, params, memory, runner, count)
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
    params: Params,
    memory: Memory,
    runner: MadeUpTokens,
    count: Callable[[Engine], None],
) -> None:
    """Run all requests, and count in each step for which one waits: under load, that is.

    Raises RuntimeError where a block is not free at the end.
    """
    engine = memory.engine(runner)
    runner.during_step = lambda: count(engine) if engine.scheduler.waiting else None
    draw = random.Random(0)
    for i, (prompt, output) in enumerate(requests):
        tokens = draw.choices(range(VOCAB_SIZE), k=prompt)
        engine.add_request(str(i), tokens, params(output))
    while engine.has_unfinished():
        engine.step()
    if engine.pool.num_free != engine.pool.num_blocks:
        raise RuntimeError(f"{engine.pool.num_blocks - engine.pool.num_free} blocks were lost")
