"""What is to be known of replicas beside their answers: how many there are to be, what they log.

Asked for about once a second, in a thread of its own. Imports no Ray.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from cuengine.engine_link import log_here
from cuengine.wire import Log

logger = logging.getLogger("cuengine")

SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """wanted   replicas that Ray runs, or starts
    problem  what Ray says is wrong with them, if anything
    """

    wanted: int
    problem: str | None = None


class Watched(Protocol):
    """All may raise anything."""

    def replicas(self) -> Collection[str]: ...

    def outlook(self) -> Outlook: ...

    def log_since(self, replica: str, number: int) -> tuple[int, list[Log]]:
        """As ReplicaLog.since."""
        ...


class Watch:
    """wanted  replicas that there are to be, as last heard"""

    def __init__(self, fleet: Watched) -> None:
        self.wanted = 0
        self._fleet = fleet
        self._problem: str | None = None
        self._shown: dict[str, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cuengine-watch", daemon=True)

    def start(self) -> None:
        """Returns when it has looked once."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """It may still wait for an answer, which concerns nobody any more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(SECONDS):
            self.look()

    def look(self) -> None:
        # One that cannot be asked has ended, or will be heard of later.
        with suppress(Exception):
            self._see(self._fleet.outlook())
        replicas = list(self._fleet.replicas())
        self._shown = {name: self._shown.get(name, 0) for name in replicas}
        for name in replicas:
            with suppress(Exception):
                self._shown[name], logs = self._fleet.log_since(name, self._shown[name])
                self._show(name, logs)

    def _see(self, outlook: Outlook) -> None:
        self.wanted = outlook.wanted
        if outlook.problem not in (None, self._problem):
            logger.warning("Ray says of the replicas: %s", outlook.problem)
        self._problem = outlook.problem

    def _show(self, replica: str, logs: list[Log]) -> None:
        for log in logs:
            log.message = f"replica {replica}: {log.message}"
            log_here(log)
