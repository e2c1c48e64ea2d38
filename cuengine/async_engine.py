"""The engine behind an async interface: it runs in a process of its own, and may die.

front_desk.py keeps what every request has got so far, text included, and this module sees to the
process. When it dies, another one goes on where it was: the same tokens would have come next. Which
request must not, suspicion.py says.

The process is kept by engine_keeper.py, what is known of a request by flights.py. What happens in
the process is in engine_process.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque

from cuengine.config import STEP_TIMEOUT, EngineConfig, check_step_timeout
from cuengine.counted import counted
from cuengine.engine_keeper import EngineKeeper
from cuengine.engine_link import EngineLink
from cuengine.engine_view import EngineView
from cuengine.errors import ConfigError, EngineDiedError, EngineStoppedError, RequestError
from cuengine.flights import Flight, Roster
from cuengine.front_desk import FrontDesk
from cuengine.shortage import shortage
from cuengine.stats import EngineStats
from cuengine.text_side import TextSide, load_text_side
from cuengine.wire import (
    Abort,
    Admitted,
    FinishSample,
    Launching,
    Look,
    News,
    Ready,
    Report,
    Seen,
    WireError,
)

logger = logging.getLogger("cuengine")


class AsyncEngine(FrontDesk):
    """An Engine in a process of its own; all coroutines run on the loop that first awaited one."""

    def __init__(
        self,
        config: EngineConfig,
        text: TextSide,
        link: EngineLink,
        ready: Ready,
        step_timeout: float,
    ) -> None:
        super().__init__(config, text, ready)
        # What was promised to requests must hold for each engine that comes after this one.
        lasting = dataclasses.replace(
            config,
            model=str(text.folder),
            revision=None,
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
        )
        self._keeper = EngineKeeper(link, lasting, step_timeout, self)
        self._started = False
        # Who waits for a view, and how many of them the engine has been asked for.
        self._views: deque[asyncio.Future[EngineView]] = deque()
        self._num_looks = 0
        # What the engine that runs has, and what it says of itself.
        self._roster = Roster()
        self._stats = self._earlier_stats = EngineStats(
            num_blocks=ready.num_blocks, num_free_blocks=ready.num_blocks
        )

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, step_timeout: float = STEP_TIMEOUT
    ) -> AsyncEngine:
        """Find, fetch and load the model; returns when the engine is loaded.

        step_timeout  seconds after which a step is taken for hung, and the engine for dead; 0: none

        Raises ModelError and ConfigError.
        """
        check_step_timeout(step_timeout)
        try:
            link = EngineLink()  # Python starts there while the model is found here
        except OSError as error:
            why = shortage(error) or f"{error.filename}: {error.strerror}"
            raise ConfigError(f"the engine's process cannot be started: {why}") from error
        try:
            text = load_text_side(config, found=link.start)
            return cls(config, text, link, link.wait_ready(), step_timeout)
        except BaseException:
            link.kill()
            link.close()
            raise

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._keeper.pid

    @property
    def failed(self) -> bool:
        """The engine could not be loaded again: nothing runs any more."""
        return self._keeper.failed

    @property
    def restarting(self) -> bool:
        """It died, and another one is being loaded; requests wait."""
        return self._keeper.restarting

    @property
    def num_restarts(self) -> int:
        """Times that it died."""
        return self._keeper.num_restarts

    async def start(self) -> None:
        """Let the engine run, if it doesn't yet; `generate` does so by itself."""
        if not self._started:
            self._started = True
            self._keeper.start()

    def stats(self) -> EngineStats:
        """As of the last step; totals count from the first engine's start."""
        return self._stats

    def replicas(self) -> None:
        """There is one engine."""

    def replica_counts(self) -> None:
        """There is one engine."""

    async def view(self, replica: str | None = None) -> EngineView:
        """What is to be seen of the engine between two steps; totals as in `stats`.

        replica  means nothing here

        Raises EngineStoppedError where there is no engine: it has stopped, failed, or died.
        """
        await self.start()
        if self.failed or self.restarting or not self._accepting:
            raise EngineStoppedError(self._why_stopped())
        view: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._views.append(view)
        self._look()
        return await view

    async def stop(self) -> None:
        """End the engine's process; what still runs gets EngineStoppedError."""
        self._accepting = False
        await self._keeper.stop()
        self._fail_streams()
        self._fail_views()

    def _why_stopped(self) -> str:
        if self.failed:
            return "The engine has failed; its log says why. Restart it."
        if self.restarting:
            return "The engine has died, and is being started again."
        return "The engine is shutting down and takes no more requests."

    def _fail_streams(self) -> None:
        why = self._why_stopped() if self.failed else "The server stopped before the answer's end."
        for flight in self._flights.values():
            self._fail(flight, EngineStoppedError(why))

    def _look(self) -> None:
        """Ask for the views that are waited for, if there is an engine to ask."""
        while self._keeper.up and self._num_looks < len(self._views):
            self._keeper.send(Look())
            self._num_looks += 1

    def _fail_views(self) -> None:
        self._num_looks = 0
        while self._views:
            view = self._views.popleft()
            if not view.done():
                view.set_exception(EngineStoppedError(self._why_stopped()))

    # What requests go through.

    def _begin(self, flight: Flight) -> None:
        if not self._suspicion.suspects:
            self._submit(flight)

    def _submit(self, flight: Flight) -> None:
        """Hand a request over to the engine; while there is none it waits."""
        if not self._keeper.up or flight.key is not None or flight.over:
            return
        key = self._roster.next_key()
        try:
            self._keeper.send(flight.add(key))
        except WireError as error:
            self._fail(flight, RequestError(str(error)))
        else:
            self._roster.put(key, flight)

    def _withdraw(self, flight: Flight) -> None:
        """Take a request back from the engine, if it has it."""
        if flight.key is not None:
            self._keeper.send(Abort(flight.key))
            self._roster.take_off(flight)

    def _take_off(self, flight: Flight) -> None:
        self._roster.take_off(flight)

    def _submit_all(self) -> None:
        """See to it that all requests run, or if there are suspects, the first of them alone."""
        suspects = self._suspicion.suspects
        if suspects:
            for flight in self._roster:
                if flight.request_id != suspects[0]:
                    self._withdraw(flight)
            self._submit(self._flights[suspects[0]])
        else:
            for flight in list(self._flights.values()):
                self._submit(flight)

    def _send_finish(self, flight: Flight, index: int) -> None:
        assert flight.key is not None
        self._keeper.send(FinishSample(flight.key, index))

    # What the keeper calls.

    def engine_is_up(self) -> None:
        self._submit_all()
        self._look()

    def engine_is_busy(self) -> bool:
        return any(flight.promised for flight in self._roster)

    def engine_reports(self, report: Report) -> None:
        match report:
            case News():
                self._on_news(report)
            case Launching():
                self._roster.launched(report)
            case Admitted():
                flight = self._roster.find(report.key)
                if flight is not None:
                    flight.admitted = True
                    if report.error is not None:
                        self._fail(flight, report.error)
            case Seen():
                self._on_seen(report.view)

    def _on_news(self, news: News) -> None:
        self._roster.completed(news.num_steps)
        self._stats = news.stats.following(self._earlier_stats)
        outputs = []
        for output in news.outputs:
            flight = self._roster.find(output.request_id)
            if flight is not None:
                output.request_id = flight.request_id
                outputs.append(output)
        self._deliver(outputs)

    def _on_seen(self, view: EngineView) -> None:
        def name(key: str) -> str:
            flight = self._roster.find(key)
            return f"over-{key}" if flight is None else flight.request_id

        self._num_looks -= 1
        waiting = self._views.popleft()
        if not waiting.done():  # else nobody waits any more
            waiting.set_result(view.renamed(name, view.stats.following(self._earlier_stats)))

    def engine_died(self) -> None:
        self._fail_views()
        roster = self._roster
        in_flight = counted(len(roster), "request")
        logger.error("The engine's process ended with %s in flight", in_flight)
        batch = roster.batch()
        flights = [flight for key in batch if (flight := roster.find(key)) is not None]
        guilty = self._suspicion.died(
            [flight.request_id for flight in flights],
            alone=len(batch) == 1,
            steps_completed=roster.num_steps > 0,
        )
        roster.clear()
        self._stats = self._earlier_stats = self._stats.after_the_end()
        for name in guilty:
            logger.error("Request %s is refused: the engine died when it ran alone", name)
            self._fail(
                self._flights[name],
                EngineDiedError(
                    "The engine died more than once while it worked on this request alone. It is "
                    "not tried again."
                ),
            )
        if self._suspicion.suspects:
            suspects = counted(len(self._suspicion.suspects), "request")
            logger.warning("From now on one at a time: %s", suspects)

    def engine_failed(self) -> None:
        self._fail_streams()
        self._fail_views()
