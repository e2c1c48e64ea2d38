"""What tests do to an engine in its process: controlled_process.py obeys."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from cuengine import AsyncEngine

SCRIPT = Path(__file__).with_name("controlled_process.py")


class Control:
    """The folder that the process looks into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

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


def kill(engine: AsyncEngine) -> None:
    os.kill(engine._link.pid, signal.SIGKILL)
