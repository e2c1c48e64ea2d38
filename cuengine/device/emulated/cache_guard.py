"""Which slots of a KV cache a step may touch, and which were ever written.

The one big array of the cache is in bounds for any address: only this finds a kernel that reads
another sequence's block, a slot behind a sequence's end, or one that no kernel has written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cuengine.device.emulated.runtime import NO_ACCESS, UNDEFINED


class CacheGuard:
    """Keeps a cache's shadow: uint8 [layers, 2, blocks, kv_heads, block_size, head_dim, itemsize].

    A slot is a token's place: block * block_size + offset, in all layers and heads at once.
    """

    def __init__(self, shadow: NDArray[np.uint8]) -> None:
        self._shadow = shadow
        self.block_size = shadow.shape[4]
        self._written = np.zeros((shadow.shape[2], self.block_size), bool)
        self._open = np.arange(shadow.shape[2])
        """Blocks that may not be closed altogether."""

    def allow(
        self,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
    ) -> None:
        """The sequences' slots and nothing else; those of slot_mapping to be written first."""
        state = np.full(self._written.shape, NO_ACCESS, np.uint8)
        opened = []
        for table, length in zip(block_tables, seq_lens.tolist(), strict=True):
            for index in range(-(-length // self.block_size)):
                block = int(table[index])
                if not 0 <= block < len(state):
                    raise ValueError(f"block {block} in a block table of {len(state)} blocks")
                end = min(self.block_size, length - index * self.block_size)
                known = self._written[block, :end]
                # A block that two sequences share is as open as the longer one needs it.
                state[block, :end] = np.where(known, 0, UNDEFINED)
                opened.append(block)
        flat = state.reshape(-1)
        if (flat[slot_mapping] == NO_ACCESS).any():
            raise ValueError("slot_mapping names slots behind the end of every sequence")
        flat[slot_mapping] = UNDEFINED
        self._written.reshape(-1)[slot_mapping] = True
        self._set(np.union1d(self._open, opened).astype(np.int64), state)
        self._open = np.array(sorted(set(opened)), np.int64)

    def allow_copies(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Whole blocks, read and written; targets are as written as sources, or wholly."""
        if len(targets):
            self._written[targets] = self._written[sources] if len(sources) else True
        blocks = np.concatenate([sources, targets])
        self._shadow[:, :, blocks] = 0
        self._open = np.union1d(self._open, blocks)

    def _set(self, blocks: NDArray[np.int64], state: NDArray[np.uint8]) -> None:
        self._shadow[:, :, blocks] = state[blocks][None, None, :, None, :, None, None]
