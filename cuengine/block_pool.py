"""Physical KV-cache blocks: who owns which, and which may be reused.

A block is an index into the KV cache; this module never touches the cache itself. Block tables (the
order of blocks in a sequence) are in block_table.py; when to claim and to release is the
scheduler's business.

Every block is either owned (reference count > 0) or in the free list. The free list is also the
LRU of the prefix cache: a freed block keeps its contents and its hash until its turn to be reused
comes, and can be taken back by hash until then. Blocks that no hash finds go to the front.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

DIGEST_SIZE = 32
MAX_BYTE = 255


def root_hash(cache_salt: str | None) -> bytes:
    """Parent hash of a sequence's first block; requests with different salts share nothing."""
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
    return hashlib.blake2b(salt, digest_size=DIGEST_SIZE).digest()


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a full block: its tokens (int32, as bytes) and, through the parent, all before it.

    Cryptographic, so that nobody can craft a prompt that is answered from someone else's prefix.
    """
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_SIZE).digest()


class BlockPool:
    """All blocks of a KV cache. Every operation but `forget` is O(1).

    A hash names one block at most: a second block with equal contents (two requests that computed
    the same prefix in the same step) stays nameless and is reused first once it is free. Replacing
    it in its owner's table instead would save a block but make tables change under their owners.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.num_free = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # A doubly linked ring through the free blocks; entry num_blocks is its fixed point.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash, owned or free."""
        return len(self._by_hash)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        return self._hashes[block] is not None

    def ref_counts(self) -> bytes:
        """All reference counts, a byte each: MAX_BYTE stands for itself and for more."""
        try:
            return bytes(self._ref_counts)
        except ValueError:
            return bytes(min(count, MAX_BYTE) for count in self._ref_counts)

    def cached_blocks(self) -> Iterable[int]:
        """Blocks that can be found by hash, in no order that means anything."""
        return self._by_hash.values()

    def allocate(self) -> int:
        """Claim the least recently used free block, forgetting what it held.

        Callers look at `num_free` first; raises IndexError when there is none.
        """
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise IndexError("no free KV block")
        self._unlink(block)
        digest = self._hashes[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hashes[block] = None
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner, of an owned block or of a free one that was found by hash."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One owner less; the last one puts the block back into the free list."""
        count = self._ref_counts[block]
        if count == 0:
            raise ValueError(f"block {block} is released more often than it was claimed")
        self._ref_counts[block] = count - 1
        if count == 1:
            self._link(block, first=self._hashes[block] is None)

    def register(self, block: int, digest: bytes) -> None:
        """Make a full, owned block findable by its hash; its contents must be in the cache."""
        if self.enable_caching and digest not in self._by_hash and self._hashes[block] is None:
            self._by_hash[digest] = block
            self._hashes[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The block with this hash; to keep it, `share` it before anything is allocated."""
        return self._by_hash.get(digest)

    def forget(self) -> None:
        """Find nothing again of what was registered so far."""
        for block in self._by_hash.values():
            self._hashes[block] = None
        self._by_hash.clear()

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, *, first: bool) -> None:
        ring = self.num_blocks
        before, after = (ring, self._next[ring]) if first else (self._prev[ring], ring)
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_free += 1
