"""Philox against its authors' known answers (Random123, kat_vectors: philox4x32 10)."""

from __future__ import annotations

import numpy as np
import pytest

from cuengine.device.philox import MAX_NOISE, MIN_NOISE, gumbel, philox, token_words

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(np.array(counter, np.uint64), key[0] | key[1] << 32)
    assert words.tolist() == expected


def test_a_tokens_word_is_its_own_whatever_else_is_asked_for() -> None:
    alone = token_words(np.array([1234]), seed=7, sample=2, position=99)
    among = token_words(np.arange(3000), seed=7, sample=2, position=99)
    by_hand = philox(np.array([1234 // 4, 99, 2, 0], np.uint64), 7)[1234 % 4]
    assert alone[0] == among[1234] == by_hand


def test_noise_stays_within_its_bounds() -> None:
    extremes = gumbel(np.array([0, ONES], np.uint32))
    assert extremes[0] > MIN_NOISE
    assert extremes[1] < MAX_NOISE
    assert np.allclose(extremes, [-np.log(-np.log(2.0**-33)), 33 * np.log(2)], rtol=1e-9)
