"""Requests on several replicas that die at any moment: every stream gets what it would have.

The client is the real one, and so are the replicas' answers, the loop of an engine's process and
the engine in it. There is no Ray: who gets a request is drawn, and streams break when they are told
to. The model is checksum_model.py's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from checksum_model import assert_whole, make_engine
from deadly_requests import POISON, Deadly, Death, Job, Reader, jobs
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.config import EngineConfig
from cuengine.engine import Engine
from cuengine.engine_process import Loop
from cuengine.engine_view import EngineView
from cuengine.errors import EngineStoppedError, RequestError
from cuengine.ray_backend import answers, client
from cuengine.ray_backend.answers import Answers
from cuengine.ray_backend.attendance import LOOKS
from cuengine.ray_backend.client import RayEngine
from cuengine.ray_backend.fleet import FleetGoneError
from cuengine.sampling_params import SamplingParams
from cuengine.stats import EngineStats
from cuengine.text_side import TextSide
from cuengine.wire import Add, AddBeams, Command, FrameReader, Message, Ready, Report, frame

NUM_BLOCKS = 24


class Gone(Exception):
    """What a stream of a dead replica raises."""


class FakeReplica:
    """An engine and its answers; commands reach it at once, its reports when it is told to.

    awake  it does something; else its process is stopped
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.awake = asyncio.Event()
        self.awake.set()
        self.engine: Engine
        self.engine, model = make_engine(
            overlaps=False, max_num_seqs=3, budget=8, num_blocks=NUM_BLOCKS
        )
        self.engine.runner = Deadly(model)
        self.orders: deque[Message] = deque()
        self.reports: deque[Message] = deque()
        self.loop = Loop(self.engine, cast(Any, self))
        self.answers = Answers(name, NUM_BLOCKS, self._command)

    def _command(self, command: Command) -> None:
        self.orders += FrameReader[Message](Command).feed(frame(command))

    # As a Loop's connection.

    def receive(self, *, wait: bool) -> Message | None:
        assert self.orders or not wait
        return self.orders.popleft() if self.orders else None

    def send(self, report: Message) -> None:
        self.reports += FrameReader[Message](Report).feed(frame(report))

    @property
    def busy(self) -> bool:
        return bool(self.orders or self.reports) or self.engine.has_unfinished()

    def turn(self) -> bool:
        """False: it died."""
        if not self.awake.is_set():
            return True
        if self.orders or self.engine.has_unfinished():
            try:
                self.loop.turn()
            except Death:
                return False
        return True

    def report(self, count: int) -> None:
        for _ in range(min(count, len(self.reports)) if self.awake.is_set() else 0):
            self.answers.on_report(cast(Report, self.reports.popleft()))


class FakeStream:
    def __init__(self, replica: FakeReplica | None, command: Add | AddBeams) -> None:
        self.replica = replica
        self.broken = asyncio.Event()
        self._answer: AsyncGenerator[bytes, None] | None = None
        if replica is not None:
            self._answer = self._stream(replica, command)
        self._next: asyncio.Task[bytes] | None = None

    async def _stream(
        self, replica: FakeReplica, command: Add | AddBeams
    ) -> AsyncGenerator[bytes, None]:
        """What is said while the process is stopped is not sent before it goes on."""
        await replica.awake.wait()
        async with aclosing(replica.answers.stream(command)) as stream:
            async for item in stream:
                await replica.awake.wait()
                yield item

    @property
    def likely_replica(self) -> str | None:
        return None if self.replica is None else self.replica.name

    async def __anext__(self) -> bytes:
        broken = asyncio.create_task(self.broken.wait())
        waits: set[asyncio.Task[Any]] = {broken}
        if self._answer is not None and self._next is None:
            self._next = asyncio.create_task(cast(Any, anext(self._answer)))
        if self._next is not None:
            waits.add(self._next)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            broken.cancel()
        if self.broken.is_set():
            raise Gone("the replica has died")
        assert self._next is not None
        done, self._next = self._next, None
        try:
            return done.result()
        except RuntimeError as error:  # a task cannot raise StopAsyncIteration as it is
            if isinstance(error.__cause__, StopAsyncIteration):
                raise StopAsyncIteration from None
            raise

    def cancel(self) -> None:
        if self._next is not None and not self.broken.is_set():
            self._next.cancel()
            self._next = None
        elif self._answer is not None and not self.broken.is_set():
            # As Ray does: the replica's generator is cancelled where it waits.
            task = asyncio.ensure_future(self._answer.aclose())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


class FakeFleet:
    """Replicas that come and go. `picks` draws who gets a request."""

    def __init__(self, picks: list[int]) -> None:
        self._picks = itertools.cycle(picks)
        self._names = (f"replica{i}" for i in itertools.count())
        self.live: dict[str, FakeReplica] = {}
        self.streams: list[FakeStream] = []
        self.avoided: list[list[str]] = []
        self.asked: list[tuple[str, str]] = []
        self.deaths = 0
        self.wanted = 2
        self.gone = self.stopped = False

    def add(self) -> FakeReplica:
        replica = FakeReplica(next(self._names))
        self.live[replica.name] = replica
        return replica

    def wake(self) -> None:
        for replica in self.live.values():
            replica.awake.set()

    def die(self, name: str) -> None:
        replica = self.live.pop(name)
        self.deaths += 1
        replica.dead = True
        for stream in self.streams:
            if stream.replica is replica:
                stream.broken.set()

    def replicas(self) -> Collection[str]:
        return self.live.keys()

    def submit(self, command: Add | AddBeams, *, avoid: Collection[str]) -> FakeStream:
        if self.gone:
            raise FleetGoneError("the deployment is gone")
        self.avoided.append(list(avoid))
        names = [name for name in self.live if name not in avoid] or list(self.live)
        replica = self.live[names[next(self._picks) % len(names)]] if names else None
        stream = FakeStream(replica, command)
        self.streams.append(stream)
        if replica is None:
            stream.broken.set()
        return stream

    async def finish(self, replica: str, key: str, index: int) -> None:
        self.live[replica].answers.finish(key, index)

    async def stats(self, replica: str, server: str) -> EngineStats:
        one = self.live[replica]
        await one.awake.wait()
        self.asked.append((server, replica))
        return one.answers.stats

    async def is_gone(self) -> bool:
        return self.gone

    async def view(self, replica: str) -> EngineView:
        return await self.live[replica].answers.view()

    async def stop(self) -> None:
        self.stopped = True


def make(fleet: FakeFleet) -> RayEngine:
    nothing: Any = None
    text = TextSide("m", Path("m"), nothing, None, None, nothing)
    engine = RayEngine(EngineConfig(model="m"), text, Ready(64, NUM_BLOCKS, 50), fleet)
    engine._started = True  # looks are taken when a test says so
    return engine


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE", 0)
    monkeypatch.setattr(answers, "ITEMS_A_SECOND", 1e9)


async def others() -> None:
    """Let all tasks do what they can."""
    for _ in range(12):
        await asyncio.sleep(0)


async def go_on(fleet: FakeFleet) -> None:
    for replica in list(fleet.live.values()):
        if replica.turn():
            replica.report(len(replica.reports))
        else:
            fleet.die(replica.name)
    await others()


async def to_the_end(engine: RayEngine, fleet: FakeFleet, readers: list[Reader]) -> None:
    for _ in range(3000):
        while len(fleet.live) < 2:
            fleet.add()
        await go_on(fleet)
        busy = any(replica.busy for replica in fleet.live.values())
        if all(reader.task.done() for reader in readers) and not busy:
            return
    raise AssertionError("no end in sight")


OPS = st.one_of(
    st.tuples(st.just("submit"), jobs()),
    st.tuples(st.sampled_from(["leave", "abort"]), st.integers(0, 8)),
    st.tuples(st.sampled_from(["turn", "turn", "report", "die", "sleep"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["add", "all", "all", "look", "looks", "wake"]), st.none()),
)


async def play(engine: RayEngine, fleet: FakeFleet, ops: list[tuple[str, Any]]) -> list[Reader]:
    readers: list[Reader] = []
    for name, value in ops:
        replicas = list(fleet.live.values())
        replica = replicas[value % len(replicas)] if isinstance(value, int) and replicas else None
        match name:
            case "submit":
                readers.append(Reader(engine, f"r{len(readers)}", value))
            case "leave" | "abort" if value < len(readers) and not readers[value].task.done():
                readers[value].aborted = True
                if name == "leave":
                    readers[value].task.cancel()
                else:
                    await engine.abort(readers[value].name)
            case "turn" if replica is not None:
                if not replica.turn():
                    fleet.die(replica.name)
            case "report" if replica is not None:
                replica.report(1)
            case "die" if replica is not None:
                fleet.die(replica.name)
            case "sleep" if replica is not None:
                replica.awake.clear()
            case "wake":
                fleet.wake()
            case "look" | "looks":
                await look(engine, 1 if name == "look" else LOOKS + 1)
            case "add" if len(fleet.live) < 4:
                fleet.add()
            case "all":
                await go_on(fleet)
        await others()
        if engine._suspicion.suspects:
            assert len([run for run in engine._runs.values() if not run.proven]) <= 1
    return readers


@settings(max_examples=200, deadline=None)
@given(st.lists(OPS, max_size=40), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_every_stream_gets_what_it_would_have_got_from_replicas_that_live(
    ops: list[tuple[str, Any]], picks: list[int]
):
    async def run() -> tuple[RayEngine, FakeFleet, list[Reader]]:
        fleet = FakeFleet(picks)
        fleet.add()
        engine = make(fleet)
        readers = await play(engine, fleet, ops)
        fleet.wake()
        await to_the_end(engine, fleet, readers)
        return engine, fleet, readers

    engine, fleet, readers = asyncio.run(run())
    disturbed = any(name in ("die", "sleep") for name, _ in ops)
    for reader in readers:
        reader.check()
        if reader.job.kills:
            assert reader.died or reader.aborted
            assert not any(reader.tokens.values())
        elif not disturbed:
            assert not reader.died
    assert not engine._flights
    assert not engine._runs
    assert not engine._processor._states
    assert not engine._suspicion
    for replica in fleet.live.values():
        assert_whole(replica.engine)
        assert not len(replica.answers)


async def test_a_request_that_kills_is_refused_after_four_replicas_and_the_others_answered():
    fleet = FakeFleet([0])
    engine = make(fleet)
    good = Job([1, 2], SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    readers = [Reader(engine, f"r{i}", good) for i in range(3)]
    killer = Reader(engine, "killer", Job([POISON, 1], SamplingParams(seed=1)))
    await to_the_end(engine, fleet, [*readers, killer])
    assert killer.died
    for reader in readers:
        assert not reader.died
        reader.check()
    assert fleet.deaths == engine.num_restarts == 4


async def test_beside_several_that_kill_a_good_request_is_not_taken_for_one_of_them():
    fleet = FakeFleet([0])
    engine = make(fleet)
    good = Reader(engine, "good", Job([1], SamplingParams(seed=0, max_tokens=1)))
    killers = [
        Reader(engine, f"r{i}", Job([POISON], SamplingParams(seed=0, max_tokens=1)))
        for i in range(3)
    ]
    for _ in range(4):
        fleet.add()
        await go_on(fleet)
        killers.append(
            Reader(engine, f"r{len(killers)}", Job([POISON], SamplingParams(seed=0, max_tokens=1)))
        )
    await to_the_end(engine, fleet, [good, *killers])
    assert all(killer.died for killer in killers)
    assert not good.died
    good.check()


async def look(engine: RayEngine, times: int) -> None:
    for _ in range(times):
        engine._look()
        await others()


async def test_a_silent_replica_is_avoided_and_what_it_runs_goes_on_elsewhere():
    fleet = FakeFleet([0])
    silent, other = fleet.add(), fleet.add()
    engine = make(fleet)
    job = Job([1, 2], SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    reader = Reader(engine, "r", job)
    await others()
    assert len(silent.answers) == 1
    await look(engine, 3 * LOOKS)  # the stream has nothing to say, but the replica answers
    assert len(silent.answers) == 1
    silent.awake.clear()
    late = Reader(engine, "late", job)
    await others()
    await look(engine, LOOKS)
    assert fleet.avoided == [[], []]
    assert len(other.answers) == 0
    await look(engine, 1)
    assert len(other.answers) == 2  # the one that it had taken, and the one that it had not
    assert fleet.avoided == [[], [], [silent.name], [silent.name]]
    assert engine.num_restarts == 1
    assert not engine.restarting
    await look(engine, 1)
    assert engine.num_restarts == 1
    silent.awake.set()
    await to_the_end(engine, fleet, [reader, late])
    reader.check()
    late.check()
    assert not len(silent.answers)  # it has heard that it is to forget them


async def test_a_silent_replica_is_avoided_for_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "_SECONDS_AVOIDED", 0)
    fleet = FakeFleet([0])
    silent, other = fleet.add(), fleet.add()
    engine = make(fleet)
    await look(engine, 1)
    silent.awake.clear()
    await look(engine, 2 * LOOKS)
    job = Job([1, 2], SamplingParams(seed=1, max_tokens=3))
    readers = [Reader(engine, f"r{i}", job) for i in range(3)]
    await others()
    assert len(other.answers) == 3
    assert sum(replica == silent.name for _, replica in fleet.asked) == 1  # one call waits there
    silent.awake.set()
    await look(engine, 1)
    readers.append(Reader(engine, "r3", job))
    await others()
    assert fleet.avoided == [[silent.name]] * 3 + [[]]
    await to_the_end(engine, fleet, readers)


async def test_where_all_replicas_are_silent_requests_wait_for_one_that_is_heard():
    fleet = FakeFleet([0])
    replicas = [fleet.add(), fleet.add()]
    engine = make(fleet)
    await look(engine, 1)
    for replica in replicas:
        replica.awake.clear()
    job = Job([1, 2], SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    reader = Reader(engine, "r", job)
    await others()
    assert not engine.restarting
    await look(engine, 5 * LOOKS)
    assert engine.restarting
    assert not engine.failed
    assert not reader.task.done()
    assert engine.num_restarts == 0  # nobody had taken it
    replicas[1].awake.set()
    await look(engine, 2 * LOOKS)
    assert not engine.restarting
    await to_the_end(engine, fleet, [reader])
    reader.check()


async def test_requests_wait_while_there_is_no_replica():
    fleet = FakeFleet([0])
    engine = make(fleet)
    assert engine.restarting
    reader = Reader(engine, "r", Job([1, 2], SamplingParams(seed=1, max_tokens=3)))
    for _ in range(2 * LOOKS):
        engine._look()
        await others()
    assert not reader.task.done()
    fleet.add()
    assert not engine.restarting
    await to_the_end(engine, fleet, [reader])
    reader.check()
    assert engine.num_restarts == 0


async def test_totals_include_those_of_replicas_that_are_gone_and_figures_are_by_replica():
    fleet = FakeFleet([0, 1])
    first, second = fleet.add(), fleet.add()
    engine = make(fleet)
    job = Job([1, 2, 1], SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    await to_the_end(engine, fleet, [Reader(engine, f"r{i}", job) for i in range(4)])
    engine._look()
    await others()
    assert {name: stats.generation_tokens for name, stats in engine.replicas().items()} == {
        first.name: 8,
        second.name: 8,
    }
    assert engine.stats().num_blocks == 2 * NUM_BLOCKS
    fleet.die(first.name)
    engine._look()
    assert engine.replicas().keys() == {second.name}
    stats = engine.stats()
    assert (stats.generation_tokens, stats.prompt_tokens) == (16, 12)
    assert stats.num_blocks == NUM_BLOCKS


async def test_a_request_that_the_engine_refuses_ends_with_its_error():
    fleet = FakeFleet([0])
    fleet.add()
    engine = make(fleet)
    engine._limits = cast(Any, _NoLimits())  # it has changed since the server started

    async def answer(prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=2), request_id="r"):
            pass

    task = asyncio.create_task(answer([1] * 500))
    for _ in range(4):
        await go_on(fleet)
    with pytest.raises(RequestError, match="context"):
        await task


async def test_where_the_deployment_is_gone_all_requests_end_and_the_engine_has_failed():
    fleet = FakeFleet([0])
    fleet.add()
    engine = make(fleet)

    async def answer(name: str) -> None:
        async for _ in engine.generate([1], SamplingParams(max_tokens=2), request_id=name):
            pass

    runs = asyncio.create_task(answer("runs"))
    await others()
    fleet.die(*fleet.live)
    await others()
    assert engine.restarting
    assert not engine.failed
    fleet.gone = True
    await look(engine, 1)
    assert engine.failed
    assert not engine.restarting
    for task in (runs, asyncio.create_task(answer("new"))):
        with pytest.raises(EngineStoppedError, match="is gone"):
            await task
    assert not engine._runs
    fleet.gone = False  # somebody has deployed it again
    fleet.add()
    await look(engine, 1)
    assert not engine.failed
    task = asyncio.create_task(answer("later"))
    for _ in range(4):
        await go_on(fleet)
    await task
    fleet.gone = True
    with pytest.raises(EngineStoppedError, match="is gone"):
        await answer("too late")
    assert engine.failed


class _NoLimits:
    def check(self, prompt: list[int], params: SamplingParams) -> int:
        return 0


async def test_stopping_ends_what_runs_and_the_replicas():
    fleet = FakeFleet([0])
    replica = fleet.add()
    engine = make(fleet)

    async def answer() -> None:
        async for _ in engine.generate([1], SamplingParams(), request_id="r"):
            pass

    task = asyncio.create_task(answer())
    await others()
    await engine.stop()
    with pytest.raises(EngineStoppedError, match="before the answer"):
        await task
    await others()
    assert fleet.stopped
    assert len(replica.answers) == 0
    with pytest.raises(EngineStoppedError):
        await answer()
