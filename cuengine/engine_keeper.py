"""Sees to it that an engine runs: ends one that hangs, starts another where one has ended.

Whom that concerns, and what becomes of the requests, is async_engine.py's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from cuengine.config import EngineConfig
from cuengine.engine_link import EngineLink
from cuengine.errors import CuengineError
from cuengine.shortage import shortage
from cuengine.wire import Command, Report

logger = logging.getLogger("cuengine")

PAUSES = (0.0, 2.0, 10.0)
"""Seconds before each try to load the engine again; after the last it has failed for good."""


class Owner(Protocol):
    """Who has work for the engine, and is told of what happens to it; all on the event loop."""

    def engine_is_up(self) -> None:
        """A process has the engine loaded, the first one or another, and knows no requests."""

    def engine_reports(self, report: Report) -> None: ...

    def engine_died(self) -> None:
        """It knows nothing any more; another one is being started."""

    def engine_failed(self) -> None:
        """There will be no other one."""

    def engine_is_busy(self) -> bool:
        """It has something to report in a while, if all is well."""
        ...


class Watchdog:
    """Whether an engine hangs: it is busy, and was not heard of at several looks in a row.

    Looks are counted, not seconds: where this process did not run, that is not the engine's fault.
    """

    LOOKS = 4
    """For each timeout. So the engine has at least that, and at most a quarter more."""
    MAX_PATIENCE = 4

    def __init__(self) -> None:
        self.patience = 1
        """Timeouts that the engine is given. Twice as many after each that hung: where steps are
        just slow, the next one gets through, and no request is blamed for it."""
        self._silent = 0

    def heard(self) -> None:
        self._silent = 0

    def look(self, *, busy: bool) -> bool:
        """True: it hangs. The next one is given longer."""
        self._silent = self._silent + 1 if busy else 0
        if self._silent <= self.LOOKS * self.patience:
            return False
        self._silent = 0
        self.patience = min(2 * self.patience, self.MAX_PATIENCE)
        return True


class EngineKeeper:
    """Keeps a process with an engine in it.

    step_timeout  seconds after which a step is taken for hung, up to four times as many after
                  that has happened; 0: none
    failed        the engine could not be loaded again: nothing runs any more
    num_restarts  times that it died
    """

    def __init__(
        self, link: EngineLink, config: EngineConfig, step_timeout: float, owner: Owner
    ) -> None:
        """link: of the first process, whose engine is loaded; config: for all that follow."""
        self.failed = False
        self.num_restarts = 0
        self._link = link
        self._config = config
        self._step_timeout = step_timeout
        self._owner = owner
        self._watchdog = Watchdog()
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        return self._link.pid

    @property
    def up(self) -> bool:
        """There is a process to send commands to."""
        return self._link.attached

    @property
    def restarting(self) -> bool:
        """It has died, and another one is on its way."""
        return self.num_restarts > 0 and not (self.up or self.failed or self._stopping)

    def start(self) -> None:
        """Keep it, in the running loop, from now on."""
        self._spawn(self._attach())
        if self._step_timeout:
            self._spawn(self._watch())

    def send(self, command: Command) -> None:
        """Raises WireError for a command that cannot be encoded."""
        self._link.send(command)

    async def stop(self) -> None:
        """End the process; no other one follows."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._link.kill()
        await self._ended()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attach(self) -> None:
        """Talk to a process whose engine is loaded."""
        await self._link.attach(self._on_report, self._on_lost)
        if self.up:  # else it has died meanwhile, and its successor will be
            self._owner.engine_is_up()

    def _on_report(self, report: Report) -> None:
        self._watchdog.heard()
        self._owner.engine_reports(report)

    def _on_lost(self) -> None:
        if self._stopping:
            return
        self.num_restarts += 1
        self._owner.engine_died()
        self._spawn(self._restart())

    async def _restart(self) -> None:
        logger.error("The engine's process %d %s", self.pid, await self._ended())
        for pause in PAUSES:
            await asyncio.sleep(pause)
            try:
                self._link = EngineLink()
                self._link.start(self._config)
                await asyncio.to_thread(self._link.wait_ready)
            except (CuengineError, OSError) as error:
                logger.error("The engine cannot be loaded again: %s", shortage(error) or error)
                await self._ended()
                continue
            logger.warning("The engine's process %d takes over", self.pid)
            await self._attach()
            return
        self.failed = True
        logger.error("The engine has failed for good; running requests are lost")
        self._owner.engine_failed()

    async def _ended(self) -> str:
        """Let the process end; says how it did."""
        link = self._link
        link.close()
        return await asyncio.to_thread(link.wait_ended)

    async def _watch(self) -> None:
        ended = None
        while True:
            await asyncio.sleep(self._step_timeout / Watchdog.LOOKS)
            if self.pid == ended:  # and takes its time
                continue
            limit = self._step_timeout * self._watchdog.patience
            if self._watchdog.look(busy=self.up and self._owner.engine_is_busy()):
                logger.error(
                    "A step takes longer than %g s: the engine's process %d hangs, and is ended. "
                    "The steps of the next one may take %g s. Where they are just slow, give "
                    "--step-timeout more than %g",
                    limit,
                    self.pid,
                    self._step_timeout * self._watchdog.patience,
                    self._step_timeout,
                )
                ended = self.pid
                self._link.kill()
