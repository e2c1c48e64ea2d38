"""What Ray has to say in this process: in our log, like all else. Imports no Ray."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence

logger = logging.getLogger("cuengine.ray")


def into_our_log() -> None:
    """What Ray's loggers have to say, from warnings on. They come with handlers of their own."""
    for name in ("ray", "ray.serve"):
        log = logging.getLogger(name)
        log.handlers.clear()
        log.propagate = True
    logging.getLogger("ray").setLevel(logging.WARNING)
    # It has a line for each request of a replica that is lost; client.py has one for all.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    # Which cannot be otherwise, in the thread where Ray is started.
    logging.getLogger("ray._private.worker").addFilter(
        lambda record: "SIGTERM handler is not set" not in record.getMessage()
    )
    logging.captureWarnings(True)


class LogLines(io.TextIOBase):
    """In place of stdout, where Ray prints what happens to its processes."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                logger.warning("%s", line)
        return len(text)


def failure_in(messages: Sequence[str]) -> str:
    """What a replica's constructor raised, of Ray's messages with tracebacks and colours: our own
    error, else the last line.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(messages))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("cuengine.errors.")]
    if ours:
        return ours[-1].partition(": ")[2]
    return lines[-1] if lines else "Ray does not say why"
