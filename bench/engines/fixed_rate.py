"""Steps that take the same time, whatever runs in them: what stands in for a model's speed.

$FIXED_RATE has the steps per second, $FIXED_RATE_TOKEN the token that every sequence gets in each.
"""

from __future__ import annotations

import os
import time

TOKEN = int(os.environ.get("FIXED_RATE_TOKEN", "0"))


class Device:
    """Takes one step after another, all equally long; one that is given to it late ends late.

    (Steps that end with a clock's ticks would be the shorter the later a slow host brings them.)
    """

    def __init__(self) -> None:
        self._seconds = 1 / float(os.environ.get("FIXED_RATE", "50"))
        self._end = 0.0

    def take(self) -> float:
        """When a step ends that is given to the device now, on the clock `time.perf_counter`."""
        self._end = max(time.perf_counter(), self._end) + self._seconds
        return self._end

    def wait_until(self, end: float) -> None:
        time.sleep(max(0.0, end - time.perf_counter()))
