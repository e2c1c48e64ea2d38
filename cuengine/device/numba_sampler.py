"""sampler.py's draws in Numba: the same steps, row by row on all threads, and the same tokens."""

from __future__ import annotations

import numpy as np
from numba import prange

from cuengine.batch import Float32, Int32, Int64, SamplingBatch, UInt32, UInt64
from cuengine.device.numba_setup import njit
from cuengine.device.philox import (
    MAX_NOISE,
    MIN_NOISE,
    MULTIPLIER_0,
    MULTIPLIER_1,
    PURPOSE_TOKEN,
    ROUNDS,
    WEYL_0,
    WEYL_1,
)
from cuengine.device.sampler import least_scaled
from cuengine.device.simd import exp, leading_zeros

_GROUP = 64
_LOWEST = MIN_NOISE - MAX_NOISE
_LN2 = 0.6931471805599454
"""ln 2, rounded up."""


def draw_rows(logits: Float32, rows: Int64, sampling: SamplingBatch, token_ids: Int32) -> None:
    """`sampler.DrawRows`."""
    _draw_rows(
        logits,
        rows,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        least_scaled(sampling.min_p),
        sampling.seeds,
        sampling.sample_indices,
        sampling.positions,
        token_ids,
    )


@njit(fastmath={"nnan", "nsz"})
def _maximum(values: Float32) -> np.float32:
    highest: np.float32 = values[0]
    for i in range(len(values)):
        highest = max(highest, values[i])
    return highest


@njit()
def _at_least(scaled: Float32, least: np.float32) -> Int64:
    ids = np.empty(len(scaled), np.int64)
    count = 0
    for i in range(len(scaled)):
        ids[count] = i
        count += scaled[i] >= least
    return ids[:count]


@njit()
def _select(values: Float32, k: int) -> np.float32:
    """The k-th largest (Hoare, "Algorithm 65: Find", 1961); values are put into another order.

    np.partition would take 12 seconds to compile.
    """
    low, high, wanted = 0, len(values) - 1, len(values) - k
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while pivot < values[right]:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if wanted <= right:
            high = right
        elif wanted >= left:
            low = left
        else:
            break
    found: np.float32 = values[wanted]
    return found


@njit()
def _kth_largest(values: Float32, k: int) -> np.float32:
    groups = len(values) // _GROUP
    bound = np.float32(-np.inf)
    if k <= groups:
        maxima = np.empty(groups, np.float32)
        for group in range(groups):
            maxima[group] = _maximum(values[group * _GROUP : (group + 1) * _GROUP])
        bound = _select(maxima, k)
    above = np.empty(len(values), np.float32)
    count = 0
    for value in values:
        above[count] = value
        count += value >= bound
    return _select(above[:count], k)


@njit(fastmath={"reassoc", "nsz"}, error_model="numpy")
def _weights(scaled: Float32, least: np.float32, weights: np.ndarray) -> float:
    """exp of the scaled logits kept, and 0 for the others; returns the sum."""
    total = 0.0
    for i in range(len(scaled)):
        weight = exp(np.float64(scaled[i])) if scaled[i] >= least else 0.0
        weights[i] = weight
        total += weight
    return total


@njit(error_model="numpy")
def _nucleus(scaled: Float32, least: np.float32, top_p: float) -> Int64:
    weights = np.empty(len(scaled), np.float64)
    total = _weights(scaled, least, weights)
    bound = (1 - np.float64(top_p)) * total / len(scaled) * (1 - 1e-9)
    above = np.empty(len(scaled), np.int64)
    count = 0
    for i in range(len(scaled)):
        above[count] = i
        count += weights[i] >= bound
    above = above[:count]
    order = np.argsort(-scaled[above], kind="mergesort")
    ahead = 0.0
    kept = 0
    while kept < count and (kept == 0 or ahead < top_p * total):
        ahead += weights[above[order[kept]]]
        kept += 1
    return above[order[:kept]]


@njit()
def _philox(
    group: np.uint64, position: np.uint64, sample_index: np.uint64, seed: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = group, position, sample_index, np.uint64(PURPOSE_TOKEN)
    key_0, key_1 = seed & mask, seed >> half
    for _ in range(ROUNDS):
        product_0 = c0 * np.uint64(MULTIPLIER_0)
        product_1 = c2 * np.uint64(MULTIPLIER_1)
        c0 = (product_1 >> half) ^ c1 ^ key_0
        c1 = product_1 & mask
        c2 = (product_0 >> half) ^ c3 ^ key_1
        c3 = product_0 & mask
        key_0 = (key_0 + np.uint64(WEYL_0)) & mask
        key_1 = (key_1 + np.uint64(WEYL_1)) & mask
    return c0, c1, c2, c3


@njit()
def _gumbel(word: np.uint64) -> float:
    noise: float = -np.log(-np.log((np.float64(word) + 0.5) * 2.0**-32))
    return noise


@njit()
def _best_of(
    ids: Int64, scaled: Float32, seed: np.uint64, sample_index: np.uint32, position: np.uint32
) -> int:
    """Of the tokens ids the one with the best score, scaled logit plus noise; the lowest of equals.

    ids may be in any order.
    """
    best = -np.inf
    token: int = ids[0]
    for index in ids:
        words = _philox(np.uint64(index >> 2), np.uint64(position), np.uint64(sample_index), seed)
        score = np.float64(scaled[index]) + _gumbel(words[index & 3])
        if score > best or (score == best and index < token):
            best, token = score, index
    return token


@njit(error_model="numpy")
def _best_of_all(
    scaled: Float32,
    least: np.float32,
    seed: np.uint64,
    sample_index: np.uint32,
    position: np.uint32,
) -> int:
    """`_best_of` over all tokens kept; logarithms are taken of those only that could win."""
    vocab = len(scaled)
    groups = (vocab + 3) // 4
    words = np.empty((4, groups), np.uint32)
    for group in range(groups):
        c0, c1, c2, c3 = _philox(
            np.uint64(group), np.uint64(position), np.uint64(sample_index), seed
        )
        words[0, group], words[1, group] = np.uint32(c0), np.uint32(c1)
        words[2, group], words[3, group] = np.uint32(c2), np.uint32(c3)
    floor = max(least, np.float32(_LOWEST))
    best, token = -np.inf, 0
    for group in range(groups):
        for lane in range(min(4, vocab - 4 * group)):
            index = 4 * group + lane
            if scaled[index] < floor:
                continue
            word = words[lane, group]
            # With c = 2^32 - 1 - word and u = 1 - (c + 0.5) / 2^32, the noise is at most
            # -log(1 - u), which is at most (leading zeros of c + 1) * ln 2.
            bound = (leading_zeros(np.uint32(~word)) + 1) * _LN2
            if np.float64(scaled[index]) + bound > best:
                score = np.float64(scaled[index]) + _gumbel(np.uint64(word))
                if score > best:
                    best, token = score, index
    return token


@njit(error_model="numpy")
def _draw(
    logits: Float32,
    temperature: np.float32,
    top_k: int,
    top_p: float,
    least: np.float32,
    seed: np.uint64,
    sample_index: np.uint32,
    position: np.uint32,
) -> int:
    highest = _maximum(logits)
    if highest == -np.inf:
        return 0
    vocab = len(logits)
    scaled = np.empty(vocab, np.float32)
    for i in range(vocab):
        scaled[i] = (logits[i] - highest) / temperature
    if 0 < top_k < vocab:
        least = max(least, _kth_largest(scaled, top_k))
    if top_p < 1:
        return _best_of(_nucleus(scaled, least, top_p), scaled, seed, sample_index, position)
    if 0 < top_k < _GROUP:
        return _best_of(_at_least(scaled, least), scaled, seed, sample_index, position)
    return _best_of_all(scaled, least, seed, sample_index, position)


@njit(
    "void(float32[:, ::1], int64[::1], float32[::1], int32[::1], float32[::1], float32[::1],"
    "uint64[::1], uint32[::1], uint32[::1], int32[::1])",
    parallel=True,
    cache=True,
    error_model="numpy",
)
def _draw_rows(
    logits: Float32,
    rows: Int64,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    least: Float32,
    seeds: UInt64,
    sample_indices: UInt32,
    positions: UInt32,
    token_ids: Int32,
) -> None:
    for index in prange(len(rows)):
        row = rows[index]
        token_ids[row] = _draw(
            logits[row],
            temperature[row],
            top_k[row],
            top_p[row],
            least[row],
            seeds[row],
            sample_indices[row],
            positions[row],
        )
