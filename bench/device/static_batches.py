"""Requests in static batches, and which of them to run where there is no time for all."""

from __future__ import annotations

from collections.abc import Sequence


def batches_of(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def spread(count: int) -> list[int]:
    """All indices below count, in an order of which every beginning is spread evenly.

    The middle, then the quarters, and so on: 4, 0, 6, 2, 5, 1, 7, 3 of eight.
    """
    bits = max(1, (count - 1).bit_length())
    reversed_bits = [int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits)]
    # Half a turn on, to begin in the middle and not at an end.
    half = 1 << (bits - 1)
    turned = [(index + half) % (1 << bits) for index in reversed_bits]
    return [index for index in turned if index < count]
