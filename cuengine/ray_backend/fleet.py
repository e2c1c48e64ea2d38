"""What RayEngine asks of the replicas. Ray Serve's are in deployment.py; tests have their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from cuengine.engine_view import EngineView
from cuengine.stats import EngineStats
from cuengine.wire import Add, AddBeams


class FleetGoneError(Exception):
    """There is no such deployment any more."""


class ReplicaStream(Protocol):
    """What one replica has to say about one request; messages.py says what that is.

    Raises, at any time, whatever shows that the replica is gone.
    """

    @property
    def likely_replica(self) -> str | None:
        """Who was picked, as far as that is known; which one has taken it, it says itself."""
        ...

    async def __anext__(self) -> bytes: ...

    def cancel(self) -> None:
        """Nobody listens any more: the replica is to forget the request."""
        ...


class Fleet(Protocol):
    """Replicas by name. A name is never used twice."""

    def replicas(self) -> Collection[str]:
        """Those that take requests now."""
        ...

    @property
    def wanted(self) -> int:
        """Replicas that there are to be; those that are not there yet are being started."""
        ...

    def submit(self, command: Add | AddBeams, *, avoid: Collection[str]) -> ReplicaStream:
        """Have one of them run a request; one of `avoid` only if there are no others.

        Raises, it or its stream, FleetGoneError where there will be none.
        """
        ...

    async def finish(self, replica: str, key: str, index: int) -> None:
        """End one sample of a request."""
        ...

    async def stats(self, replica: str, server: str) -> EngineStats:
        """Of a replica, for a server that calls itself so in the keys of its requests."""
        ...

    async def is_gone(self) -> bool:
        """There will be no replicas any more, unless somebody deploys them again."""
        ...

    async def view(self, replica: str) -> EngineView: ...

    async def stop(self) -> None: ...
