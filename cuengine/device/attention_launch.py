"""How attention kernels are launched: tiles, splits, grids, shared memory.

The numbers mirror constants in cuda/paged_attention_*.cu and cuda/include/attention_*.cuh; the
compilation tests hold shared memory to each architecture's limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuengine.batch import Int32

MAX_DECODE_QUERIES = 8
"""Leading sequences of a batch with at most so many queries go to the decode kernel."""

_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """rows: of a tile; a prefill tile's are queries with tensor cores, else query * group + head.

    threads: of a block. shared_bytes: dynamic shared memory of a block.
    """

    rows: int
    threads: int
    shared_bytes: int


def _row_bytes(head_dim: int) -> int:
    """Of `SharedRows`: 16-bit elements, swizzled or padded to an odd count of 16-byte chunks."""
    chunks = head_dim // 8
    return 16 * (chunks if chunks % 8 == 0 else chunks | 1)


def _plain(rows: int, head_dim: int, itemsize: int) -> AttentionLaunch:
    stride = 16 * ((head_dim * itemsize // 16) | 1)
    return AttentionLaunch(rows, 128, rows * head_dim * 4 + 32 * stride)


def decode_launch(head_dim: int, itemsize: int, *, tensor_cores: bool) -> AttentionLaunch:
    """Grid: (num_kv_heads * ceil(max_queries * group / rows), num_seqs, num_splits)."""
    if not tensor_cores:
        return _plain(8, head_dim, itemsize)
    warps = 2 if head_dim > 128 else 4
    # Queries, then two stages of K and V, 16 keys each, for every warp.
    return AttentionLaunch(16, warps * 32, (16 + warps * 2 * 2 * 16) * _row_bytes(head_dim))


def prefill_launch(head_dim: int, itemsize: int, *, tensor_cores: bool) -> AttentionLaunch:
    """Grid: (num_heads, num_tiles) with tensor cores, else (num_kv_heads, num_tiles)."""
    if not tensor_cores:
        return _plain(16, head_dim, itemsize)
    rows = 64 if head_dim > 128 else 128
    keys = 32 if head_dim > 64 else 64
    return AttentionLaunch(rows, 128, (rows + 2 * 2 * keys) * _row_bytes(head_dim))


def prefill_tiles(
    query_counts: Sequence[int],
    seq_lens: Sequence[int],
    rows: int,
    rows_per_query: int,
    first_seq: int = 0,
) -> Int32:
    """int32 [num_tiles, 2]: sequence and first row, of the sequences from first_seq on.

    rows_per_query: 1 with tensor cores, else query heads per KV head. Longest contexts first, so
    that no long tile starts when the others are done.
    """
    tiles = []
    for seq in range(first_seq, len(query_counts)):
        count, length = query_counts[seq], seq_lens[seq]
        for first in range(0, count * rows_per_query, rows):
            visible = length - count + min(count, (first + rows) // rows_per_query)
            tiles.append((visible, seq, first))
    tiles.sort(reverse=True)
    return np.array([tile[1:] for tile in tiles], np.int32).reshape(-1, 2)


def num_splits(blocks: int, longest: int, multiprocessors: int) -> int:
    """Parts of the context, so that `blocks` blocks without splitting come to fill the chip.

    1 where there are enough; no part shorter than 256 keys of the longest context.
    """
    wanted = -(-2 * multiprocessors // max(1, blocks))
    return max(1, min(wanted, longest // _KEYS_PER_SPLIT, _MAX_SPLITS))
