"""One replica: an engine in a process of its own, for Ray Serve to run.

It ends when its engine has, so that all its streams break at once and those who listen go
elsewhere; Ray Serve starts another. What the streams carry is made in answers.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from ray import serve

from cuengine.config import EngineConfig
from cuengine.engine_keeper import Watchdog
from cuengine.engine_link import EngineLink
from cuengine.engine_view import EngineView
from cuengine.ray_backend.answers import Answers
from cuengine.stats import EngineStats
from cuengine.wire import Add, AddBeams, Ready, Report

logger = logging.getLogger("cuengine")


class Replica:
    """All methods run on one event loop. `avoid` and `replica` are for the router."""

    async def __init__(  # type: ignore[misc]  # Ray Serve waits for it
        self, config: EngineConfig, step_timeout: float, log_levels: Mapping[str, int]
    ) -> None:
        """Returns when the engine is loaded. Raises ModelError and ConfigError.

        step_timeout  seconds after which a step is taken for hung; 0: none
        """
        _log(log_levels)
        _share_cpus()
        self._watchdog = Watchdog()
        self._link = EngineLink()
        try:
            self._link.start(config)
            self._ready = await asyncio.to_thread(self._link.wait_ready)
            name: str = serve.get_replica_context().replica_id.unique_id
            self._answers = Answers(name, self._ready.num_blocks, self._link.send)
            await self._link.attach(self._on_report, self._on_lost)
        except BaseException:
            self._link.kill()
            self._link.close()
            raise
        self._watching = asyncio.create_task(self._watch(step_timeout)) if step_timeout else None

    async def ready(self) -> Ready:
        return self._ready

    async def generate(
        self, command: Add | AddBeams, *, avoid: list[str]
    ) -> AsyncGenerator[bytes, None]:
        """The stream of a request; closing it aborts the request."""
        async with aclosing(self._answers.stream(command)) as stream:
            async for frames in stream:
                yield frames

    async def finish(self, key: str, index: int, *, replica: str) -> None:
        """End one sample of a request."""
        self._answers.finish(key, index)

    async def stats(self, *, replica: str) -> EngineStats:
        return self._answers.stats

    async def view(self, *, replica: str) -> EngineView:
        return await self._answers.view()

    def _on_report(self, report: Report) -> None:
        self._watchdog.heard()
        self._answers.on_report(report)

    def _on_lost(self) -> None:
        logger.error("The engine's process %s; the replica ends", self._link.wait_ended())
        sys.stderr.flush()
        os._exit(1)

    async def _watch(self, step_timeout: float) -> None:
        """End an engine that hangs, as engine_keeper.py does."""
        while True:
            await asyncio.sleep(step_timeout / Watchdog.LOOKS)
            if self._watchdog.look(busy=self._answers.busy):
                logger.error("A step takes longer than %g s: the engine hangs", step_timeout)
                self._link.kill()


def _share_cpus() -> None:
    """An engine on the CPU computes with as many threads as Ray has reserved CPUs for the replica,
    which Ray says to OpenMP's users alone.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        os.environ.setdefault("NUMBA_NUM_THREADS", threads)


def _log(levels: Mapping[str, int]) -> None:
    """To stderr, which Ray shows where the server runs."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
