"""Block tables: which physical blocks hold a sequence's tokens, in order.

Which blocks are free and who shares them is in block_pool.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from cuengine.block_pool import BlockPool


class BlockTable:
    """The blocks of one sequence. Token i lives in block `blocks[i // block_size]`.

    blocks      int32, so that NumPy can read it without a conversion
    num_tokens  tokens that have a slot, written or about to be
    """

    __slots__ = ("blocks", "num_tokens", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: array[int] = array("i")
        self.num_tokens = 0

    def adopt(self, blocks: Iterable[int]) -> None:
        """Begin with full blocks found in the prefix cache."""
        for block in blocks:
            self.pool.share(block)
            self.blocks.append(block)
        self.num_tokens = len(self.blocks) * self.pool.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """Free blocks that `grow(num_tokens)` takes."""
        if num_tokens <= self.num_tokens:
            return 0
        needed = -(-num_tokens // self.pool.block_size) - len(self.blocks)
        return needed + self._last_block_is_shared()

    def grow(self, num_tokens: int) -> tuple[int, int] | None:
        """Claim slots up to `num_tokens` in all, in new blocks where the last one is full.

        Where the last block has room but other owners too, it is replaced by a copy of its own:
        the (from, to) returned must be copied in the cache before anything is written to it.
        """
        if num_tokens <= self.num_tokens:
            return None
        pool, copy = self.pool, None
        if self._last_block_is_shared():
            copy = (self.blocks[-1], pool.allocate())
            pool.release(copy[0])
            self.blocks[-1] = copy[1]
        while len(self.blocks) * pool.block_size < num_tokens:
            self.blocks.append(pool.allocate())
        self.num_tokens = num_tokens
        return copy

    def shrink(self, num_tokens: int) -> None:
        """Give the slots after the first `num_tokens` back, with the blocks that hold none else."""
        if num_tokens < self.num_tokens:
            kept = -(-num_tokens // self.pool.block_size)
            for block in reversed(self.blocks[kept:]):
                self.pool.release(block)
            del self.blocks[kept:]
            self.num_tokens = num_tokens

    def fork(self) -> BlockTable:
        """A second table over the same blocks, shared until one of the two writes."""
        table = BlockTable(self.pool)
        for block in self.blocks:
            self.pool.share(block)
        table.blocks = self.blocks[:]
        table.num_tokens = self.num_tokens
        return table

    def free(self) -> None:
        """Give all blocks back, last one first: a prefix is worth more than what follows it."""
        for block in reversed(self.blocks):
            self.pool.release(block)
        self.blocks = array("i")
        self.num_tokens = 0

    def _last_block_is_shared(self) -> bool:
        """The next token would go into a block that others own too."""
        partly_full = self.num_tokens % self.pool.block_size != 0
        return partly_full and self.pool.ref_count(self.blocks[-1]) > 1
