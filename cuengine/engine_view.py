"""What an engine can be seen to do: its blocks, whose they are, and the work of its last steps.

A picture for people, plain data that crosses to the server's process. It says what the block pool
and the block tables say, each for itself, so that one can be held against the other. Taking it is
in viewing.py, drawing it the business of api/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from cuengine.stats import EngineStats

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
