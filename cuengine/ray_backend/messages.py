"""What a replica says in the stream of one request, beside what wire.py has.

The stream's items are frames as wire.py makes them, none or several together. An item with none is
a sign of life. A replica that has nothing to say to a server sends one, in the stream of any of its
requests, within twice HEARTBEAT seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from cuengine.outputs import TokenOutput
from cuengine.wire import Add, AddBeams, Admitted, Message, News

HEARTBEAT = 0.8
"""Seconds."""


class Taken(Message, tag="taken"):
    """First of all: which replica has the request."""

    replica: str


Told = Taken | Admitted | News


def server_of(key: str) -> str:
    """Which server a request is from: keys are made in client.py."""
    return key.partition("-")[0]


class Unfinished:
    """The samples of a request that its engine still draws."""

    def __init__(self, command: Add | AddBeams) -> None:
        self._beams = isinstance(command, AddBeams)
        if isinstance(command, AddBeams):
            self._samples = {0}
        elif command.progress is None:
            self._samples = set(range(command.params.num_samples))
        else:
            outputs = command.progress.outputs
            self._samples = {i for i, tokens in enumerate(outputs) if tokens is not None}

    def __bool__(self) -> bool:
        return bool(self._samples)

    def finish(self, index: int) -> None:
        """Its text has come to a stop string."""
        self._samples.discard(index)

    def refuse(self) -> None:
        """The engine does not take the request."""
        self._samples.clear()

    def drawn(self, tokens: Iterable[TokenOutput]) -> None:
        if self._beams:
            self._samples.clear()  # they come all at once
        for token in tokens:
            if token.finish_reason is not None:
                self._samples.discard(token.index)
