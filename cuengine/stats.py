"""Counters of an engine, for /metrics, the log and the benchmarks.

Latencies (TTFT, TPOT) are observed where the tokens are handed out, not here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest


@dataclass(slots=True)
class EngineStats:
    """A snapshot; totals count from the engine's start.

    num_running         samples that run
    num_waiting         sequences in the queue, preempted ones among them
    num_free_blocks     blocks nobody owns, cached or not
    num_cached_blocks   blocks that the prefix cache can find, owned or not
    prefix_queries      prompt tokens looked up in the prefix cache
    prefix_hits         prompt tokens found there
    num_preemptions     sequences that had to give up their blocks
    num_swaps           of these, sequences whose blocks went to host memory
    prompt_tokens       of admitted requests, cached ones included
    generation_tokens   tokens drawn
    mean_batch          sequences per step
    num_drafts          times that tokens were guessed for a sequence (speculative decoding)
    num_draft_tokens    tokens guessed
    num_accepted_tokens of these, tokens that were drawn indeed
    num_accepted_tokens_per_pos  the same by place in their draft, the first token's first
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    mean_batch: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    def after_the_end(self) -> EngineStats:
        """When this engine is gone: nothing runs, and no block is used."""
        return replace(
            self,
            num_running=0,
            num_waiting=0,
            num_free_blocks=self.num_blocks,
            num_used_blocks=0,
            num_cached_blocks=0,
        )

    def following(self, earlier: EngineStats) -> EngineStats:
        """These, with totals counted from the start of an engine that was before."""
        totals = {name: getattr(self, name) + getattr(earlier, name) for name in TOTALS}
        steps = self.num_steps + earlier.num_steps
        sequences = self.mean_batch * self.num_steps + earlier.mean_batch * earlier.num_steps
        mine, before = self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos
        return replace(
            self,
            mean_batch=sequences / max(1, steps),
            num_accepted_tokens_per_pos=tuple(map(sum, zip_longest(mine, before, fillvalue=0))),
            **totals,
        )


def combined(engines: Iterable[EngineStats]) -> EngineStats:
    """Of several engines, as if they were one."""
    sums = EngineStats()
    for stats in engines:
        gauges = {name: getattr(stats, name) + getattr(sums, name) for name in GAUGES}
        sums = replace(stats.following(sums), **gauges)
    return sums


GAUGES = (
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_free_blocks",
    "num_used_blocks",
    "num_cached_blocks",
)
"""Names of the figures of the moment that can be added up."""

TOTALS = (
    "prefix_queries",
    "prefix_hits",
    "num_preemptions",
    "num_swaps",
    "num_steps",
    "prompt_tokens",
    "generation_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)
"""Names of the figures that only grow."""
