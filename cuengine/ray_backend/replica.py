"""One replica: an engine in a process of its own, and a stream for each request that it runs.

Ray Serve starts it, and starts another where it has ended: it ends when its engine has, so that all
its streams break at once and those who listen go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from ray import serve

from cuengine.config import EngineConfig
from cuengine.engine_keeper import Watchdog
from cuengine.engine_link import EngineLink
from cuengine.engine_view import EngineView
from cuengine.outputs import EngineOutput
from cuengine.ray_backend.messages import HEARTBEAT, Taken, Unfinished
from cuengine.stats import EngineStats
from cuengine.wire import (
    Abort,
    Add,
    AddBeams,
    Admitted,
    FinishSample,
    Look,
    News,
    Ready,
    Report,
    Seen,
    frame,
)

logger = logging.getLogger("cuengine")


@dataclass(slots=True, eq=False)
class _Answer:
    """What is to be said about a request.

    promised  the engine will report of it soon (compiling a grammar may take long)
    """

    unfinished: Unfinished
    promised: bool
    admitted: deque[Admitted] = field(default_factory=deque)
    outputs: list[EngineOutput] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Replica:
    """Its methods run on one event loop, and are called by those who have the replica's name."""

    async def __init__(
        self, config: EngineConfig, step_timeout: float, log_levels: Mapping[str, int]
    ) -> None:
        """Returns when the engine is loaded. Raises ModelError and ConfigError."""
        _log(log_levels)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._answers: dict[str, _Answer] = {}
        self._views: deque[asyncio.Future[EngineView]] = deque()
        self._num_steps = 0
        self._watchdog = Watchdog()
        self._link = EngineLink()
        try:
            self._link.start(config)
            self._ready = await asyncio.to_thread(self._link.wait_ready)
            await self._link.attach(self._on_report, self._on_lost)
        except BaseException:
            self._link.kill()
            self._link.close()
            raise
        num_blocks = self._ready.num_blocks
        self._stats = EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self._watching = asyncio.create_task(self._watch(step_timeout)) if step_timeout else None

    async def ready(self) -> Ready:
        return self._ready

    async def generate(
        self, command: Add | AddBeams, *, avoid: list[str]
    ) -> AsyncGenerator[bytes, None]:
        """What messages.py says. Closing it, or cancelling who waits for it, aborts the request.

        avoid  is for the router
        """
        promised = isinstance(command, AddBeams) or command.params.structured_outputs is None
        answer = self._answers[command.key] = _Answer(Unfinished(command), promised)
        try:
            self._link.send(command)
            yield frame(Taken(self._name))
            while answer.unfinished or answer.news.is_set():
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await answer.news.wait()
                except TimeoutError:
                    yield b""
                    continue
                answer.news.clear()
                yield self._collect(answer)
        finally:
            del self._answers[command.key]
            if answer.unfinished:
                self._link.send(Abort(command.key))

    def _collect(self, answer: _Answer) -> bytes:
        frames = [frame(answer.admitted.popleft()) for _ in range(len(answer.admitted))]
        if answer.outputs:
            frames.append(frame(News(answer.outputs, self._stats, self._num_steps)))
            answer.outputs = []
        return b"".join(frames)

    async def finish(self, key: str, index: int, *, replica: str) -> None:
        """A sample's text has come to a stop string.

        replica  is for the router
        """
        answer = self._answers.get(key)
        if answer is not None:
            self._link.send(FinishSample(key, index))
            answer.unfinished.finish(index)
            answer.news.set()

    async def stats(self, *, replica: str) -> EngineStats:
        return self._stats

    async def view(self, *, replica: str) -> EngineView:
        view: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._views.append(view)
        self._link.send(Look())
        return await view

    def __del__(self) -> None:
        self._link.kill()

    def _on_report(self, report: Report) -> None:
        self._watchdog.heard()
        match report:
            case News():
                self._stats, self._num_steps = report.stats, report.num_steps
                for output in report.outputs:
                    answer = self._answers.get(output.request_id)
                    if answer is not None:
                        answer.outputs.append(output)
                        answer.unfinished.drawn(output.tokens)
                        answer.news.set()
            case Admitted():
                answer = self._answers.get(report.key)
                if answer is not None:
                    answer.promised = True
                    if report.problem is not None:
                        answer.unfinished.refuse()
                    answer.admitted.append(report)
                    answer.news.set()
            case Seen():
                view = self._views.popleft()
                if not view.done():
                    view.set_result(report.view)

    def _on_lost(self) -> None:
        logger.error("The engine's process %s; the replica ends", self._link.wait_ended())
        sys.stderr.flush()
        os._exit(1)

    async def _watch(self, step_timeout: float) -> None:
        """End an engine that hangs, as engine_keeper.py does."""
        while True:
            await asyncio.sleep(step_timeout / Watchdog.LOOKS)
            busy = any(
                answer.promised and bool(answer.unfinished) for answer in self._answers.values()
            )
            if self._watchdog.look(busy=busy):
                logger.error("A step takes longer than %g s: the engine hangs", step_timeout)
                self._link.kill()


def _log(levels: Mapping[str, int]) -> None:
    """To stderr, which Ray shows where the server runs."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
