"""How many bytes each operation must move and how many operations it must do, by formula.

Bytes are those of an ideal machine: every input is read from memory once and every result written
once, whatever the caches hold; so GB/s above what memory can do means that a cache had the data.
Operations are additions, multiplications, divisions and exponentials, one each; index arithmetic,
comparisons and conversions count nothing. What is padded is not counted: achieved rates are about
work that somebody asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_FLOAT = 4
_INT = 4
_SLOT = 8
"""Bytes of float32, of int32, and of an int64 in the slot mapping."""


@dataclass(frozen=True, slots=True)
class Work:
    """num_bytes: moved to and from memory. operations: see above."""

    num_bytes: int
    operations: int

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations)


NO_WORK = Work(0, 0)


@cache
def linear(
    rows: int, inputs: int, outputs: int, itemsize: int, *, weight_bytes: int, bias: bool
) -> Work:
    """x [rows, inputs] @ w [outputs, inputs].T (+ b [outputs]) -> y [rows, outputs].

    bytes       itemsize * (rows * inputs + rows * outputs) + weight_bytes (+ b: itemsize * outputs)
    operations  2 * rows * inputs * outputs (+ rows * outputs)

    weight_bytes: of w, in memory.
    """
    num_bytes = itemsize * (rows * inputs + rows * outputs + bias * outputs) + weight_bytes
    return Work(num_bytes, 2 * rows * inputs * outputs + bias * rows * outputs)


@cache
def logits(rows: int, inputs: int, vocab: int, itemsize: int, *, weight_bytes: int) -> Work:
    """`linear` without a bias and with a float32 result.

    bytes       itemsize * rows * inputs + weight_bytes + 4 * rows * vocab
    operations  2 * rows * inputs * vocab
    """
    num_bytes = itemsize * rows * inputs + weight_bytes + _FLOAT * rows * vocab
    return Work(num_bytes, 2 * rows * inputs * vocab)


@cache
def embedding(rows: int, width: int, itemsize: int) -> Work:
    """Rows gathered by index, as `embedding` and `take_rows` do.

    bytes       2 * itemsize * rows * width + 4 * rows
    operations  0
    """
    return Work(2 * itemsize * rows * width + _INT * rows, 0)


@cache
def rms_norm(rows: int, width: int, itemsize: int) -> Work:
    """y = x / sqrt(mean(x²) + eps) * w.

    bytes       itemsize * (2 * rows * width + width)
    operations  4 * rows * width: square, sum, times 1 / root, times weight
    """
    return Work(itemsize * (2 * rows * width + width), 4 * rows * width)


@cache
def add_rms_norm(rows: int, width: int, itemsize: int) -> Work:
    """residual += x, then `rms_norm` of it: x and residual read, residual and y written.

    bytes       itemsize * (4 * rows * width + width)
    operations  5 * rows * width
    """
    return Work(itemsize * (4 * rows * width + width), 5 * rows * width)


@cache
def silu_mul(rows: int, width: int, itemsize: int) -> Work:
    """gate / (1 + exp(-gate)) * up, [rows, width] each.

    bytes       3 * itemsize * rows * width
    operations  5 * rows * width: minus, exp, plus 1, divide, times
    """
    return Work(3 * itemsize * rows * width, 5 * rows * width)


@cache
def rotary_cache(rows: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Work:
    """q and k rotated; q written to a result, k and v to the cache.

    bytes       2 * itemsize * rows * (heads + 2 * kv_heads) * head_dim
                + rows * (4 * head_dim + 4 + 8)   cosines and sines, position, slot
    operations  3 * rows * (heads + kv_heads) * head_dim: two products and a sum for each number
    """
    moved = 2 * itemsize * rows * (heads + 2 * kv_heads) * head_dim
    index = rows * (_FLOAT * head_dim + _INT + _SLOT)
    return Work(moved + index, 3 * rows * (heads + kv_heads) * head_dim)


def paged_attention(
    query_counts: Sequence[int],
    seq_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    itemsize: int,
) -> Work:
    """Causal attention of each sequence's last queries over its cached tokens, themselves included.

    With c queries of a sequence of L tokens, query j sees L - c + 1 + j of them: in all
    pairs = c * L - c * (c - 1) / 2.

    bytes       2 * itemsize * kv_heads * head_dim * sum(L)    keys and values, once a sequence
                + 2 * itemsize * heads * head_dim * sum(c)     q, and the result
                + 4 * sum(ceil(L / block_size))                block tables
    operations  4 * heads * head_dim * sum(pairs): q·k and p·v, a product and a sum each. The
                softmax, some 5 per head and pair, is left out, as is usual.
    """
    pairs = blocks = 0
    for count, length in zip(query_counts, seq_lens, strict=True):
        pairs += count * length - count * (count - 1) // 2
        blocks += -(-length // block_size)
    cached = 2 * itemsize * kv_heads * head_dim * sum(seq_lens)
    queries = 2 * itemsize * heads * head_dim * sum(query_counts)
    return Work(cached + queries + _INT * blocks, 4 * heads * head_dim * pairs)


@cache
def copied_blocks(blocks: int, block_bytes: int) -> Work:
    """Whole KV blocks, with all layers' keys and values: read, and written elsewhere.

    bytes       blocks * (2 * block_bytes + 8)   8: the pair of indices
    operations  0
    """
    return Work(blocks * (2 * block_bytes + 2 * _INT), 0)


@cache
def greedy_sample(rows: int, vocab: int) -> Work:
    """The most likely token of each row of float32 logits.

    bytes       4 * rows * vocab + 4 * rows
    operations  0: comparisons alone
    """
    return Work(_FLOAT * rows * vocab + _INT * rows, 0)
