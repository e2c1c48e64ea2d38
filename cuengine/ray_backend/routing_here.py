"""What this process's request routers know, for those who send the requests.

Ray Serve makes the routers, in a thread of its own, and hands them to nobody. It copies router.py
to make them, globals and all; so what is shared is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MAX_PICKS = 10_000


@dataclass(slots=True)
class Routing:
    """replicas  that take requests now
    picks     key of a request -> replica that it was to go to; of the last requests
    """

    replicas: tuple[str, ...] = ()
    picks: dict[str, str] = field(default_factory=dict)

    def pick(self, key: str, replica: str) -> None:
        self.picks[key] = replica
        if len(self.picks) > _MAX_PICKS:
            del self.picks[next(iter(self.picks))]


_applications: dict[str, Routing] = {}


def routing_of(application: str) -> Routing:
    return _applications.setdefault(application, Routing())
