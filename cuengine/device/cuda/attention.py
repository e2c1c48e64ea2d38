"""Paged attention over a mixed batch: what to launch (`plan`, once a step), and the launches.

The leading sequences of a batch with few queries are decodes; all others are cut into tiles for the
prefill kernel. Tiles, splits and shared memory are in attention_launch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuengine.batch import Batch, Int32
from cuengine.device.attention_launch import (
    MAX_DECODE_QUERIES,
    decode_launch,
    num_splits,
    prefill_launch,
    prefill_tiles,
)
from cuengine.device.cuda.kernels import KernelSet
from cuengine.device.cuda.runtime import Runtime
from cuengine.device.interface import AttentionShape
from cuengine.device.kernel_variants import uses_tensor_cores

_FLOAT = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a step's attention is launched, the same for every layer.

    num_decodes, decode_tokens  the leading sequences for the decode kernel, and all their queries
    max_queries                 the most queries that one of them has
    splits                      parts that their contexts are cut into
    tiles                       int32 [num_tiles, 2] for the prefill kernel
    """

    num_decodes: int
    decode_tokens: int
    max_queries: int
    splits: int
    tiles: Int32


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The KV cache that a layer's pointer leads to."""

    num_blocks: int
    block_size: int


class PagedAttention:
    """Knows a model's heads and the GPU. Partial results of split contexts live in it."""

    def __init__(
        self,
        runtime: Runtime,
        kernels: KernelSet,
        shape: AttentionShape,
        dtype: str,
        itemsize: int,
        *,
        max_num_seqs: int,
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._multiprocessors = runtime.multiprocessors
        self._tensor_cores = uses_tensor_cores(dtype, runtime.architecture)
        self._decode = decode_launch(shape.head_dim, itemsize, tensor_cores=self._tensor_cores)
        self._prefill = prefill_launch(shape.head_dim, itemsize, tensor_cores=self._tensor_cores)
        self._group = shape.num_heads // shape.num_kv_heads
        # As many rows as num_splits comes to for any number of sequences with one query each.
        self._partial_rows = 2 * runtime.multiprocessors // shape.num_kv_heads + max_num_seqs + 1
        heads = self._partial_rows * shape.num_heads
        self._runtime = runtime
        self._partial_out = runtime.empty((heads, shape.head_dim), _FLOAT)
        self._partial_logs = runtime.empty((heads,), _FLOAT)

    def most_tiles(self, max_tokens: int, max_num_seqs: int) -> int:
        """Tiles for the prefill kernel in any step of so many tokens and sequences."""
        rows_per_query = 1 if self._tensor_cores else self._group
        return max_tokens * rows_per_query // self._prefill.rows + max_num_seqs

    def plan_decodes(self, num_seqs: int, longest: int) -> AttentionPlan:
        """For sequences with one query each."""
        splits = self._splits(num_seqs, num_seqs, 1, longest)
        return AttentionPlan(num_seqs, num_seqs, 1, splits, np.empty((0, 2), np.int32))

    def plan(self, batch: Batch) -> AttentionPlan:
        starts = batch.query_start_loc
        counts = np.diff(starts)
        many = np.flatnonzero(counts > MAX_DECODE_QUERIES)
        num_decodes = int(many[0]) if len(many) else len(counts)
        tokens = int(starts[num_decodes])
        tiles = prefill_tiles(
            counts.tolist(),
            batch.seq_lens.tolist(),
            self._prefill.rows,
            1 if self._tensor_cores else self._group,
            num_decodes,
        )
        if num_decodes == 0:
            return AttentionPlan(0, 0, 0, 1, tiles)
        max_queries = int(counts[:num_decodes].max())
        longest = int(batch.seq_lens[:num_decodes].max())
        splits = self._splits(num_decodes, tokens, max_queries, longest)
        return AttentionPlan(num_decodes, tokens, max_queries, splits, tiles)

    def _splits(self, num_seqs: int, tokens: int, max_queries: int, longest: int) -> int:
        blocks = num_seqs * self._shape.num_kv_heads * self._row_tiles(max_queries)
        wanted = num_splits(blocks, longest, self._multiprocessors)
        return max(1, min(wanted, self._partial_rows // max(1, tokens)))

    def _row_tiles(self, max_queries: int) -> int:
        return -(-max_queries * self._group // self._decode.rows)

    def launch(
        self,
        plan: AttentionPlan,
        cache: CacheLayout,
        *,
        out: int,
        q: int,
        kv_layer: int,
        block_tables: int,
        table_width: int,
        query_start_loc: int,
        seq_lens: int,
        tiles: int,
    ) -> None:
        """Arguments are addresses, and the width of a row of the block tables."""
        shape, kernels = self._shape, self._kernels
        if plan.decode_tokens:
            partial_out = partial_logs = 0
            if plan.splits > 1:
                self._runtime.discard(self._partial_out)
                self._runtime.discard(self._partial_logs)
                partial_out = self._runtime.address(self._partial_out)
                partial_logs = self._runtime.address(self._partial_logs)
            kernels.paged_attention_decode(
                (
                    shape.num_kv_heads * self._row_tiles(plan.max_queries),
                    plan.num_decodes,
                    plan.splits,
                ),
                (self._decode.threads, 1, 1),
                *(out, partial_out, partial_logs, q, kv_layer),
                *(block_tables, query_start_loc, seq_lens),
                *(plan.decode_tokens, shape.num_heads, shape.num_kv_heads),
                *(cache.num_blocks, cache.block_size, table_width),
                *(plan.max_queries, shape.scale),
                shared_bytes=self._decode.shared_bytes,
            )
            if plan.splits > 1:
                kernels.paged_attention_reduce(
                    (shape.num_heads, plan.num_decodes, plan.max_queries),
                    (-(-shape.head_dim // 32) * 32, 1, 1),
                    *(out, partial_out, partial_logs, query_start_loc),
                    *(plan.splits, plan.decode_tokens, shape.num_heads, plan.max_queries),
                )
        if len(plan.tiles):
            kernels.paged_attention_prefill(
                (
                    shape.num_heads if self._tensor_cores else shape.num_kv_heads,
                    len(plan.tiles),
                    1,
                ),
                (self._prefill.threads, 1, 1),
                *(out, q, kv_layer, block_tables, query_start_loc, seq_lens, tiles),
                *(shape.num_heads, shape.num_kv_heads),
                *(cache.num_blocks, cache.block_size, table_width, shape.scale),
                shared_bytes=self._prefill.shared_bytes,
            )
