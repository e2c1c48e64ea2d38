"""RayEngine: the engines of many machines behind AsyncEngine's interface.

Each request runs on one replica, whose answer comes in a stream of its own. A stream that breaks
shows that its replica is gone, and so does the silence of a replica in all its streams and when
asked: what ran there goes on elsewhere, with the tokens it has got, as it would have. Which request
must not, suspicion.py says: suspects run one at a time, beside none but those that have got a token
where they run.

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
from cuengine.ray_backend.attendance import LOOKS, Silence
from cuengine.ray_backend.fleet import Fleet, FleetGoneError, ReplicaStream
from cuengine.ray_backend.messages import HEARTBEAT, Taken, Told, Unfinished
from cuengine.stats import EngineStats, combined
from cuengine.text_side import TextSide
from cuengine.wire import Admitted, FrameReader, Ready, WireError, frame

logger = logging.getLogger("cuengine")

PAUSE = 0.2
"""Seconds before a request that no replica has taken is offered again."""

_THE_FLEET = ""
"""Among the names of those who have been asked."""

_SILENT = f"{LOOKS * HEARTBEAT:g} s"
_SECONDS_AVOIDED = 10.0
_SECONDS_TO_ANSWER = 5.0


@dataclass(slots=True, eq=False)
class _Run:
    """A request on its way to a replica, and there.

    key      names it in the replica that runs it
    replica  which has taken it
    looks    at it, since it was sent
    proven   it has got a token there
    """

    key: str
    flight: Flight
    unfinished: Unfinished
    stream: ReplicaStream
    task: asyncio.Task[None] | None = None
    replica: str | None = None
    looks: int = 0
    proven: bool = False

    @property
    def likely_replica(self) -> str | None:
        """Which has taken it or is about to, if that is known."""
        return self.replica or self.stream.likely_replica


class RayEngine(FrontDesk):
    """All coroutines run on the loop that first awaited one."""

    def __init__(self, config: EngineConfig, text: TextSide, ready: Ready, fleet: Fleet) -> None:
        super().__init__(config, text, ready)
        self.num_restarts = 0
        self._fleet = fleet
        self._name = uuid.uuid4().hex[:8]  # replicas have the requests of other servers, too
        self._keys = (f"{self._name}-{i}" for i in itertools.count())
        self._runs: dict[str, _Run] = {}
        self._silence = Silence()
        self._asking: set[str] = set()
        self._avoided: dict[str, float] = {}
        self._stats: dict[str, EngineStats] = {}
        self._gone = EngineStats()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._stopped = self._fleet_gone = False

    @property
    def failed(self) -> bool:
        """Not while the deployment is there: Ray starts replicas for as long."""
        return self._fleet_gone

    @property
    def restarting(self) -> bool:
        """There is no replica now that can be heard; requests wait for one."""
        if not self._started or self._stopped or self._fleet_gone:
            return False
        return all(name in self._silence for name in self._fleet.replicas())

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

    def replica_counts(self) -> tuple[int, int]:
        """Replicas that take requests now, and how many there are to be."""
        return len(self._fleet.replicas()), self._fleet.wanted

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
        if self.failed:
            return "The deployment is gone from Ray, or all its replicas fail. Start a new server."
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
        if flight.key is not None or flight.over or self._stopped or self._fleet_gone:
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
            avoid = self._avoided.keys() | set(self._silence.names())
            stream = self._fleet.submit(command, avoid=avoid)
        except FleetGoneError:
            self._fleet_is_gone()
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
                for told in reader.feed(data):
                    self._on_told(run, told)
                self._heard(run.replica)
                if run.key not in self._runs and run.unfinished:
                    return  # it has come to its end here, and not there
        except StopAsyncIteration:
            ended = True
        except FleetGoneError:
            ended = True
            self._fleet_is_gone()
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
        name = run.likely_replica
        if name is not None:
            self._avoided[name] = asyncio.get_running_loop().time() + _SECONDS_AVOIDED
        if run.replica is None:
            logger.info("No replica took request %s: %s", run.flight.request_id, why)
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
        if replicas:
            self._fleet_gone = False
        elif _THE_FLEET not in self._asking:
            self._asking.add(_THE_FLEET)
            self._spawn(self._ask_fleet())
        for name in replicas - self._asking:
            self._asking.add(name)
            self._spawn(self._ask(name))
        runs = self._runs.values()
        busy = {one for run in runs if (one := run.likely_replica) is not None}
        for name in self._silence.look(replicas | busy):
            logger.warning("Nothing was heard of replica %s for %s", name, _SILENT)
        for run in list(runs):
            run.looks += 1
            is_late = run.looks > LOOKS and run.likely_replica in self._silence
            if is_late and run.key in self._runs:
                self._broken(run, f"nothing was heard of it for {_SILENT}")

    def _heard(self, name: str | None) -> None:
        if name is not None and self._silence.heard(name):
            logger.warning("Replica %s is heard again", name)

    async def _ask(self, name: str) -> None:
        """It hears of this server by that, too."""
        try:
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                stats = await self._fleet.stats(name, self._name)
        except Exception as error:
            logger.debug("Replica %s does not answer: %s", name, _line(error))
        else:
            if name in self._fleet.replicas():
                self._stats[name] = stats
                self._heard(name)
        finally:
            self._asking.discard(name)

    async def _ask_fleet(self) -> None:
        try:
            gone = await self._fleet.is_gone()
        except Exception as error:
            logger.debug("Nobody knows whether there will be replicas: %s", _line(error))
        else:
            if gone and not self._fleet.replicas():
                self._fleet_is_gone()
        finally:
            self._asking.discard(_THE_FLEET)

    def _fleet_is_gone(self) -> None:
        """Somebody has deleted the deployment, or Ray has given it up: nothing will run."""
        if self._fleet_gone:
            return
        self._fleet_gone = True  # so that none is submitted while they are ended
        logger.error("%s", self._why_stopped())
        for flight in list(self._flights.values()):
            self._withdraw(flight)
            self._fail(flight, EngineStoppedError(self._why_stopped()))


def _line(error: BaseException) -> str:
    """Ray's errors have many."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
