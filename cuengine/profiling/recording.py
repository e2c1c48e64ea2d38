"""What was timed: spans of the host's time, nested, and of a device's stream, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cuengine.profiling.work import Work

now = time.perf_counter_ns

Named = tuple[str, Work]
Count = Callable[..., Named]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Span:
    """Something that took time.

    start, end  nanoseconds of `now`
    depth       spans that this one lies in
    work        of an operation; None for a range
    launches    of an operation on a device's stream: kernels, one after the other, that fill it
    """

    name: str
    depth: int
    work: Work | None = None
    start: int = 0
    end: int = 0
    launches: list[Span] = field(default_factory=list)

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class RecordedStep:
    """One step of the engine.

    kind    "prefill" or "decode"
    host    spans in the order in which they began; the first is the step itself
    stream  operations on the device's stream, where it has one: a GPU's
    """

    kind: str
    host: list[Span]
    stream: list[Span] = field(default_factory=list)


class Recorder:
    """Collects the host's spans. One thread uses it."""

    def __init__(self) -> None:
        self._spans: list[Span | tuple[Count, Arguments, int, int, int]] = []
        self._depth = 0

    def range(self, name: str) -> _Range:
        return _Range(self, name)

    def operation(self, count: Count, arguments: Arguments, start: int, end: int) -> None:
        """Something that was done between two readings of `now`, with no part of its own.

        count is called with the arguments, for name and work, where the span is taken: whatever is
        done here is time between two operations.
        """
        self._spans.append((count, arguments, self._depth, start, end))

    def begin(self, name: str) -> Span:
        """A range that begins now, in all that have not ended."""
        span = Span(name, self._depth)
        self._spans.append(span)
        self._depth += 1
        span.start = now()
        return span

    def end(self, span: Span) -> None:
        span.end = now()
        self._depth -= 1

    def take(self) -> list[Span]:
        """All of a step, which has ended: counts are of the last one."""
        assert self._depth == 0
        spans, self._spans = self._spans, []
        return [span if isinstance(span, Span) else _counted(*span) for span in spans]


def _counted(count: Count, arguments: Arguments, depth: int, start: int, end: int) -> Span:
    positional, keywords = arguments
    name, work = count(*positional, **keywords)
    return Span(name, depth, work, start, end)


class _Range:
    __slots__ = ("_name", "_recorder", "_span")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def __enter__(self) -> None:
        self._span = self._recorder.begin(self._name)

    def __exit__(self, *exception: object) -> None:
        self._recorder.end(self._span)
