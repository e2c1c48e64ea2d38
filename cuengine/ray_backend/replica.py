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
from cuengine.counted import counted
from cuengine.engine_keeper import Watchdog
from cuengine.engine_link import EngineLink
from cuengine.engine_view import EngineView
from cuengine.ray_backend.answers import Answers
from cuengine.ray_backend.attendance import LOOK_SECONDS, Servers
from cuengine.ray_backend.messages import server_of
from cuengine.ray_backend.replica_log import ReplicaLog
from cuengine.stats import EngineStats
from cuengine.text_side import load_text_side
from cuengine.wire import Add, AddBeams, Log, Ready, Report

logger = logging.getLogger("cuengine")


class Replica:
    """All methods run on one event loop. `avoid` and `replica` are for the router."""

    async def __init__(  # type: ignore[misc]  # Ray Serve waits for it
        self,
        config: EngineConfig,
        step_timeout: float,
        log_levels: Mapping[str, int],
        drain_timeout: float,
        owned: bool,
    ) -> None:
        """Returns when the engine is loaded. Raises ModelError and ConfigError.

        step_timeout   seconds after which a step is taken for hung; 0: none
        drain_timeout  seconds that the replica has in the end
        owned          the application is one server's own, and not to outlive it
        """
        self._log = _log(log_levels)
        _share_cpus()
        self._config = config
        self._drain_timeout = drain_timeout
        self._servers = Servers()
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
        self._tasks = [asyncio.create_task(self._watch_servers(owned))]
        if step_timeout:
            self._tasks.append(asyncio.create_task(self._watch(step_timeout)))

    async def ready(self) -> Ready:
        return self._ready

    async def generate(
        self, command: Add | AddBeams, *, avoid: list[str]
    ) -> AsyncGenerator[bytes, None]:
        """The stream of a request; closing it aborts the request."""
        self._servers.has_requests(server_of(command.key))
        async with aclosing(self._answers.stream(command)) as stream:
            async for frames in stream:
                yield frames

    async def finish(self, key: str, index: int, *, replica: str) -> None:
        """End one sample of a request."""
        self._answers.finish(key, index)

    async def stats(self, server: str, *, replica: str) -> EngineStats:
        """Asked by every server all the time: so each knows that the other one is there."""
        self._servers.asked(server)
        return self._answers.stats

    async def check_model(self) -> None:
        """Raises ModelError where another replica could not load the model's files."""
        await asyncio.to_thread(_check_model, self._config)

    async def view(self, *, replica: str) -> EngineView:
        return await self._answers.view()

    async def log_since(self, number: int, *, replica: str) -> tuple[int, list[Log]]:
        """As ReplicaLog.since."""
        return self._log.since(number)

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

    async def _watch_servers(self, owned: bool) -> None:
        """Servers that were killed abort nothing, and their application would stay for ever."""
        application = serve.get_replica_context().app_name
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for server in self._servers.look():
                if count := self._answers.give_up(server):
                    logger.warning("A server is gone; aborted: %s", counted(count, "request"))
            if owned and self._servers.unattended(self._drain_timeout):
                logger.error("The server is gone: its application %s is deleted", application)
                try:
                    await asyncio.to_thread(serve.delete, application)
                except Exception as error:
                    logger.error("The application cannot be deleted: %s", error)


def _check_model(config: EngineConfig) -> None:
    from cuengine.model.loader import check_weights

    text = load_text_side(config, found=lambda _config: None)
    check_weights(text.folder, text.model_config)


def _share_cpus() -> None:
    """An engine on the CPU computes with as many threads as Ray has reserved CPUs for the replica,
    which Ray says to OpenMP's users alone.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        os.environ.setdefault("NUMBA_NUM_THREADS", threads)


def _log(levels: Mapping[str, int]) -> ReplicaLog:
    """For the servers, and to stderr, which Ray has a file for."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    kept = ReplicaLog()
    to_file = logging.StreamHandler()
    to_file.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.handlers = [kept, to_file]
    logger.propagate = False
    return kept
