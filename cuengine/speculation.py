"""Speculative decoding: tokens are guessed, and one pass of the model finds out which are right.

A guess is right if it is the token that the model draws at its place, with the very noise that it
would be drawn with anyway (it is keyed by seed, sample and position). So what is drawn is the same
with guesses, without, and whoever makes them; they only decide how many tokens a step yields.

Here: when and how much to guess, and what came of it. Who guesses is a Proposer (ngram.py,
draft_model.py); room for the guesses is the scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from cuengine.scheduler import Chunk, Step
from cuengine.sequence import UNKNOWN_TOKEN, Sequence

_FIRST_RATE = 0.7
"""Acceptance that is expected where nothing is known yet: about that of a fair draft model."""

_HIGHEST_RATE = 0.99
"""Nothing is certain."""

_WEIGHT = 1 / 8
"""Of the newest guess in a sequence's acceptance: some ten of them are remembered."""

_WEIGHT_OF_ALL = 1 / 64
"""The same in the acceptance that new sequences start with."""

_PROBE_INTERVAL = 32
"""Steps of the engine after which sequences that guess no more try it once again."""


class Proposer(Protocol):
    """Guesses tokens. Asked for the same sequence first by `prepare`, then by `propose`.

    cost  of guessing a token, in passes of the model that is served
    """

    cost: float

    def prepare(self, sequence: Sequence, count: int) -> int:
        """How many of `count` tokens it can guess; all of the sequence's own tokens are known."""
        ...

    def propose(self, step: Step) -> None:
        """Fill in `draft_ids` of the step's chunks, `num_drafts` each (or fewer than prepared)."""
        ...

    def num_reusable(self, sequence: Sequence) -> int:
        """Tokens, from the first on, that are computed in every cache that a block is for."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        ...


@dataclass(slots=True)
class _Acceptance:
    """The part of guesses that are right, forgetting what is long past."""

    rate: float

    def observe(self, drafted: int, accepted: int, weight: float) -> None:
        """Of a draft only the first wrong token says something: what follows it had no chance."""
        self.rate = 1 - (1 - self.rate) * (1 - weight) ** accepted
        if accepted < drafted:
            self.rate *= 1 - weight


class Speculator:
    """How many tokens are worth guessing for a sequence, from counts alone.

    A step of n tokens takes about as long as `weight_tokens` + n tokens of arithmetic, where
    weight_tokens stands for reading the weights once. With s sequences that decode it brings s
    tokens, so a token costs (weight_tokens + s) / s. One more token in the step costs 1 and, if it
    is the i-th guess of a sequence whose guesses are right with probability a, brings a ** i.
    That pays where

        a ** i  >  s / (weight_tokens + s) + cost

    with the cost of guessing it, in passes of the model per step. So few sequences guess much even
    with a poor acceptance, and many only with a good one; with enough of them nobody does. a is
    measured for each sequence, and begins as what it was for others of late. A sequence for which
    nothing pays tries a single one again in every 32nd step of the engine.
    """

    def __init__(self, proposer: Proposer, num_tokens: int, *, weight_tokens: int) -> None:
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._weight_tokens = weight_tokens
        self._overall = _Acceptance(_FIRST_RATE)
        self._acceptances: dict[Sequence, _Acceptance] = {}
        self._steps = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_per_pos = [0] * num_tokens

    @property
    def can_pay(self) -> bool:
        """Guesses are worth their cost where a single sequence runs and nearly all are right."""
        return 1 / (self._weight_tokens + 1) + self._proposer.cost < _HIGHEST_RATE

    def limit(self, sequence: Sequence, load: int) -> int:
        """Tokens worth guessing for a sequence, with `load` samples running."""
        found = self._acceptances.get(sequence)
        rate = min(_HIGHEST_RATE, (self._overall if found is None else found).rate)
        worth = load / (self._weight_tokens + load) + self._proposer.cost
        if worth >= rate:
            return int(self._steps % _PROBE_INTERVAL == 0)
        return min(self._num_tokens, int(math.log(worth) / math.log(rate)))

    def wanted(self, sequence: Sequence, most: int, load: int) -> int:
        """Tokens that will be guessed for a sequence, at most `most`."""
        if sequence.token_ids[-1] == UNKNOWN_TOKEN:
            return 0
        count = min(most, self.limit(sequence, load))
        return self._proposer.prepare(sequence, count) if count else 0

    def num_reusable(self, sequence: Sequence) -> int:
        return self._proposer.num_reusable(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._acceptances.pop(sequence, None)
        self._proposer.forget(sequence)

    def propose(self, step: Step) -> None:
        """Guess, before the step is turned into arrays."""
        self._proposer.propose(step)
        self._steps += 1

    def accept(self, chunk: Chunk, drawn: list[int]) -> int:
        """How many of a chunk's guesses are right, given what was drawn in their places."""
        drafted, accepted = chunk.num_drafts, 0
        while accepted < drafted and chunk.draft_ids[accepted] == drawn[accepted]:
            self.accepted_per_pos[accepted] += 1
            accepted += 1
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        own = self._acceptances.get(chunk.sequence)
        if own is None:
            own = self._acceptances[chunk.sequence] = _Acceptance(self._overall.rate)
        own.observe(drafted, accepted, _WEIGHT)
        self._overall.observe(drafted, accepted, _WEIGHT_OF_ALL)
        return accepted
