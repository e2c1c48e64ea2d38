"""Random numbers that belong to a (seed, sample, position, token) and to nothing else.

Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), a
counter-based generator: the noise of one token can be had without that of any other, so a draw does
not depend on what else is in the batch or on how much was drawn before. What is done with the noise
is in sampler.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import UInt32

PURPOSE_TOKEN = 0
"""Last word of the counter: draws made for another end must take another number."""

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

MAX_NOISE = 22.88
MIN_NOISE = -3.14
"""Bounds of `gumbel`: -log(-log(1 - 2^-33)) = 22.87 and -log(-log(2^-33)) = -3.13."""


def philox(counter: NDArray[np.integer], key: int) -> UInt32:
    """counter [..., 4], words of 32 bits; key of 64 bits -> uint32 [..., 4]."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    key_0, key_1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(ROUNDS):
        product_0 = c0 * np.uint64(MULTIPLIER_0)
        product_1 = c2 * np.uint64(MULTIPLIER_1)
        c0 = (product_1 >> half) ^ c1 ^ np.uint64(key_0)
        c1 = product_1 & mask
        c2 = (product_0 >> half) ^ c3 ^ np.uint64(key_1)
        c3 = product_0 & mask
        key_0 = key_0 + WEYL_0 & 0xFFFFFFFF
        key_1 = key_1 + WEYL_1 & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def token_words(token_ids: NDArray[np.integer], seed: int, sample: int, position: int) -> UInt32:
    """One word for each token: word token % 4 of the counter (token // 4, position, sample, 0)."""
    groups, inverse = np.unique(token_ids >> 2, return_inverse=True)
    counter = np.empty((len(groups), 4), np.uint64)
    counter[:, 0] = groups
    counter[:, 1] = position
    counter[:, 2] = sample
    counter[:, 3] = PURPOSE_TOKEN
    words: UInt32 = philox(counter, seed)[inverse, token_ids & 3]
    return words


def gumbel(words: UInt32) -> NDArray[np.float64]:
    """Gumbel noise -log(-log(u)) of u = (word + 0.5) / 2^32."""
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise
