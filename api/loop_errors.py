"""What the event loop reports of itself: one line where the machine is short of something.

asyncio logs a traceback for each connection that it cannot accept, once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from cuengine.shortage import shortage

logger = logging.getLogger("cuengine.api")

_SECONDS_BETWEEN = 10.0


class LoopErrors:
    """An exception handler for a loop; see asyncio's `loop.set_exception_handler`."""

    def __init__(self) -> None:
        self._said_at = -_SECONDS_BETWEEN

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        short_of = None if error is None else shortage(error)
        if short_of is None:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._said_at >= _SECONDS_BETWEEN:
            self._said_at = now
            logger.error("Connections wait: %s", short_of)
