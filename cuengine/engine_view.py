"""What an engine can be seen to do: its blocks, whose they are, and the work of its last steps.

A picture for people, taken between two steps and only when somebody looks. It says what the block
pool and the block tables say, each for itself, so that one can be held against the other. How it is
drawn is the business of api/.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from cuengine.sequence import SequenceStatus
from cuengine.stats import EngineStats

if TYPE_CHECKING:
    from cuengine.block_pool import BlockPool
    from cuengine.scheduler import Chunk, Scheduler
    from cuengine.sequence import Sequence

NUM_STEPS = 120
"""Steps that are remembered."""

MAX_QUEUED = 100
"""Sequences of the queue that a view names; it counts all."""


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """One step's batch, in tokens.

    step       its number, from 1 on
    sequences  that it ran
    prefill    of prompts, and of what is computed again after a preemption
    decode     one for each sequence that goes on from its last token
    guessed    speculative ones after those
    """

    step: int
    sequences: int
    prefill: int
    decode: int
    guessed: int


class SequenceView(msgspec.Struct, frozen=True):
    """One running sequence: a sample, a beam, or a prompt that will be split into several.

    width         sequences it stands for until its prompt is through
    prompt_len    tokens of the prompt
    num_tokens    of prompt and output, as far as they are drawn
    num_computed  of these, tokens whose keys and values are in the cache
    num_slots     tokens that its blocks have been claimed for
    blocks        its block table: int32, little-endian
    """

    request_id: str
    index: int
    width: int
    prompt_len: int
    num_tokens: int
    num_computed: int
    num_slots: int
    blocks: bytes


QueuedState = Literal["waiting", "preempted", "swapped", "held"]


class QueuedView(msgspec.Struct, frozen=True):
    """A sequence that does not run.

    state  waiting: it has not run yet; preempted: it gave its blocks up and will be computed again;
           swapped: its blocks are in host memory; held: a beam that waits for its search
    """

    request_id: str
    index: int
    num_tokens: int
    state: QueuedState


class EngineView(msgspec.Struct, frozen=True):
    """An engine between two steps.

    time          seconds, on a clock that only goes forward
    block_size    tokens in a block
    ref_counts    uint8 [num_blocks], owners of each block as the pool counts them; 255: that many
                  or more
    cached        a bit a block, the first one lowest: the prefix cache can find it
    running       in the scheduler's order
    queue         the first MAX_QUEUED of those that do not run, next one first
    queued        how many do not run, by state
    num_host_blocks, num_free_host_blocks  room for swapped sequences
    steps         the last NUM_STEPS, oldest first
    token_budget  most tokens in a step
    speculative   tokens are guessed
    """

    time: float
    block_size: int
    ref_counts: bytes
    cached: bytes
    running: list[SequenceView]
    queue: list[QueuedView]
    queued: dict[QueuedState, int]
    num_host_blocks: int
    num_free_host_blocks: int
    steps: list[StepView]
    token_budget: int
    speculative: bool
    stats: EngineStats

    def renamed(self, name: Callable[[str], str], stats: EngineStats) -> EngineView:
        """The same with other names for its requests, and other totals."""
        replace = msgspec.structs.replace
        return replace(
            self,
            running=[replace(s, request_id=name(s.request_id)) for s in self.running],
            queue=[replace(s, request_id=name(s.request_id)) for s in self.queue],
            stats=stats,
        )


def view_step(number: int, chunks: ListOf[Chunk]) -> StepView:
    """A step that is about to be launched."""
    prefill = decode = guessed = 0
    for chunk in chunks:
        known = chunk.known_end - chunk.start
        if known == 1 and chunk.start >= chunk.sequence.prompt_len:
            decode += 1
        else:
            prefill += known
        guessed += chunk.num_drafts
    return StepView(number, len(chunks), prefill, decode, guessed)


def view_engine(
    scheduler: Scheduler, steps: Iterable[StepView], stats: EngineStats, *, speculative: bool
) -> EngineView:
    """In time of the blocks that are held and those in the prefix cache."""
    waiting = [*scheduler.waiting, *scheduler.held]
    queued: dict[QueuedState, int] = {"waiting": 0, "preempted": 0, "swapped": 0, "held": 0}
    for sequence in waiting:
        queued[_state(sequence)] += 1
    pool = scheduler.pool
    host = None if scheduler.swap_space is None else scheduler.swap_space.pool
    return EngineView(
        time=time.monotonic(),
        block_size=pool.block_size,
        ref_counts=pool.ref_counts(),
        cached=_bits(pool),
        running=[_view_sequence(sequence) for sequence in scheduler.running],
        queue=[
            QueuedView(s.request.request_id, s.index, len(s.token_ids), _state(s))
            for s in waiting[:MAX_QUEUED]
        ],
        queued=queued,
        num_host_blocks=0 if host is None else host.num_blocks,
        num_free_host_blocks=0 if host is None else host.num_free,
        steps=list(steps),
        token_budget=scheduler.max_num_batched_tokens,
        speculative=speculative,
        stats=stats,
    )


def _view_sequence(sequence: Sequence) -> SequenceView:
    return SequenceView(
        request_id=sequence.request.request_id,
        index=sequence.index,
        width=sequence.width,
        prompt_len=sequence.prompt_len,
        num_tokens=len(sequence.token_ids),
        num_computed=sequence.num_computed,
        num_slots=sequence.table.num_tokens,
        blocks=sequence.table.blocks.tobytes(),
    )


def _state(sequence: Sequence) -> QueuedState:
    if sequence.status is SequenceStatus.HELD:
        return "held"
    if sequence.host_blocks:
        return "swapped"
    # What the prompt had in the cache is known from the first admission on.
    return "waiting" if sequence.request.num_cached_tokens is None else "preempted"


def _bits(pool: BlockPool) -> bytes:
    flags = np.zeros(pool.num_blocks, np.bool_)
    flags[np.fromiter(pool.cached_blocks(), np.int64, pool.num_cached)] = True
    return np.packbits(flags, bitorder="little").tobytes()
