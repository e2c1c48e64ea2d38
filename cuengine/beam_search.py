"""One request's beam search: which texts go on, which have ended, and when it is over.

Only log-probabilities and tokens. Which blocks that moves is in scheduler.py (`advance`), who runs
the beams in engine.py. The rules are those of transformers' `generate(num_beams=k)`: so are the
results, except that equal scores are told apart in a fixed way: the earlier parent goes first, then
the lower token id.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from cuengine.outputs import Logprob, TokenLogprobs
from cuengine.sampling_params import BeamSearchParams

Candidates = list[tuple[int, float]]
"""(token id, log-probability) of the most likely tokens after a beam, best first."""


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A text: its last token, and what comes before it.

    logprob       of the last token
    sum_logprobs  of all tokens
    candidates    what its parent reported; kept where log-probabilities were asked for
    """

    parent: Hypothesis | None = None
    token_id: int = -1
    logprob: float = 0.0
    sum_logprobs: float = 0.0
    candidates: Candidates | None = None

    def tokens(self) -> list[Hypothesis]:
        """The hypotheses that end in its first, second, ... last token."""
        found: list[Hypothesis] = []
        at = self
        while at.parent is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    def token_logprobs(self, count: int) -> TokenLogprobs:
        """The last token first, then the `count` most likely ones in its place."""
        candidates = self.candidates or []
        ranks = {token: rank for rank, (token, _) in enumerate(candidates, 1)}
        entries = {self.token_id: Logprob(self.logprob, ranks[self.token_id])}
        for token, logprob in candidates[:count]:
            entries.setdefault(token, Logprob(logprob, ranks[token]))
        return entries


@dataclass(frozen=True, slots=True)
class Result:
    """A text that has ended, in whichever way."""

    hypothesis: Hypothesis
    score: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam that goes on: its parent's position among the beams before, and its new token."""

    parent: int
    token_id: int


class BeamSearch:
    """Beams have positions, children of one parent side by side. All report before any goes on.

    max_tokens      of a text, at which it ends
    ending_ids      tokens that end a text
    num_candidates  most likely tokens that a beam has to report: enough for it to have all the
                    next beams to itself, with every ending token among the likelier ones
    beams           texts that go on; none once the search is over
    ended           the best that have ended, best first, at most `width`
    """

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        max_tokens: int,
        ending_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.width = params.beam_width
        self.max_tokens = max_tokens
        self.ending_ids = ending_ids
        wanted = max(self.width + len(ending_ids), params.logprobs or 0)
        self.num_candidates = min(wanted, vocab_size)
        self.beams = [Hypothesis()]
        self.ended: list[Result] = []
        self._length = 0
        self._reports: dict[int, Candidates] = {}

    @property
    def results(self) -> list[Result]:
        """What the request gets, best first."""
        return self.ended[: self.params.num_results]

    def report(self, position: int, candidates: Candidates) -> bool:
        """What may follow the beam at a position; true: it was the last to report."""
        self._reports[position] = candidates
        return len(self._reports) == len(self.beams)

    def advance(self) -> list[Continuation]:
        """The next beams; none: it is over."""
        self._length += 1
        beams: list[tuple[int, Hypothesis]] = []
        for rank, (parent, hypothesis) in enumerate(self._best_candidates()):
            if self._length == self.max_tokens or hypothesis.token_id in self.ending_ids:
                # One that ends further down would be worse than as many as are wanted.
                if rank < self.width:
                    self._end(hypothesis)
            elif len(beams) < self.width:
                beams.append((parent, hypothesis))
        beams.sort(key=lambda beam: beam[0])
        self.beams = [hypothesis for _, hypothesis in beams]
        self._reports = {}
        if self._is_over():
            self.beams = []
            return []
        return [Continuation(parent, hypothesis.token_id) for parent, hypothesis in beams]

    def _best_candidates(self) -> list[tuple[int, Hypothesis]]:
        """As many as next beams and endings can be, each with its parent's position."""
        rows = [
            [
                (-(beam.sum_logprobs + logprob), position, token, logprob)
                for token, logprob in self._reports[position]
            ]
            for position, beam in enumerate(self.beams)
        ]
        # Each row is in order; the merge takes the earlier row first where scores are equal.
        best = islice(
            merge(*rows, key=lambda candidate: candidate[0]),
            self.width * (1 + len(self.ending_ids)),
        )
        keeps = self.params.logprobs is not None
        return [
            (
                position,
                Hypothesis(
                    self.beams[position],
                    token,
                    logprob,
                    -negative,
                    self._reports[position] if keeps else None,
                ),
            )
            for negative, position, token, logprob in best
        ]

    def _end(self, hypothesis: Hypothesis) -> None:
        score = hypothesis.sum_logprobs / self._length**self.params.length_penalty
        # Of equal scores the one that ended first stays in front.
        place = bisect_right(self.ended, -score, key=lambda result: -result.score)
        self.ended.insert(place, Result(hypothesis, score))
        del self.ended[self.width :]

    def _is_over(self) -> bool:
        if not self.beams:
            return True
        if len(self.ended) < self.width:
            return False
        params = self.params
        # A width of 1 is the greedy search: it takes the first end that comes.
        if params.early_stopping is True or self.width == 1:
            return True
        length = self._length
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        best = max(beam.sum_logprobs for beam in self.beams)
        possible: float = best / length**params.length_penalty
        return possible <= self.ended[-1].score
