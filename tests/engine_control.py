"""What tests do to engines in their processes: controlled_process.py obeys, and counts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from cuengine import AsyncEngine

T = TypeVar("T")

COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("controlled_process.py"))]

PATIENCE = 180
"""Seconds for what is sure to come. Only time in which the test ran counts: not that of a machine
that has better things to do.
"""

COUNTERS = ("orders", "begun", "tickets", "loads", "compiles")


class Control:
    """The folder that the processes look into, and count in; counters only grow.

    orders    commands that were read
    begun     steps that were begun: with the valve closed and no more allowed, the last one waits
    loads     engines that were about to be loaded
    compiles  grammars that were about to be compiled
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def reset(self) -> None:
        """Whatever a test has set; counters stay."""
        for file in self.folder.iterdir():
            if file.name not in COUNTERS:
                file.unlink()

    def close(self) -> None:
        """No step is taken but those allowed."""
        self.set("closed")

    def allow(self, steps: int) -> None:
        with (self.folder / "tickets").open("a") as file:
            file.write("." * steps)

    def open(self) -> None:
        self.unset("closed")

    def poison(self, token_id: int) -> None:
        """A step that has this token kills the process."""
        self.set("poison", "x" * token_id)

    @property
    def orders(self) -> int:
        return self._count("orders")

    @property
    def begun(self) -> int:
        return self._count("begun")

    @property
    def loads(self) -> int:
        return self._count("loads")

    @property
    def compiles(self) -> int:
        return self._count("compiles")

    def _count(self, name: str) -> int:
        file = self.folder / name
        return file.stat().st_size if file.exists() else 0


async def until(condition: Callable[[], object]) -> None:
    """TimeoutError where it does not come true."""
    for _ in range(PATIENCE * 500):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError


async def patiently(work: Awaitable[T]) -> T:
    """What it returns, or TimeoutError."""
    task = asyncio.ensure_future(work)
    try:
        for _ in range(PATIENCE * 2):
            if (await asyncio.wait([task], timeout=0.5))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


def kill(engine: AsyncEngine) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def idle(engine: AsyncEngine) -> bool:
    """Nothing runs or waits there, and all blocks are free."""
    stats = engine.stats()
    nobody = stats.num_running == stats.num_waiting == 0
    return nobody and stats.num_free_blocks == stats.num_blocks


def alive(pid: int) -> bool:
    """Not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
