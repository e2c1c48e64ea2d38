"""One engine process and the link to it, with processes that are no engines."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_control import PATIENCE, until

from cuengine import engine_link
from cuengine.child_process import ChildProcess
from cuengine.config import EngineConfig
from cuengine.engine_keeper import EngineKeeper, Watchdog
from cuengine.engine_link import EngineLink, log_levels
from cuengine.errors import EngineStoppedError, ModelError
from cuengine.wire import Abort, Admitted, Launching, Report, WireError

STAND_IN = """
import os, signal, socket, sys
from cuengine.wire import *
peer = socket.socket(fileno=int(sys.argv[-1]))
def say(*reports):
    for report in reports:
        peer.sendall(frame(report))
assert FrameReader(Command).feed(peer.recv(1 << 16))  # what is to be loaded
"""


StandIn = Callable[[str], EngineLink]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """stand_in("say(...)"): a link to a process that does that and ends."""
    links: list[EngineLink] = []
    monkeypatch.setattr(engine_link, "_SECONDS_TO_END", PATIENCE)

    def start(code: str) -> EngineLink:
        monkeypatch.setattr(engine_link, "COMMAND", [sys.executable, "-P", "-c", STAND_IN + code])
        links.append(EngineLink())
        links[-1].start(EngineConfig(model="m"))
        return links[-1]

    yield start
    for link in links:
        link.kill()
        link.close()
        link.wait_ended()


def test_a_process_that_ends_before_it_has_said_a_word_is_an_error_that_says_how(stand_in: StandIn):
    with pytest.raises(EngineStoppedError, match="process ended with status 3 while"):
        stand_in("sys.exit(3)").wait_ready()
    with pytest.raises(EngineStoppedError, match=r"signal 9 \(Killed, as .* memory runs out\)"):
        stand_in("os.kill(os.getpid(), signal.SIGKILL)").wait_ready()


def test_an_error_of_loading_is_raised_as_it_was(stand_in: StandIn):
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        stand_in('say(LoadFailed("ModelError", "config.json: missing"))').wait_ready()


def test_what_is_no_message_is_an_error_while_loading_and_a_death_later(stand_in: StandIn):
    nonsense = 'peer.sendall(b"\\x00\\x00\\x00\\x01x"); peer.recv(1)'
    with pytest.raises(WireError, match="no message"):
        stand_in(nonsense).wait_ready()
    link = stand_in("say(Ready(1, 1, 1)); peer.recv(100); " + nonsense)
    link.wait_ready()

    async def listen() -> None:
        lost = asyncio.Event()
        await link.attach(lambda report: None, lost.set)
        link.send(Abort("1"))
        await lost.wait()

    asyncio.run(listen())
    assert link.wait_ended() == "was ended by signal 9 (Killed)"


def test_what_a_process_said_before_it_ended_is_heard_though_it_does_not_listen_any_more(
    stand_in: StandIn,
):
    link = stand_in('say(Ready(1, 1, 1), Launching(1, ["1"])); say(Admitted("2"))')
    link.wait_ready()
    assert link.wait_ended() == "ended with status 0"
    heard: list[Report] = []

    async def listen() -> None:
        lost = asyncio.Event()
        await link.attach(heard.append, lost.set)
        link.send(Abort("1"))  # it fails, before anything was read
        await lost.wait()
        link.send(Abort("2"))  # nobody is there, which is no error

    asyncio.run(listen())
    assert heard == [Launching(1, ["1"]), Admitted("2")]
    assert not link.attached


def test_a_command_that_cannot_be_started_is_an_os_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_link, "COMMAND", ["/no/such/program"])
    with pytest.raises(OSError, match="no/such/program"):
        EngineLink()


def test_a_child_is_deaf_to_signals_that_ask_it_to_end_and_no_zombie_when_it_has():
    child = ChildProcess(["sh", "-c", "kill -INT $$; kill -TERM $$; exit 7"])
    assert child.wait() == 7
    assert not Path(f"/proc/{child.pid}").exists()
    child.kill()


def test_an_engine_hangs_when_it_is_busy_and_silent_for_more_than_four_looks():
    watchdog = Watchdog()
    assert [watchdog.look(busy=True) for _ in range(5)] == [False] * 4 + [True]
    watchdog.heard()
    assert not any(watchdog.look(busy=True) for _ in range(4))
    watchdog.heard()
    assert not any(watchdog.look(busy=True) for _ in range(4))


def test_an_engine_with_nothing_to_do_does_not_hang():
    watchdog = Watchdog()
    assert not any(watchdog.look(busy=False) for _ in range(100))
    assert not any(watchdog.look(busy=True) for _ in range(4))


def looks_until_it_hangs(watchdog: Watchdog) -> int:
    return next(look for look in range(1, 100) if watchdog.look(busy=True))


def test_each_engine_after_one_that_hung_is_given_twice_as_long_up_to_fourfold():
    watchdog = Watchdog()
    patience = []
    for _ in range(4):
        patience.append(watchdog.patience)
        assert looks_until_it_hangs(watchdog) == 4 * patience[-1] + 1
    assert patience == [1, 2, 4, 4]
    watchdog.heard()
    assert looks_until_it_hangs(watchdog) == 17


async def test_a_process_that_was_ended_and_takes_its_time_is_not_ended_again():
    kills: list[int] = []
    link: Any = SimpleNamespace(pid=1, attached=True, kill=lambda: kills.append(link.pid))
    owner: Any = SimpleNamespace(engine_is_busy=lambda: True)
    keeper = EngineKeeper(link, EngineConfig(model="m"), 0.004, owner)
    watching = asyncio.create_task(keeper._watch())
    await until(lambda: kills)
    await asyncio.sleep(0.1)  # time for a hundred looks
    assert kills == [1]
    link.pid = 2
    await until(lambda: len(kills) > 1)
    assert kills == [1, 2]
    watching.cancel()


def test_the_engine_logs_at_the_levels_that_are_set_here(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = logging.getLogger("cuengine.own"), logging.getLogger("cuengine.other")
    monkeypatch.setattr(logging.getLogger("cuengine"), "level", logging.ERROR)
    monkeypatch.setattr(own, "level", logging.INFO)
    levels = log_levels()
    assert (levels["cuengine"], levels["cuengine.own"]) == (logging.ERROR, logging.INFO)
    assert levels[""] == logging.getLogger().getEffectiveLevel()
    assert other.name not in levels
