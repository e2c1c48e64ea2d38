"""Who watches the dashboard, and the task that takes pictures of the engine for them.

There is one task for all, as long as somebody watches, and it works when something has changed.
Each watcher takes the newest picture whenever it has room for one; who is slow misses some.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection
from typing import Literal

import msgspec

from cuengine.api.engine import ServingEngine
from cuengine.api.metrics import Metrics
from cuengine.engine_view import EngineView
from cuengine.errors import EngineStoppedError

logger = logging.getLogger("cuengine.api")

INTERVAL = 0.1
"""Seconds between two pictures, at least."""


class Latency(msgspec.Struct, frozen=True):
    """Seconds that half of some times do not exceed, and that 95 of 100 do not exceed."""

    median: float
    p95: float

    @classmethod
    def of(cls, seconds: Collection[float]) -> Latency | None:
        """By nearest rank; None where there are none."""
        if not seconds:
            return None
        ranked = sorted(seconds)
        median, p95 = (ranked[-(-len(ranked) * part // 100) - 1] for part in (50, 95))
        return cls(median, p95)


Status = Literal["running", "restarting", "stopped"]


class Picture(msgspec.Struct, frozen=True):
    """All that the page shows at a time.

    replica  whose view it is, of `replicas`; None: there is one engine, without a name
    status  restarting: the engine died, and comes back; stopped: it does not
    view    None where there is no engine
    ttft    time to first token of the last requests
    tpot    time between two tokens of a sample, of the last tokens
    """

    model: str
    status: Status
    view: EngineView | None
    ttft: Latency | None
    tpot: Latency | None
    replica: str | None = None
    replicas: list[str] | None = None


class Watchers:
    """Those who watch one engine of a server.

    replica  its name; None: the only one, or the first
    """

    def __init__(
        self,
        engine: ServingEngine,
        metrics: Metrics,
        model_name: str,
        replica: str | None = None,
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._metrics = metrics
        self._model_name = model_name
        self._encode = msgspec.json.Encoder().encode
        self._news: set[asyncio.Event] = set()
        """One for each watcher, set when there is a picture that it has not seen."""
        self._picture = b""
        self._outdated = True
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._news)

    async def pictures(self) -> AsyncGenerator[bytes, None]:
        """The newest picture, as JSON, and again whenever there is a newer one, until `end`."""
        if self._ended:
            return
        news = asyncio.Event()
        self._news.add(news)
        self._outdated = True
        if self._task is None:
            self._task = asyncio.create_task(self._work())
            self._task.add_done_callback(self._work_ended)
        task = self._task
        try:
            while True:
                await news.wait()
                news.clear()
                if self._task is not task:
                    return
                yield self._picture
        finally:
            self._news.discard(news)
            if not self._news:
                self._stop_work()

    def end(self) -> None:
        """Nobody gets anything any more."""
        self._ended = True
        self._stop_work()

    def _stop_work(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._wake()

    def _wake(self) -> None:
        for news in self._news:
            news.set()

    async def _work(self) -> None:
        seen = None
        while True:
            now = (self._engine.stats(), self._engine.restarting, self._engine.failed)
            if self._outdated or now != seen:
                self._outdated, seen = False, now
                self._picture = self._encode(await self._take())
                self._wake()
            await asyncio.sleep(INTERVAL)

    async def _take(self) -> Picture:
        view: EngineView | None = None
        status: Status = "running"
        replicas = self._engine.replicas()
        names = None if replicas is None else sorted(replicas)
        replica = self._replica or (names[0] if names else None)
        try:
            view = await self._engine.view(replica)
        except EngineStoppedError:
            status = "restarting" if self._engine.restarting else "stopped"
        return Picture(
            model=self._model_name,
            status=status,
            view=view,
            ttft=Latency.of(self._metrics.last_first_tokens),
            tpot=Latency.of(self._metrics.last_gaps),
            replica=replica,
            replicas=names,
        )

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("The dashboard's task failed", exc_info=task.exception())
            self._stop_work()
