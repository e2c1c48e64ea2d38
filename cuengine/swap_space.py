"""Room in host memory for the KV blocks of preempted sequences, and whether using it pays.

Only bookkeeping: the scheduler says which blocks move, the device moves them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cuengine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Seconds, as rough as the device's rates are.

    block  moving one KV block out and in again
    token  computing one token's keys and values once more
    """

    block: float
    token: float

    @classmethod
    def of(
        cls, *, block_bytes: int, weights: int, swap_rate: float, compute_rate: float
    ) -> SwapCosts:
        """weights: numbers that a token is multiplied with; rates: the device's, in bytes and
        floating-point operations a second."""
        return cls(block=2 * block_bytes / swap_rate, token=2 * weights / compute_rate)


class SwapSpace:
    """The host's blocks; each belongs to one sequence, to beams that go on from it, or to none."""

    def __init__(self, num_blocks: int, block_size: int, costs: SwapCosts) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_caching=False)
        self.costs = costs

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """There is room for num_blocks, and moving them costs less than computing num_tokens."""
        cheaper = num_blocks * self.costs.block < num_tokens * self.costs.token
        return cheaper and num_blocks <= self.pool.num_free

    def claim(self, num_blocks: int) -> list[int]:
        return [self.pool.allocate() for _ in range(num_blocks)]

    def share(self, blocks: list[int]) -> list[int]:
        """One more owner for each."""
        for block in blocks:
            self.pool.share(block)
        return blocks[:]

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.release(block)
