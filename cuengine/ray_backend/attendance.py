"""Who is still there, at either end: replicas that a server hears, servers that ask a replica.

Both are counted in looks and not in seconds: where the process that looks did not run, nobody else
is to blame.
"""

from __future__ import annotations

from collections.abc import Collection

from cuengine.ray_backend.messages import HEARTBEAT

LOOKS = 4
"""Looks of a server, HEARTBEAT seconds apart, in which a replica was not heard before it counts as
silent: it is so after 3.2 to 4 seconds.
"""

LOOK_SECONDS = 5 * HEARTBEAT
"""Between two looks of a replica. A server that lives has asked it in the meantime."""

LOOKS_FOR_SERVER = 5
"""Looks in which a server did not ask, and another one did, before its requests are given up."""

SECONDS_UNATTENDED = 60.0
SECONDS_UNATTENDED_AT_FIRST = 3600.0
"""While it may still wait for others to be loaded."""


class Silence:
    """Looks since each replica was heard."""

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}

    def heard(self, name: str) -> bool:
        """Returns whether it had been silent."""
        was_silent = name in self
        self._looks[name] = 0
        return was_silent

    def look(self, names: Collection[str]) -> list[str]:
        """Forget all others. Returns who is silent from now on."""
        self._looks = {name: self._looks.get(name, 0) + 1 for name in names}
        return [name for name, looks in self._looks.items() if looks == LOOKS + 1]

    def __contains__(self, name: str | None) -> bool:
        return name is not None and self._looks.get(name, 0) > LOOKS

    def names(self) -> list[str]:
        return [name for name in self._looks if name in self]


class Servers:
    """Servers that ask a replica, or have requests there.

    Where none asks at all, none is given up: nobody asks a replica that is being replaced, which
    has the drain timeout to end what it runs.
    """

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}
        self._asked: set[str] = set()
        self._ever_asked = False
        self._unattended = 0

    def asked(self, server: str) -> None:
        self._asked.add(server)

    def has_requests(self, server: str) -> None:
        self._silent.setdefault(server, 0)

    def look(self) -> list[str]:
        """Every LOOK_SECONDS. Returns servers that are gone, and forgets them."""
        if not self._asked:
            self._unattended += 1
            return []
        self._unattended, self._ever_asked = 0, True
        for server in self._silent.keys() | self._asked:
            looks = 0 if server in self._asked else self._silent[server] + 1
            self._silent[server] = looks
        self._asked.clear()
        gone = [server for server, looks in self._silent.items() if looks >= LOOKS_FOR_SERVER]
        for server in gone:
            del self._silent[server]
        return gone

    def unattended(self, drain_timeout: float) -> bool:
        """There is no server any more, nor is this replica one that is being replaced."""
        first = SECONDS_UNATTENDED_AT_FIRST
        limit = SECONDS_UNATTENDED + drain_timeout if self._ever_asked else first
        return self._unattended * LOOK_SECONDS > limit
