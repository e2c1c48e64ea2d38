"""Lookup of the last tokens in the text before them."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.ngram import NgramIndex


def reference(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The longest match of all, the latest of those; by comparing every place."""
    best: tuple[int, int] = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= shortest:
            best = max(best, (length, end))
    if best == (0, 0):
        return []
    text = tokens[:]
    for i in range(count):
        text.append(text[best[1] + i])
    return text[len(tokens) :]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 6),
)
def test_the_latest_of_the_longest_matches_is_gone_on_with(
    tokens: list[int], cuts: list[int], shortest: int, more: int, count: int
):
    index = NgramIndex(shortest, shortest + more)
    for length in sorted(min(cut, len(tokens)) for cut in [*cuts, len(tokens)]):
        found = index.propose(array("i", tokens[:length]), count).tolist()
        assert found == reference(tokens[:length], shortest, shortest + more, count)


@pytest.mark.parametrize(
    ("text", "shortest", "longest", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, 3, [4, 5, 1, 2]),
        ([1, 2, 9, 7, 1, 2, 8, 1, 2], 1, 3, [8, 1, 2, 8]),
        ([5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2], 1, 3, [9, 7, 1, 2]),
        ([1, 2, 3, 4], 1, 3, []),
        ([1, 2, 3, 4, 1, 2], 3, 3, []),
        ([7, 7], 1, 2, [7, 7, 7, 7]),
        ([1, 2, 3, 1, 2, 3], 3, 5, [1, 2, 3, 1]),
        ([4], 1, 1, []),
    ],
    ids=[
        "what followed",
        "the latest place",
        "the longest match",
        "no match",
        "a match too short",
        "a single token",
        "a period goes on",
        "nothing before",
    ],
)
def test_drafts_of_texts(text: list[int], shortest: int, longest: int, expected: list[int]):
    assert NgramIndex(shortest, longest).propose(array("i", text), 4).tolist() == expected


def test_a_token_of_a_long_text_costs_a_few_comparisons(monkeypatch: pytest.MonkeyPatch):
    compared = 0
    match = NgramIndex._match

    def counted(self: NgramIndex, tokens: array[int], at: int) -> int:
        nonlocal compared
        compared += 1
        return match(self, tokens, at)

    monkeypatch.setattr(NgramIndex, "_match", counted)
    # Every place matches, none in full.
    text = array("i", [1, 2, 1, 3] * 2000)
    index = NgramIndex(1, 8)
    for length in range(7900, 8000):
        index.propose(text[:length], 4)
    assert compared <= 100 * 32
    assert len(index._previous) == 7999 - 1
