"""When operations begin and end on a GPU's stream, and which kernels fill them.

There is an event where an operation begins, one where it ends, and one before each of its launches
but the first. So a copy that belongs to an operation counts with the launch before it, or with the
first.

An event that is recorded on an idle stream is reached at once, before the host has got to launch
what comes next; a pair would then measure the host. So a step's launches queue up behind a hold:
copies that keep the stream busy for as long as the launches of the last step took. Where a hold was
too short the time between operations grows, which the report shows.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from cuengine.device.cuda.runtime import Event, Runtime
from cuengine.profiling.recording import Span, now
from cuengine.profiling.work import NO_WORK, Work

_HOLD_BYTES = 16 << 20
"""Of one copy from host to device: 0.3 to 1.5 ms over PCIe."""

_MAX_COPIES = 64
_MARGIN = 1.25

_BYTES = np.dtype(np.uint8)


class StreamTimes:
    """One step after the other; a step has ended, with its results fetched, when it is taken."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._events: list[Event] = []
        self._num_recorded = 0
        self._spans: list[Span] = []
        self._marks: list[list[Event]] = []
        self._in_operation = False
        self._origin, self._held = self._event(), self._event()
        self._origin_time = self._held_time = self._launched_time = 0
        self._copies = 1
        self._source = runtime.pinned((_HOLD_BYTES,), _BYTES)
        self._target = runtime.empty((_HOLD_BYTES,), _BYTES)

    def _event(self) -> Event:
        return self._runtime.event(timing=True)

    def hold(self) -> None:
        """Begin a step: what is queued from here on waits for a while."""
        self._origin_time = now()
        self._origin.record()
        for _ in range(self._copies):
            self._runtime.copy_in(self._target, self._source)
        self._held.record()
        self._held_time = now()

    def begin(self, name: str, work: Work) -> None:
        """What is queued up to `end` is one operation."""
        self._spans.append(Span(name, 0, work))
        self._in_operation = True
        self._marks.append([self._mark()])

    def launch(self, kernel: str) -> None:
        """The next of the operation's launches is of this kernel; those of no operation are not
        looked at."""
        if not self._in_operation:
            return
        launches = self._spans[-1].launches
        if launches:
            self._marks[-1].append(self._mark())
        launches.append(Span(kernel, 1))

    def end(self) -> None:
        """An operation that launched nothing has done no work."""
        self._marks[-1].append(self._mark())
        self._launched_time = now()
        self._in_operation = False
        if not self._spans[-1].launches:
            self._spans[-1].work = NO_WORK

    def _mark(self) -> Event:
        """An event that is recorded here."""
        if self._num_recorded == len(self._events):
            self._events.append(self._event())
        event = self._events[self._num_recorded]
        self._num_recorded += 1
        event.record()
        return event

    def take(self) -> list[Span]:
        """The step's operations. Their times count from when the host asked for the hold."""
        if not self._spans:
            return []
        self._marks[-1][-1].wait()
        for span, marks in zip(self._spans, self._marks, strict=True):
            times = [
                self._origin_time + round(mark.elapsed_ms(self._origin) * 1e6) for mark in marks
            ]
            span.start, span.end = times[0], times[-1]
            for launch, (start, end) in zip(span.launches, pairwise(times), strict=False):
                launch.start, launch.end = start, end
        self._copies = self._copies_for_the_next()
        spans, self._spans, self._marks, self._num_recorded = self._spans, [], [], 0
        return spans

    def _copies_for_the_next(self) -> int:
        """As long as the launches of this step took."""
        held = max(self._held.elapsed_ms(self._origin), 1e-3)
        asking = (self._held_time - self._origin_time) / 1e6
        if asking > held / 2:
            return 1  # the host did the copies itself: nothing queues up on such a stream
        launching = (self._launched_time - self._held_time) / 1e6
        wanted = math.ceil(_MARGIN * launching * self._copies / held)
        return max(1, min(wanted, _MAX_COPIES))
