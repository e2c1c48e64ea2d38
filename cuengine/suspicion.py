"""Which requests are suspected of killing the engine, and which one is to blame.

Pure bookkeeping; who runs the requests is in async_engine.py.

That a request was in the batch when the engine died proves nothing: the machine may be to blame, or
another one. Two deaths with no completed step between them make suspects of all that were in the
batch both times. Suspects run one at a time, each until it has got a token, which clears it. Only a
request that was alone in its batch at two such deaths is to blame.

A long prompt takes several steps to the token that kills, so that steps are completed between the
deaths for ever. A death after steps that brought a request nothing therefore counts as well, but
less: it takes four deaths then, instead of two.
"""

from __future__ import annotations

from collections.abc import Collection

_FULL, _LESS = 3, 1
_PROOF = 2 * _FULL


class Suspicion:
    """What speaks against each request since it last got a token."""

    def __init__(self) -> None:
        self._in_batch: dict[str, int] = {}
        self._alone: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Something speaks against somebody."""
        return bool(self._in_batch)

    @property
    def suspects(self) -> list[str]:
        """Who has to run alone, one after the other."""
        return [name for name, weight in self._in_batch.items() if weight >= _PROOF]

    def died(self, batch: Collection[str], *, alone: bool, steps_completed: bool) -> list[str]:
        """The engine died while it ran `batch`. Returns who is to blame, and forgets them.

        alone            nobody else was in the batch
        steps_completed  since the engine was started
        """
        later = _LESS if steps_completed else _FULL
        for counts in (self._in_batch, self._alone) if alone else (self._in_batch,):
            for name in batch:
                counts[name] = counts[name] + later if name in counts else _FULL
        guilty = [name for name in batch if self._alone.get(name, 0) >= _PROOF]
        for name in guilty:
            self.clear(name)
        return guilty

    def clear(self, name: str) -> None:
        """A request has got a token, or is over."""
        self._in_batch.pop(name, None)
        self._alone.pop(name, None)
