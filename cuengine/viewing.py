"""Takes views of an engine: of a step that is launched, and of everything between two steps.

What a view has in it is in engine_view.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

import numpy as np

from cuengine.engine_view import (
    MAX_QUEUED,
    EngineView,
    QueuedState,
    QueuedView,
    SequenceView,
    StepView,
)
from cuengine.sequence import SequenceStatus
from cuengine.stats import EngineStats

if TYPE_CHECKING:
    from cuengine.block_pool import BlockPool
    from cuengine.scheduler import Chunk, Scheduler
    from cuengine.sequence import Sequence


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
