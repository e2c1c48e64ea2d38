"""RayEngine: the engines of many machines behind AsyncEngine's interface.

Each request runs on one replica, whose answer comes in a stream of its own. A stream that breaks,
or in which not even a sign of life comes, shows that its replica is gone: what ran there goes on
elsewhere, with the tokens it has got, as it would have. Which request must not, suspicion.py says:
suspects run one at a time, beside none but those that have got a token where they run.

Ray places, restarts and adds replicas; whatever is known of them here comes from fleet.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cuengine.config import EngineConfig
from cuengine.counted import counted
from cuengine.engine_view import EngineView
from cuengine.errors import EngineDiedError, EngineStoppedError, RequestError
from cuengine.flights import Flight
from cuengine.front_desk import FrontDesk
from cuengine.ray_backend.fleet import Fleet, FleetGoneError, ReplicaStream
from cuengine.ray_backend.messages import HEARTBEAT, Taken, Told, Unfinished
from cuengine.stats import EngineStats, combined
from cuengine.text_side import TextSide
from cuengine.wire import Admitted, FrameReader, Ready, WireError, frame

logger = logging.getLogger("cuengine")

LOOKS = 4
"""Looks at a stream, HEARTBEAT seconds apart, that find it silent before it is given up: it is so
after 3.2 to 4 seconds. They are counted: where this process did not run, no replica is to blame.
"""

PAUSE = 0.2
"""Seconds before a request that no replica has taken is offered again."""

_SECONDS_AVOIDED = 10.0
_SECONDS_TO_ANSWER = 5.0


@dataclass(slots=True, eq=False)
class _Run:
    """A request on its way to a replica, and there.

    key      names it in the replica that runs it
    replica  which has taken it
    silent   looks since something was heard
    proven   it has got a token there
    """

    key: str
    flight: Flight
    unfinished: Unfinished
    stream: ReplicaStream
    task: asyncio.Task[None] | None = None
    replica: str | None = None
    silent: int = 0
    proven: bool = False


class RayEngine(FrontDesk):
    """All coroutines run on the loop that first awaited one."""

    def __init__(self, config: EngineConfig, text: TextSide, ready: Ready, fleet: Fleet) -> None:
        super().__init__(config, text, ready)
        self.num_restarts = 0
        self._fleet = fleet
        name = uuid.uuid4().hex[:8]  # replicas have the requests of other servers, too
        self._keys = (f"{name}-{i}" for i in itertools.count())
        self._runs: dict[str, _Run] = {}
        self._avoided: dict[str, float] = {}
        self._stats: dict[str, EngineStats] = {}
        self._gone = EngineStats()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._stopped = False

    @property
    def failed(self) -> bool:
        """Never: Ray starts replicas for as long as the deployment is there."""
        return False

    @property
    def restarting(self) -> bool:
        """There is no replica now; requests wait for one."""
        return self._started and not self._stopped and not self._fleet.replicas()

    async def start(self) -> None:
        if not self._started:
            self._started = True
            self._spawn(self._watch())

    def stats(self) -> EngineStats:
        """Of all replicas; totals of those that are gone are in it."""
        return combined(self._stats.values()).following(self._gone)

    def replicas(self) -> Mapping[str, EngineStats]:
        """The figures of each, as last heard."""
        return self._stats

    async def view(self, replica: str | None = None) -> EngineView:
        """What is to be seen of one replica, by default the first.

        Raises EngineStoppedError where it cannot be asked.
        """
        await self.start()
        name = replica or min(self._fleet.replicas(), default=None)
        if name is None or self._stopped:
            raise EngineStoppedError(self._why_stopped())
        names = {run.key: run.flight.request_id for run in self._runs.values()}
        try:
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                view = await self._fleet.view(name)
        except Exception as error:
            raise EngineStoppedError(f"The replica {name} cannot be asked: {error}") from error
        return view.renamed(lambda key: names.get(key, key), view.stats)

    async def stop(self) -> None:
        """End the replicas; what still runs gets EngineStoppedError."""
        if self._stopped:
            return
        self._accepting, self._stopped = False, True
        for flight in list(self._flights.values()):
            self._withdraw(flight)
            self._fail(flight, EngineStoppedError("The server stopped before the answer's end."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.stop()

    def _why_stopped(self) -> str:
        if self.restarting:
            return "There is no replica now; Ray is starting one."
        return "The engine is shutting down and takes no more requests."

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What requests go through.

    def _begin(self, flight: Flight) -> None:
        if not self._suspicion.suspects:
            self._submit(flight)

    def _submit(self, flight: Flight) -> None:
        if flight.key is not None or flight.over or self._stopped:
            return
        command = flight.add(next(self._keys))
        try:
            frame(command)  # as the replica will say it to its engine
        except WireError as error:
            self._fail(flight, RequestError(str(error)))
            return
        now = asyncio.get_running_loop().time()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        try:
            stream = self._fleet.submit(command, avoid=self._avoided.keys())
        except FleetGoneError as error:
            self._fail(flight, EngineStoppedError(str(error)))
            return
        run = _Run(command.key, flight, Unfinished(command), stream)
        flight.key = run.key
        self._runs[run.key] = run
        run.task = self._spawn(self._follow(run))

    def _submit_all(self) -> None:
        suspects = self._suspicion.suspects
        if suspects:
            for run in list(self._runs.values()):
                if not run.proven and run.flight.request_id != suspects[0]:
                    self._withdraw(run.flight)
            self._submit(self._flights[suspects[0]])
        else:
            for flight in list(self._flights.values()):
                self._submit(flight)

    def _withdraw(self, flight: Flight) -> None:
        if flight.key is not None:
            run = self._runs[flight.key]
            self._take_off(flight)
            assert run.task is not None
            run.task.cancel()

    def _take_off(self, flight: Flight) -> None:
        if flight.key is not None:
            del self._runs[flight.key]
        flight.key, flight.admitted = None, False

    def _send_finish(self, flight: Flight, index: int) -> None:
        assert flight.key is not None
        run = self._runs[flight.key]
        # With the last sample the request is over, and its stream is left.
        if run.replica is not None and any(tokens is not None for tokens in flight.outputs):
            run.unfinished.finish(index)
            self._spawn(self._finish(run.replica, run.key, index))

    async def _finish(self, replica: str, key: str, index: int) -> None:
        with suppress(Exception):  # a replica that is gone does not draw the sample, either
            await self._fleet.finish(replica, key, index)

    # What replicas say.

    async def _follow(self, run: _Run) -> None:
        reader: FrameReader[Told] = FrameReader(Told)
        why = "its stream ended too early"
        ended = False
        try:
            while True:
                data = await anext(run.stream)
                run.silent = 0
                for told in reader.feed(data):
                    self._on_told(run, told)
                if run.key not in self._runs and run.unfinished:
                    return  # it has come to its end here, and not there
        except StopAsyncIteration:
            ended = True
        except FleetGoneError as error:
            ended = True
            self._fail(run.flight, EngineStoppedError(str(error)))
        except asyncio.CancelledError as error:
            # Ray raises it as well, where a replica is shut down.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            why = _line(error)
        except Exception as error:
            why = _line(error)
        finally:
            if not ended:
                run.stream.cancel()
        if run.key in self._runs:
            self._broken(run, why)

    def _on_told(self, run: _Run, told: Told) -> None:
        flight = run.flight
        if isinstance(told, Taken):
            run.replica = told.replica
        elif run.key not in self._runs:
            pass  # nobody waits for it any more
        elif isinstance(told, Admitted):
            flight.admitted = True
            if told.error is not None:
                run.unfinished.refuse()
                self._fail(flight, told.error)
        else:
            if run.replica in self._stats:
                self._stats[run.replica] = told.stats
            for output in told.outputs:
                run.proven = True
                run.unfinished.drawn(output.tokens)
                if run.key in self._runs:
                    output.request_id = flight.request_id
                    self._deliver([output])

    def _broken(self, run: _Run, why: str) -> None:
        """The stream of a request that is not over has ended."""
        name = run.replica or run.stream.likely_replica
        if name is not None:
            self._avoided[name] = asyncio.get_running_loop().time() + _SECONDS_AVOIDED
        if run.replica is None:
            logger.warning("No replica took request %s: %s", run.flight.request_id, why)
            self._withdraw(run.flight)
            self._spawn(self._submit_later(run.flight))
            return
        lost = [other for other in self._runs.values() if other.replica == run.replica]
        held = counted(len(lost), "request")
        logger.error("Replica %s is lost with %s: %s", run.replica, held, why)
        self.num_restarts += 1
        for other in lost:
            self._withdraw(other.flight)
        self._blame([other.flight.request_id for other in lost])
        self._submit_all()

    async def _submit_later(self, flight: Flight) -> None:
        await asyncio.sleep(PAUSE)
        suspects = self._suspicion.suspects
        if not suspects or flight.request_id == suspects[0]:
            self._submit(flight)

    def _blame(self, names: list[str]) -> None:
        """A replica died with these. A suspect was alone there, but for what had got a token."""
        suspects = set(self._suspicion.suspects)
        alone = [name for name in names if name in suspects]
        others = [name for name in names if name not in suspects]
        self._suspicion.died(others, alone=False, steps_completed=False)
        for name in self._suspicion.died(alone, alone=True, steps_completed=False):
            logger.error("Request %s is refused: too many replicas died with it", name)
            self._fail(
                self._flights[name],
                EngineDiedError(
                    "Each of the engines that worked on this request died before it got a token. "
                    "It is not tried again."
                ),
            )
        if self._suspicion.suspects:
            held = counted(len(self._suspicion.suspects), "request")
            logger.warning("From now on one at a time: %s", held)

    # What is seen to all the time.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            self._look()

    def _look(self) -> None:
        replicas = set(self._fleet.replicas())
        for name in self._stats.keys() - replicas:
            self._gone = self._stats.pop(name).following(self._gone)
        for name in replicas:
            self._spawn(self._ask(name))
        for run in list(self._runs.values()):
            if run.replica is not None or replicas:
                run.silent += 1
            if run.silent > LOOKS and run.key in self._runs:
                self._broken(run, f"nothing was heard of it for {LOOKS * HEARTBEAT:g} s")

    async def _ask(self, name: str) -> None:
        with suppress(Exception):  # its streams show whether it lives
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                stats = await self._fleet.stats(name)
            if name in self._fleet.replicas():
                self._stats[name] = stats


def _line(error: BaseException) -> str:
    """Ray's errors have many."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
