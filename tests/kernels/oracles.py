"""What the kernels should compute, in float64: plain formulas, one for each kernel.

Nothing here knows how a kernel works, or on what it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Float64:
    x = x.astype(np.float64)
    scale: Float64 = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps)
    return x * scale * weight.astype(np.float64)


def silu_mul(gate_up: Array) -> Float64:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def rotate(heads: Array, cos: Array, sin: Array) -> Float64:
    """heads [num_tokens, heads, dim]; cos, sin [num_tokens, dim / 2]."""
    first, second = np.split(heads.astype(np.float64), 2, axis=2)
    cos, sin = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


@dataclass(frozen=True, slots=True)
class Attention:
    """out: the result. magnitude: the same of absolute values, which rounding errors go with.

    Both [num_queries, num_heads, dim].
    """

    out: Float64
    magnitude: Float64


def attention(q: Array, keys: Array, values: Array, scale: float) -> Attention:
    """Causal attention of a sequence's newest queries.

    q [count, num_heads, dim]; keys, values [length, num_kv_heads, dim], the queries' own included.
    """
    count, num_heads, _ = q.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    hidden = np.arange(length) > np.arange(length - count, length)[:, None]
    out, magnitude = np.empty(q.shape), np.empty(q.shape)
    for head in range(num_heads):
        k, v = (array[:, head // group].astype(np.float64) for array in (keys, values))
        scores = q[:, head].astype(np.float64) @ k.T * scale
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, head], magnitude[:, head] = weights @ v, weights @ np.abs(v)
    return Attention(out, magnitude)
