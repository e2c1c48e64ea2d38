"""The CPU device's operations in NumPy alone: used where Numba is missing, and the Numba kernels'
oracle. Shapes are those of interface.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cuengine.batch import Batch, Float32
from cuengine.device.interface import AttentionShape

if TYPE_CHECKING:
    from cuengine.device.packed import NarrowMatrix, PackedMatrix


def linear(x: Float32, weight: Float32 | PackedMatrix | NarrowMatrix, out: Float32) -> None:
    if isinstance(weight, np.ndarray):
        np.matmul(x, weight.T, out=out)
    else:
        weight.multiply(x, out)


def rms_norm(x: Float32, weight: Float32, eps: float, out: Float32) -> None:
    mean_square = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
    np.multiply(x, 1 / np.sqrt(mean_square + np.float32(eps)), out=out)
    out *= weight


def add_rms_norm(x: Float32, residual: Float32, weight: Float32, eps: float, out: Float32) -> None:
    residual += x
    rms_norm(residual, weight, eps, out)


def silu_mul(gate_up: Float32, out: Float32) -> None:
    width = out.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    # exp overflows to infinity below -88, where silu is 0 to float32 anyway.
    with np.errstate(over="ignore"):
        np.exp(-gate, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up


def rotary_cache(
    qkv: Float32,
    cos_sin: Float32,
    kv_layer: Float32,
    batch: Batch,
    shape: AttentionShape,
    out: Float32,
) -> None:
    num_tokens = len(qkv)
    block_size, dim = kv_layer.shape[3:]
    heads = qkv.reshape(num_tokens, -1, dim)
    angles = cos_sin[batch.positions]
    cos, sin = angles[:, None, : dim // 2], angles[:, None, dim // 2 :]
    q_end, k_end = shape.num_heads, shape.num_heads + shape.num_kv_heads
    blocks, offsets = np.divmod(batch.slot_mapping, block_size)
    _rotate(heads[:, :q_end], cos, sin, out.reshape(num_tokens, -1, dim))
    keys = np.empty((num_tokens, shape.num_kv_heads, dim), np.float32)
    _rotate(heads[:, q_end:k_end], cos, sin, keys)
    kv_layer[0][blocks, :, offsets] = keys
    kv_layer[1][blocks, :, offsets] = heads[:, k_end:]


def _rotate(heads: Float32, cos: Float32, sin: Float32, out: Float32) -> None:
    half = heads.shape[2] // 2
    first, second = heads[..., :half], heads[..., half:]
    np.subtract(first * cos, second * sin, out=out[..., :half])
    np.add(second * cos, first * sin, out=out[..., half:])


def paged_attention(
    q: Float32, kv_layer: Float32, batch: Batch, shape: AttentionShape, out: Float32
) -> None:
    block_size, dim = kv_layer.shape[3:]
    kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    for index, length in enumerate(batch.seq_lens):
        start, end = batch.query_start_loc[index : index + 2]
        if start == end:
            continue
        blocks = batch.block_tables[index, : -(-length // block_size)]
        # [kv_heads, length, dim], cut to the tokens there are: what lies behind them is junk.
        keys, values = (
            kv_layer[which][blocks].transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)[:, :length]
            for which in (0, 1)
        )
        count = end - start
        queries = q[start:end].reshape(count, kv_heads, group, dim).transpose(1, 0, 2, 3)
        scores = queries.reshape(kv_heads, count * group, dim) @ keys.transpose(0, 2, 1)
        scores *= np.float32(shape.scale)
        scores = scores.reshape(kv_heads, count, group, length)
        if count > 1:
            last = np.arange(length - count, length)
            hidden = np.arange(length) > last[:, None]
            np.copyto(scores, -np.inf, where=hidden[None, :, None, :])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = scores.reshape(kv_heads, count * group, length) @ values
        mixed = mixed.reshape(kv_heads, count, group, dim).transpose(1, 0, 2, 3)
        out[start:end] = mixed.reshape(count, -1)
