"""The CPU device's operations in Numba, but for products (products.py) and sampling.

Small work is done by the calling thread. Sums are taken in an order that depends on a row's own
length alone, so that a sequence's results are the same alone and in any batch or chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import get_num_threads, prange, types

from cuengine.batch import Batch, Float32, Int32, Int64
from cuengine.device.interface import AttentionShape
from cuengine.device.llvm import LANES
from cuengine.device.numba_setup import njit
from cuengine.device.simd import (
    MIX_ROWS,
    MIX_VECTORS,
    SCORE_COLUMNS,
    SCORE_ROWS,
    dot_tile,
    exp,
    fetch_add,
    mix_tile,
    mix_tile_narrow,
)

SPAN = 256
"""Cached tokens that a softmax takes in at a time: [TILE, SPAN] scores stay in the L1 cache."""

TILE = 24
"""Rows (tokens x the query heads of one KV head) that share the reading of keys and values."""

_AHEAD = 2
"""Keys or values of one block and head that are prefetched before they are read: 8 KB, evenly. The
hardware's own prefetching stops at the end of each block; asked for in one go, they hold up others.
"""

_PADDING = 64
"""Scores are padded to a multiple of this, so that vectorised sums have no rest, whose order would
differ."""

_PARALLEL_FROM = 16384
"""Elements from which on sharing them out pays: the threads still spin after the last product."""

_TASKS_PER_THREAD = 4
"""Tasks from which on threads are done at about the same time."""

_FAST = {"reassoc", "contract", "nsz", "arcp", "nnan"}


def _read(kind: Any, dimensions: int) -> Any:
    """An array that is only read, as weights in a mapped file have to be."""
    return types.Array(kind, dimensions, "C", readonly=True)


# Named, they are compiled, or loaded, with this module, and not when a request is there.
_VECTOR, _MATRIX = _read(types.float32, 1), _read(types.float32, 2)
_RESULT, _CACHE = types.float32[:, ::1], types.float32[:, :, :, :, ::1]


def rms_norm(x: Float32, weight: Float32, eps: float, out: Float32) -> None:
    _rms_norm(x, weight, np.float32(eps), out)


def add_rms_norm(x: Float32, residual: Float32, weight: Float32, eps: float, out: Float32) -> None:
    _add_rms_norm(x, residual, weight, np.float32(eps), out)


def silu_mul(gate_up: Float32, out: Float32) -> None:
    _silu_mul(gate_up, out)


def rotary_cache(
    qkv: Float32,
    cos_sin: Float32,
    kv_layer: Float32,
    batch: Batch,
    shape: AttentionShape,
    out: Float32,
) -> None:
    _rotary_cache(qkv, cos_sin, kv_layer, batch.positions, batch.slot_mapping, out)


def paged_attention(
    q: Float32, kv_layer: Float32, batch: Batch, shape: AttentionShape, out: Float32
) -> None:
    _paged_attention(
        q,
        kv_layer,
        batch.block_tables,
        batch.query_start_loc,
        batch.seq_lens,
        np.float32(shape.scale),
        # Called in the kernel, it would keep Numba from caching that.
        get_num_threads(),
        out,
    )


@njit(fastmath=_FAST, error_model="numpy")
def _normalize(x: Float32, weight: Float32, eps: np.float32, out: Float32) -> None:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@njit(fastmath=_FAST, error_model="numpy")
def _add_normalize(
    x: Float32, residual: Float32, weight: Float32, eps: np.float32, out: Float32
) -> None:
    for i in range(len(x)):
        residual[i] += x[i]
    _normalize(residual, weight, eps, out)


@njit((_MATRIX, _VECTOR, types.float32, _RESULT), parallel=True, cache=True)
def _rms_norm(x: Float32, weight: Float32, eps: np.float32, out: Float32) -> None:
    if x.size < _PARALLEL_FROM:
        for row in range(len(x)):
            _normalize(x[row], weight, eps, out[row])
    else:
        for row in prange(len(x)):
            _normalize(x[row], weight, eps, out[row])


@njit((_MATRIX, _RESULT, _VECTOR, types.float32, _RESULT), parallel=True, cache=True)
def _add_rms_norm(
    x: Float32, residual: Float32, weight: Float32, eps: np.float32, out: Float32
) -> None:
    if x.size < _PARALLEL_FROM:
        for row in range(len(x)):
            _add_normalize(x[row], residual[row], weight, eps, out[row])
    else:
        for row in prange(len(x)):
            _add_normalize(x[row], residual[row], weight, eps, out[row])


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def _silu_row(gate_up: Float32, out: Float32) -> None:
    width = len(out)
    for i in range(width):
        gate = gate_up[i]
        # Beyond 87 exp(-gate) would overflow, and silu is 0 to float32.
        out[i] = gate / (np.float32(1) + exp(min(-gate, np.float32(87)))) * gate_up[width + i]


@njit((_MATRIX, _RESULT), parallel=True, cache=True)
def _silu_mul(gate_up: Float32, out: Float32) -> None:
    if out.size < _PARALLEL_FROM:
        for row in range(len(out)):
            _silu_row(gate_up[row], out[row])
    else:
        for row in prange(len(out)):
            _silu_row(gate_up[row], out[row])


@njit(fastmath={"contract", "nsz"})
def _rotate(head: Float32, angles: Float32, out: Float32) -> None:
    half = len(head) // 2
    for i in range(half):
        out[i] = head[i] * angles[i] - head[half + i] * angles[half + i]
        out[half + i] = head[half + i] * angles[i] + head[i] * angles[half + i]


@njit()
def _rotary_token(
    qkv: Float32, angles: Float32, kv_layer: Float32, slot: int, out: Float32
) -> None:
    kv_heads, block_size, dim = kv_layer.shape[2:]
    block, offset = slot // block_size, slot % block_size
    num_heads = len(out) // dim
    for head in range(num_heads):
        start = head * dim
        _rotate(qkv[start : start + dim], angles, out[start : start + dim])
    for head in range(kv_heads):
        start = (num_heads + head) * dim
        _rotate(qkv[start : start + dim], angles, kv_layer[0, block, head, offset])
        start += kv_heads * dim
        # Assigned as a whole, it would take 3 seconds more to compile, most for an error message.
        values = kv_layer[1, block, head, offset]
        for i in range(dim):
            values[i] = qkv[start + i]


@njit(
    (_MATRIX, _MATRIX, _CACHE, _read(types.int32, 1), _read(types.int64, 1), _RESULT),
    parallel=True,
    cache=True,
)
def _rotary_cache(
    qkv: Float32,
    cos_sin: Float32,
    kv_layer: Float32,
    positions: Int32,
    slots: Int64,
    out: Float32,
) -> None:
    if qkv.size < _PARALLEL_FROM:
        for token in range(len(qkv)):
            angles = cos_sin[positions[token]]
            _rotary_token(qkv[token], angles, kv_layer, slots[token], out[token])
    else:
        for token in prange(len(qkv)):
            angles = cos_sin[positions[token]]
            _rotary_token(qkv[token], angles, kv_layer, slots[token], out[token])


@njit()
def _scores(queries: Float32, keys: Float32, scores: Float32, start: int, ahead: int) -> None:
    """scores[r, start + t] = queries[r] . keys[t] for the tokens of a block [block_size, dim].

    Meanwhile, as many bytes are prefetched from the address `ahead`.
    """
    rows, dim = queries.shape
    stride = scores.shape[1]
    for first in range(0, len(keys), SCORE_COLUMNS):
        keys_at = keys.ctypes.data + 4 * first * dim
        for row in range(0, rows, SCORE_ROWS):
            dot_tile(
                min(SCORE_ROWS, rows - row),
                queries.ctypes.data + 4 * row * dim,
                keys_at,
                dim,
                scores.ctypes.data + 4 * (row * stride + start + first),
                stride,
                ahead + 4 * first * dim if row == 0 else keys_at,
            )
    for k in range(dim // LANES * LANES, dim):
        for row in range(rows):
            for token in range(len(keys)):
                scores[row, start + token] += queries[row, k] * keys[token, k]


@njit()
def _mix(
    weights: Float32, start: int, count: int, values: Float32, out: Float32, ahead: int
) -> None:
    """out[r] += sum over t < count of weights[r, start + t] * values[t].

    Meanwhile, as many bytes are prefetched from the address `ahead`.
    """
    rows, dim = out.shape
    stride = weights.shape[1]
    wide = MIX_VECTORS * LANES
    for row in range(0, rows, MIX_ROWS):
        these = min(MIX_ROWS, rows - row)
        weights_at = weights.ctypes.data + 4 * (row * stride + start)
        column = 0
        while column + wide <= dim:
            values_at = values.ctypes.data + 4 * column
            out_at = out.ctypes.data + 4 * (row * dim + column)
            fetched = ahead + 4 * column * count if row == 0 else values_at
            mix_tile(these, weights_at, stride, count, values_at, dim, out_at, fetched)
            column += wide
        while column + LANES <= dim:
            values_at = values.ctypes.data + 4 * column
            out_at = out.ctypes.data + 4 * (row * dim + column)
            mix_tile_narrow(these, weights_at, stride, count, values_at, dim, out_at, values_at)
            column += LANES
    for column in range(dim // LANES * LANES, dim):
        for row in range(rows):
            for token in range(count):
                out[row, column] += weights[row, start + token] * values[token, column]


@njit(fastmath=_FAST, error_model="numpy")
def _exp_scores(scores: Float32) -> tuple[np.float32, np.float32]:
    """scores -> exp(scores - their maximum) in place; returns the maximum and the sum."""
    highest = scores[0]
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    total = np.float32(0)
    for i in range(len(scores)):
        value = exp(scores[i] - highest)
        scores[i] = value
        total += value
    return highest, total


@njit()
def _piece(kv_layer: Float32, blocks: Int32, head: int, heads: int, number: int) -> int:
    """The address of a block's keys or values of one head, numbered in the order in which _span
    reads them: all keys first, the heads of a block together. Past the end, the last one's."""
    number = min(number, 2 * len(blocks) * heads - 1)
    place, i = number // heads, number % heads
    kind, place = place // len(blocks), place % len(blocks)
    address: int = kv_layer[kind, blocks[place], head + i].ctypes.data
    return address


@njit(error_model="numpy")
def _span(
    queries: Float32,
    group: int,
    position: int,
    kv_layer: Float32,
    table: Int32,
    head: int,
    start: int,
    scores: Float32,
    out: Float32,
    state: Float32,
) -> None:
    """Attention of a tile over the cached tokens from start to start + SPAN, unnormalised.

    queries   [heads, rows, dim], scaled, for the KV heads from head on; row r is a query head of
              the token at position + r // group
    scores    [heads, rows, SPAN], to work in
    out       [heads, rows, dim]: sums of exp(score - maximum) * value
    state     [heads, rows, 2]: the maximum and the sum of the exponentials; -inf and 0 where a
              row's token sees nothing of the span
    """
    heads, rows, _ = queries.shape
    block_size = kv_layer.shape[3]
    end = min(start + SPAN, position + (rows - 1) // group + 1)
    count = end - start
    padded = (count + _PADDING - 1) // _PADDING * _PADDING
    blocks = table[start // block_size : (end + block_size - 1) // block_size]
    for number, block in enumerate(blocks):
        for i in range(heads):
            ahead = _piece(kv_layer, blocks, head, heads, number * heads + i + _AHEAD)
            keys = kv_layer[0, block, head + i]
            _scores(queries[i], keys, scores[i], number * block_size, ahead)
    for row in range(rows):
        visible = min(count, position + row // group + 1 - start)
        for i in range(heads):
            if visible <= 0:
                scores[i, row, :padded] = 0
                state[i, row, 0], state[i, row, 1] = -np.inf, 0
            else:
                # What lies behind the last token is junk, or one that this row must not see.
                scores[i, row, visible:padded] = -np.float32(1e30)
                # Not as a tuple, which takes 5 seconds to compile.
                highest, total = _exp_scores(scores[i, row, :padded])
                state[i, row, 0], state[i, row, 1] = highest, total
    out[:] = 0
    for number, block in enumerate(blocks):
        token = number * block_size
        for i in range(heads):
            ahead = _piece(
                kv_layer, blocks, head, heads, (len(blocks) + number) * heads + i + _AHEAD
            )
            values = kv_layer[1, block, head + i]
            _mix(scores[i], token, min(block_size, count - token), values, out[i], ahead)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def _fold(total: Float32, total_state: Float32, part: Float32, part_state: Float32) -> None:
    """Take one more span of a row into the spans so far."""
    highest = max(total_state[0], part_state[0])
    keep = exp(total_state[0] - highest)
    add = exp(part_state[0] - highest)
    for i in range(len(total)):
        total[i] = total[i] * keep + part[i] * add
    total_state[0] = highest
    total_state[1] = total_state[1] * keep + part_state[1] * add


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def _finish(total: Float32, state: Float32, out: Float32) -> None:
    factor = np.float32(1) / state[1]
    for i in range(len(total)):
        out[i] = total[i] * factor


@njit()
def _list_tasks(
    query_start_loc: Int32, seq_lens: Int32, kv_heads: int, tile_tokens: int, num_threads: int
) -> tuple[Int32, Int32]:
    """What threads can do independently, as rows (sequence, first token, tokens, KV head, KV heads,
    span).

    A tile of a prompt's chunk goes over all its spans (span -1), head by head. A lone token has a
    task for each span, so that one long sequence keeps all threads busy. Where there are enough of
    those, each is for all heads: they lie together in a block, and memory is read faster in long
    pieces.
    The second array has, for each sequence, the first row of its spans' partial results, or -1.
    """
    num_tasks, num_partials, num_lone = 0, 0, 0
    partial_starts = np.full(len(seq_lens), -1, np.int32)
    for seq in range(len(seq_lens)):
        tokens = query_start_loc[seq + 1] - query_start_loc[seq]
        spans = (seq_lens[seq] + SPAN - 1) // SPAN
        if tokens > 1:
            num_tasks += kv_heads * ((tokens + tile_tokens - 1) // tile_tokens)
        elif tokens == 1:
            num_tasks += kv_heads * spans
            num_lone += spans
            if spans > 1:
                partial_starts[seq] = num_partials
                num_partials += kv_heads * spans
    lone_heads = kv_heads if num_lone >= _TASKS_PER_THREAD * num_threads else 1
    tasks = np.empty((num_tasks, 6), np.int32)
    task = 0
    for seq in range(len(seq_lens)):
        first, end = query_start_loc[seq], query_start_loc[seq + 1]
        heads = lone_heads if end - first == 1 else 1
        # Last tiles first: they see the most, and short tasks at the end even out the threads.
        for tile in range((end - first + tile_tokens - 1) // tile_tokens - 1, -1, -1):
            token = first + tile * tile_tokens
            spans = (seq_lens[seq] + SPAN - 1) // SPAN if partial_starts[seq] >= 0 else 1
            for span in range(spans):
                for head in range(0, kv_heads, heads):
                    tasks[task, 0], tasks[task, 1] = seq, token
                    tasks[task, 2] = min(tile_tokens, end - token)
                    tasks[task, 3], tasks[task, 4] = head, heads
                    tasks[task, 5] = span if partial_starts[seq] >= 0 else -1
                    task += 1
    return tasks[:task], partial_starts


@njit(
    (
        _MATRIX,
        _CACHE,
        _read(types.int32, 2),
        _read(types.int32, 1),
        _read(types.int32, 1),
        types.float32,
        types.int64,
        _RESULT,
    ),
    parallel=True,
    cache=True,
    error_model="numpy",
)
def _paged_attention(
    q: Float32,
    kv_layer: Float32,
    block_tables: Int32,
    query_start_loc: Int32,
    seq_lens: Int32,
    scale: np.float32,
    num_threads: int,
    out: Float32,
) -> None:
    kv_heads, dim = kv_layer.shape[2], kv_layer.shape[4]
    num_heads = q.shape[1] // dim
    group = num_heads // kv_heads
    tile_tokens = max(1, TILE // group)
    # [tokens, KV heads, query heads of each, dim]
    q_heads = q.reshape(len(q), kv_heads, group, dim)
    out_heads = out.reshape(len(q), kv_heads, group, dim)
    tasks, partial_starts = _list_tasks(
        query_start_loc, seq_lens, kv_heads, tile_tokens, num_threads
    )
    num_partials = 0
    for seq in range(len(seq_lens)):
        if partial_starts[seq] >= 0:
            num_partials += kv_heads * ((seq_lens[seq] + SPAN - 1) // SPAN)
    partials = np.empty((num_partials, group, dim), np.float32)
    partial_states = np.empty((num_partials, group, 2), np.float32)
    # A tile has many tokens or many heads.
    most_rows = max(tile_tokens, kv_heads) * group
    following = np.zeros(1, np.int64)
    for _ in prange(min(num_threads, len(tasks))):
        query_rows = np.empty(most_rows * dim, np.float32)
        score_rows = np.empty(most_rows * SPAN, np.float32)
        total_rows = np.empty(most_rows * dim, np.float32)
        total_states = np.empty(most_rows * 2, np.float32)
        part_rows = np.empty(most_rows * dim, np.float32)
        part_states = np.empty(most_rows * 2, np.float32)
        while True:
            task = fetch_add(following.ctypes.data, 1)
            if task >= len(tasks):
                break
            seq, token, tokens, head, heads, span = tasks[task]
            rows = tokens * group
            size = heads * rows
            queries = query_rows[: size * dim].reshape(heads, rows, dim)
            scores = score_rows[: size * SPAN].reshape(heads, rows, SPAN)
            for i in range(heads):
                for row in range(rows):
                    source = q_heads[token + row // group, head + i, row % group]
                    for k in range(dim):
                        queries[i, row, k] = source[k] * scale
            position = seq_lens[seq] - query_start_loc[seq + 1] + token
            table = block_tables[seq]
            if span >= 0:
                first = partial_starts[seq] + span * kv_heads + head
                target, state = (
                    partials[first : first + heads],
                    partial_states[first : first + heads],
                )
                start = span * SPAN
                _span(queries, group, position, kv_layer, table, head, start, scores, target, state)
                continue
            total = total_rows[: size * dim].reshape(heads, rows, dim)
            total_state = total_states[: size * 2].reshape(heads, rows, 2)
            part = part_rows[: size * dim].reshape(heads, rows, dim)
            part_state = part_states[: size * 2].reshape(heads, rows, 2)
            for start in range(0, position + tokens, SPAN):
                target, state = (total, total_state) if start == 0 else (part, part_state)
                _span(queries, group, position, kv_layer, table, head, start, scores, target, state)
                if start > 0:
                    for i in range(heads):
                        for row in range(rows):
                            _fold(
                                total[i, row], total_state[i, row], part[i, row], part_state[i, row]
                            )
            for i in range(heads):
                for row in range(rows):
                    target_row = out_heads[token + row // group, head + i, row % group]
                    _finish(total[i, row], total_state[i, row], target_row)
    for seq in range(len(seq_lens)):
        first = partial_starts[seq]
        if first >= 0:
            token = query_start_loc[seq]
            for head in range(kv_heads):
                start = first + head
                for span in range(1, (seq_lens[seq] + SPAN - 1) // SPAN):
                    index = start + span * kv_heads
                    for row in range(group):
                        _fold(
                            partials[start, row],
                            partial_states[start, row],
                            partials[index, row],
                            partial_states[index, row],
                        )
                for row in range(group):
                    target_row = out_heads[token, head, row]
                    _finish(partials[start, row], partial_states[start, row], target_row)
