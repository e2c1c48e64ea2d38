"""Batches of sequences in a paged cache, for the tests of the attention kernels.

The cache is laid out as the engine has it, and all that belongs to no sequence is forbidden: blocks
that no table names, slots behind a sequence's last token, the padding of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from launching import NUMPY_TYPES, UNIT, Array, Emulator, random_array
from oracles import Attention, attention

from cuengine.device.attention_launch import decode_launch, prefill_launch, prefill_tiles


@dataclass(frozen=True, slots=True)
class Heads:
    """What a model's attention looks like, with the names that the kernels have for types."""

    short: str
    num_heads: int
    num_kv_heads: int
    dim: int
    block_size: int = 16
    tensor_cores: bool = True

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(np.float32(self.dim**-0.5))

    @property
    def itemsize(self) -> int:
        return np.dtype(NUMPY_TYPES[self.short]).itemsize

    def kernel(self, name: str) -> str:
        suffix = "" if self.tensor_cores else "_plain"
        return f"{name}{suffix}<{self.short}, {self.dim}>"


@dataclass(slots=True)
class PagedCase:
    """A batch and what attention makes of it.

    counts, lengths  queries, and tokens in the cache, of each sequence
    cache            [2, num_blocks, num_kv_heads, block_size, dim]
    """

    heads: Heads
    counts: list[int]
    lengths: list[int]
    q: Array
    cache: Array
    tables: Array
    expected: Attention

    @property
    def starts(self) -> Array:
        return np.cumsum([0, *self.counts]).astype(np.int32)


def make_case(
    gpu: Emulator,
    heads: Heads,
    sequences: list[tuple[int, int]],
    *,
    seed: int = 0,
    spread: float = 1.0,
) -> PagedCase:
    """sequences: (queries, tokens in the cache), a sequence of no queries owning nothing.

    spread: standard deviation of the queries; 1 makes scores of about -4 to 4.
    """
    random = np.random.default_rng(seed)
    size, dim = heads.block_size, heads.dim
    needed = [-(-length // size) for _, length in sequences]
    order = random.permutation(sum(needed) + 2).astype(np.int32)
    tables = np.full((len(sequences), max(needed) + 1), -1, np.int32)
    cache = random_array(random, (2, len(order), heads.num_kv_heads, size, dim), heads.short)
    num_tokens = sum(count for count, _ in sequences)
    q = random_array(random, (num_tokens, heads.num_heads, dim), heads.short, spread)
    out, magnitude = np.empty(q.shape), np.empty(q.shape)
    first_block = first_query = 0
    for row, ((count, length), blocks) in enumerate(zip(sequences, needed, strict=True)):
        owned = order[first_block : first_block + blocks]
        tables[row, :blocks] = owned
        first_block += blocks
        gpu.forbid(tables[row, blocks:])
        keys, values = (
            cache[part, owned].transpose(0, 2, 1, 3).reshape(-1, heads.num_kv_heads, dim)[:length]
            for part in range(2)
        )
        if count:
            end = first_query + count
            found = attention(q[first_query:end], keys, values, heads.scale)
            out[first_query:end], magnitude[first_query:end] = found.out, found.magnitude
            first_query = end
        if blocks:
            for part, head in np.ndindex(2, heads.num_kv_heads):
                gpu.forbid(cache[part, owned[-1], head, length - (blocks - 1) * size :])
    for block in order[first_block:]:
        for part in range(2):
            gpu.forbid(cache[part, block])
    counts, lengths = [count for count, _ in sequences], [length for _, length in sequences]
    return PagedCase(heads, counts, lengths, q, cache, tables, Attention(out, magnitude))


def run_decode(
    gpu: Emulator, case: PagedCase, num_splits: int = 1, max_queries: int | None = None
) -> Array:
    """The decode kernel over all sequences, and the reduce kernel where contexts are split."""
    heads, counts = case.heads, case.counts
    max_queries = max(counts) if max_queries is None else max_queries
    launch = decode_launch(heads.dim, heads.itemsize, tensor_cores=heads.tensor_cores)
    out = gpu.result(case.q.shape, case.q.dtype)
    num_tokens = len(case.q)
    partial_out = partial_logs = None
    if num_splits > 1:
        rows = (num_splits, num_tokens, heads.num_heads)
        partial_out = gpu.result((*rows, heads.dim), np.float32, "partial_out")
        partial_logs = gpu.result(rows, np.float32, "partial_logs")
    tiles = -(-max_queries * heads.group // launch.rows)
    starts = case.starts
    gpu.launch(
        heads.kernel("paged_attention_decode"),
        (heads.num_kv_heads * tiles, len(counts), num_splits),
        launch.threads,
        *(out, partial_out, partial_logs, case.q, case.cache, case.tables, starts),
        *(np.array(case.lengths, np.int32), num_tokens, heads.num_heads, heads.num_kv_heads),
        *(case.cache.shape[1], heads.block_size, case.tables.shape[1], max_queries, heads.scale),
        shared_bytes=launch.shared_bytes,
    )
    if num_splits > 1:
        gpu.launch(
            f"paged_attention_reduce<{heads.short}, {heads.dim}>",
            (heads.num_heads, len(counts), max_queries),
            -(-heads.dim // 32) * 32,
            *(out, partial_out, partial_logs, starts),
            *(num_splits, num_tokens, heads.num_heads, max_queries),
        )
    return out


def run_prefill(gpu: Emulator, case: PagedCase, first_seq: int = 0) -> Array:
    """The prefill kernel over the sequences from first_seq on."""
    heads = case.heads
    launch = prefill_launch(heads.dim, heads.itemsize, tensor_cores=heads.tensor_cores)
    tiles = prefill_tiles(
        case.counts,
        case.lengths,
        launch.rows,
        1 if heads.tensor_cores else heads.group,
        first_seq,
    )
    out = gpu.result(case.q.shape, case.q.dtype)
    gpu.launch(
        heads.kernel("paged_attention_prefill"),
        (heads.num_heads if heads.tensor_cores else heads.num_kv_heads, len(tiles)),
        launch.threads,
        *(out, case.q, case.cache, case.tables, case.starts),
        *(np.array(case.lengths, np.int32), tiles, heads.num_heads, heads.num_kv_heads),
        *(case.cache.shape[1], heads.block_size, case.tables.shape[1], heads.scale),
        shared_bytes=launch.shared_bytes,
    )
    return out


def error_in_bounds(out: Array, case: PagedCase) -> float:
    """The largest error, as a multiple of what roundings may come to; to be at most 1.

    Tensor cores get the weights rounded to the type (UNIT of each) and the result is rounded once
    (UNIT of it): with u = UNIT, u * sum(weight * |value|) + u * |result|. All else is float32: a
    score is a sum of dim products, whose error of up to a few 2^-24 * |q| |k| * scale the
    exponential turns into a relative one of every weight; scores of up to 2^5, and sums over some
    thousand keys, stay under 2^-17 of sum(weight * |value|). Weights below float16's smallest step,
    2^-24, are lost: fewer than 2^10 keys with values below 8 make 2^-12 at the very most, and
    next to nothing with random scores, so 2^-20.
    """
    expected, unit = case.expected, UNIT[case.heads.short]
    weights = unit if case.heads.tensor_cores else 0
    bound = (weights + 2.0**-17) * expected.magnitude + unit * np.abs(expected.out) + 2.0**-20
    return float((np.abs(out.astype(np.float64) - expected.out) / bound).max(initial=0))
