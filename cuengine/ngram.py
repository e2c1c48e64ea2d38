"""Drafts by looking the last tokens up in the text before them (prompt lookup).

Good where the output repeats what it was given: summaries, quotations, edits of a file, lists.
Which of the drafts are right is found out by speculation.py's callers.
"""

from __future__ import annotations

from array import array

from cuengine.scheduler import Step
from cuengine.sequence import Sequence
from cuengine.speculative_config import SpeculativeConfig

_MOST_CANDIDATES = 32
"""Earlier places that one lookup compares, the latest ones: a text may be full of them."""


class NgramIndex:
    """Where each n-gram of the shortest length that counts was seen, in one growing text.

    Longer ones are found by comparing backwards from there, as in zlib's hash chains: a token costs
    one dictionary entry, and a lookup no more than a few comparisons, however long the text is.

    shortest, longest  tokens at the text's end to look for
    """

    __slots__ = ("_latest", "_num_indexed", "_previous", "longest", "shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self._latest: dict[bytes, int] = {}
        self._previous: array[int] = array("i")
        """By end of an n-gram, from `shortest` on: where the same one ended before, or -1."""
        self._num_indexed = 0

    def propose(self, tokens: array[int], count: int) -> array[int]:
        """What followed the longest match, up to `count` tokens; nothing where there is none.

        Of matches as long the latest is taken. tokens: those of the call before, and more.
        """
        size, end = self.shortest, len(tokens)
        # The n-gram at the very end is not indexed yet: it would be found itself.
        self._index(tokens, end - 1)
        if end <= size:
            return array("i")
        best, best_length = -1, 0
        at = self._latest.get(tokens[end - size :].tobytes(), -1)
        for _ in range(_MOST_CANDIDATES):
            if at < 0 or best_length == self.longest:
                break
            length = self._match(tokens, at)
            if length > best_length:
                best, best_length = at, length
            at = self._previous[at - size]
        if best < 0:
            return array("i")
        # A match that reaches up to the end goes on with its own copy: a period of the text.
        found = tokens[best : best + count]
        period = end - best
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _index(self, tokens: array[int], end: int) -> None:
        """Enter the n-grams that end at or before `end`."""
        size, latest = self.shortest, self._latest
        for stop in range(max(size, self._num_indexed + 1), end + 1):
            gram = tokens[stop - size : stop].tobytes()
            self._previous.append(latest.get(gram, -1))
            latest[gram] = stop
        self._num_indexed = max(self._num_indexed, end)

    def _match(self, tokens: array[int], at: int) -> int:
        """Tokens before `at` that are those at the end; at least `shortest`, at most `longest`."""
        length, end = self.shortest, len(tokens)
        most = min(self.longest, at)
        while length < most and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class NgramProposer:
    """Implements `Proposer`. Each sequence has an index of its own, made when it is first asked."""

    cost = 0.0

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indices: dict[Sequence, NgramIndex] = {}
        self._found: dict[Sequence, array[int]] = {}

    def prepare(self, sequence: Sequence, count: int) -> int:
        index = self._indices.get(sequence)
        if index is None:
            config = self._config
            index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
            self._indices[sequence] = index
        found = self._found[sequence] = index.propose(sequence.token_ids, count)
        return len(found)

    def propose(self, step: Step) -> None:
        for chunk in step.chunks:
            if chunk.num_drafts:
                chunk.draft_ids = self._found[chunk.sequence][: chunk.num_drafts]
        self._found.clear()

    def num_reusable(self, sequence: Sequence) -> int:
        return sequence.num_computed

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)
        self._found.pop(sequence, None)
