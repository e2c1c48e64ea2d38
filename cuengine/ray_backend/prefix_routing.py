"""Which replica gets a request: the one with most of its prefix, unless that one is too busy.

What a replica has is not asked but remembered: the prompts that were sent there, in blocks of
tokens, the last `capacity` of them. An engine keeps its blocks in the same order.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Mapping, Sequence

from cuengine.block_pool import chain_hash, root_hash

CAPACITY = 32768
"""Blocks that are remembered of each replica."""

_BYTES = 16


def block_hashes(
    prompt_token_ids: Sequence[int], block_size: int, cache_salt: str | None
) -> list[bytes]:
    """One for each full block of a prompt, which stands for all before it, too."""
    tokens = array("i", prompt_token_ids)
    parent = root_hash(cache_salt)
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = chain_hash(parent, tokens[start : start + block_size].tobytes())
        hashes.append(parent[:_BYTES])
    return hashes


class PrefixRouting:
    """Remembers who was sent what."""

    def __init__(self, margin: float, capacity: int = CAPACITY) -> None:
        """margin: requests by which a replica may be busier than another and still get one whose
        whole prompt it has; of a prompt that it has in part, that part of them. So a short prefix
        that all prompts have in common does not send all of them to one place.
        """
        self._margin = margin
        self._capacity = capacity
        # Hashes of each replica's blocks, the one used longest ago first.
        self._blocks: dict[str, dict[bytes, None]] = {}
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others."""
        for known in (self._blocks, self._last_turn):
            for name in known.keys() - set(replicas):
                del known[name]

    def num_blocks(self, replica: str) -> int:
        """That are remembered of it."""
        return len(self._blocks.get(replica, ()))

    def matched(self, replica: str, hashes: Sequence[bytes]) -> int:
        """Blocks at the beginning of a prompt that a replica has."""
        blocks = self._blocks.get(replica, {})
        missing = (i for i, block in enumerate(hashes) if block not in blocks)
        return next(missing, len(hashes))

    def rank(
        self, hashes: Sequence[bytes], loads: Mapping[str, int], avoid: Collection[str] = ()
    ) -> list[str]:
        """All replicas that `loads` names with their unfinished requests, the best one first."""

        def cost(name: str) -> tuple[bool, float, float, int]:
            share = self.matched(name, hashes) / max(1, len(hashes))
            # Of those that are equally good it is the turn of the one that waits for it longest.
            turn = self._last_turn.get(name, 0)
            return name in avoid, loads[name] - self._margin * share, -share, turn

        return sorted(loads, key=cost)

    def sent(self, replica: str, hashes: Sequence[bytes]) -> None:
        """It has been given a prompt."""
        self._last_turn[replica] = next(self._turns)
        blocks = self._blocks.setdefault(replica, {})
        # A prefix is of use without what follows, and not the other way round: it is to stay.
        for block in reversed(hashes[: self._capacity]):
            blocks.pop(block, None)
            blocks[block] = None
        for block in list(itertools.islice(blocks, max(0, len(blocks) - self._capacity))):
            del blocks[block]
