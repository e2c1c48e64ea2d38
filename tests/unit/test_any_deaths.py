"""Engines that die at any moment, with messages on their way: every stream gets what it would have.

The async engine is the real one, and so is the loop in the engine's process with the engine in it;
between them is a wire that holds messages up, and loses those of the dead. The model is
checksum_model.py's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, cast

from checksum_model import assert_whole, make_engine
from deadly_requests import POISON, Deadly, Death, Job, Reader, jobs
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig
from cuengine.engine import Engine
from cuengine.engine_process import Loop
from cuengine.sampling_params import SamplingParams
from cuengine.text_side import TextSide
from cuengine.wire import Command, FrameReader, Message, Ready, Report, frame

CONFIG = EngineConfig(model="m")


class World:
    """Everything between the readers and the model; also the AsyncEngine's keeper.

    sent     commands that the engine's process has not read yet
    orders   that it has read
    reports  that the server's process has not read yet
    """

    def __init__(self, *, overlaps: bool, max_num_seqs: int, budget: int) -> None:
        self.settings: dict[str, Any] = {
            "overlaps": overlaps, "max_num_seqs": max_num_seqs, "budget": budget, "num_blocks": 24,
        }  # fmt: skip
        self.up = self.failed = self.restarting = False
        self.sent: deque[Message] = deque()
        self.orders: deque[Message] = deque()
        self.reports: deque[Message] = deque()
        self.deaths = 0
        nothing: Any = None
        text = TextSide("m", Path("m"), nothing, None, None, nothing)
        ready = Ready(64, 24, 50)
        self.async_engine = AsyncEngine(CONFIG, text, nothing, ready, step_timeout=0)
        self.async_engine._keeper = cast(Any, self)

    # As a keeper.

    def start(self) -> None:
        self.revive()

    def send(self, command: Message) -> None:
        assert self.up
        self.sent += FrameReader[Message](Command).feed(frame(command))

    # What happens.

    def revive(self) -> None:
        if self.up:
            return
        self.engine: Engine
        self.engine, model = make_engine(**self.settings)
        self.engine.runner = Deadly(model)
        self.loop = Loop(self.engine, cast(Any, _Connection(self)))
        self.up = True
        self.async_engine.engine_is_up()

    def read(self, count: int) -> None:
        for _ in range(min(count, len(self.sent))):
            self.orders.append(self.sent.popleft())

    def turn(self) -> None:
        if self.up and (self.orders or self.engine.has_unfinished()):
            try:
                self.loop.turn()
            except Death:
                self.die(len(self.reports))

    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.reports))):
            self.async_engine.engine_reports(cast(Report, self.reports.popleft()))

    def die(self, heard: int) -> None:
        """heard: so many of its reports had left it."""
        if self.up:
            self.deliver(heard)
            self.up = False
            self.deaths += 1
            for messages in (self.sent, self.orders, self.reports):
                messages.clear()
            self.async_engine.engine_died()


class _Connection:
    """What a Loop has of a World."""

    def __init__(self, world: World) -> None:
        self._orders, self._reports = world.orders, world.reports

    def receive(self, *, wait: bool) -> Message | None:
        assert self._orders or not wait
        return self._orders.popleft() if self._orders else None

    def send(self, report: Message) -> None:
        self._reports += FrameReader[Message](Report).feed(frame(report))


OPS = st.one_of(
    st.tuples(st.just("submit"), jobs()),
    st.tuples(st.sampled_from(["leave", "abort"]), st.integers(0, 8)),
    st.tuples(st.sampled_from(["read", "deliver", "die"]), st.integers(1, 6)),
    st.tuples(st.sampled_from(["turn", "turn", "turn", "revive", "all", "all"]), st.none()),
)


async def play(world: World, ops: list[tuple[str, Any]]) -> list[Reader]:
    readers: list[Reader] = []
    for name, value in ops:
        match name:
            case "submit":
                readers.append(Reader(world.async_engine, f"r{len(readers)}", value))
            case "leave" | "abort" if value < len(readers):
                reader = readers[value]
                if not reader.task.done():
                    reader.aborted = True
                    if name == "leave":
                        reader.task.cancel()
                    else:
                        await world.async_engine.abort(reader.name)
            case "read" | "deliver" | "die":
                getattr(world, name)(value)
            case "turn" | "revive":
                getattr(world, name)()
            case "all":
                go_on(world)
        await others(world)
    return readers


async def others(world: World) -> None:
    """Let the readers do what they can."""
    for _ in range(4):
        await asyncio.sleep(0)
    engine = world.async_engine
    assert not engine._suspicion.suspects or len(engine._roster) <= 1


def go_on(world: World) -> None:
    world.read(len(world.sent))
    world.turn()
    world.deliver(len(world.reports))


async def play_to_the_end(world: World, ops: list[tuple[str, Any]]) -> list[Reader]:
    readers = await play(world, ops)
    await world.async_engine.start()
    for _ in range(3000):
        world.revive()
        go_on(world)
        await others(world)
        busy = world.sent or world.engine.has_unfinished() or world.reports
        if all(reader.task.done() for reader in readers) and not busy:
            return readers
    raise AssertionError("no end in sight")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(OPS, max_size=40),
    st.booleans(),
    st.integers(2, 5),
    st.sampled_from([2, 16]),
)
def test_every_stream_gets_what_it_would_have_got_from_an_engine_that_lives(
    ops: list[tuple[str, Any]], overlaps: bool, max_num_seqs: int, budget: int
):
    world = World(overlaps=overlaps, max_num_seqs=max_num_seqs, budget=budget)
    readers = asyncio.run(play_to_the_end(world, ops))
    killed_by_others = any(name == "die" for name, _ in ops)
    for reader in readers:
        reader.check()
        if reader.job.kills:
            assert reader.died or reader.aborted
            assert not any(reader.tokens.values())
        elif not killed_by_others:
            assert not reader.died
    engine = world.async_engine
    assert not engine._flights
    assert not len(engine._roster)
    assert not engine._processor._states
    assert not engine._suspicion
    assert_whole(world.engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_while_suspects_run_one_at_a_time_new_requests_wait():
    killer, good = Job([POISON, 1], SamplingParams(seed=1)), Job([1, 2], SamplingParams(seed=1))
    world = World(overlaps=False, max_num_seqs=4, budget=16)
    twice: list[tuple[str, Any]] = [("all", None), ("revive", None)] * 2
    late: list[tuple[str, Any]] = [("submit", good)] * 2
    readers = asyncio.run(
        play_to_the_end(world, [("submit", killer), ("submit", good), *twice, *late, *twice])
    )
    assert [reader.died for reader in readers] == [True, False, False, False]
    for reader in readers:
        reader.check()
    assert world.deaths == 4
