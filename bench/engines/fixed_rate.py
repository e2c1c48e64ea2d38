"""Steps that end at a fixed rate, whatever runs in them: what stands in for a model's speed.

$FIXED_RATE has the steps per second, $FIXED_RATE_TOKEN the token that every sequence gets in each.
"""

from __future__ import annotations

import os
import time

TOKEN = int(os.environ.get("FIXED_RATE_TOKEN", "0"))


class Ticks:
    """Moments at which steps end: one step a tick, never two."""

    def __init__(self) -> None:
        self._interval = 1 / float(os.environ.get("FIXED_RATE", "50"))
        self._last = 0

    def next(self) -> int:
        """The tick at which a step ends that is given to the device now."""
        now = int(time.perf_counter() / self._interval)
        self._last = max(now, self._last) + 1
        return self._last

    def wait_for(self, tick: int) -> None:
        time.sleep(max(0.0, tick * self._interval - time.perf_counter()))
