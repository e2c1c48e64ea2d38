"""Recorded steps as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing open.

The format is described in "Trace Event Format" (Chromium's documents): complete events (ph X) with
ts and dur in microseconds; those of one thread (pid, tid) nest by their times.

Some readers, as speedscope, take ts + dur for the end, in floating point: of two events that meet
the first may then end after the second has begun. So what a device does ends a nanosecond early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cuengine.profiling.recording import RecordedStep, Span

_PROCESS = 1
_HOST, _STREAM, _KERNELS = 1, 2, 3
"""Thread ids: the rows of the picture."""


def chrome_trace(steps: Sequence[RecordedStep], about: dict[str, Any]) -> dict[str, Any]:
    """What `json.dump` writes to a trace file. about: goes into it as it is, under otherData.

    Time 0 is the begin of the first step. Operations of a stream name their kernels, which have a
    row of their own.
    """
    return {
        "traceEvents": [*_names(steps), *_events(steps)],
        "displayTimeUnit": "ms",
        "otherData": about,
    }


def _names(steps: Sequence[RecordedStep]) -> Iterator[dict[str, Any]]:
    rows = {_HOST: "engine (host)"}
    if any(step.stream for step in steps):
        rows |= {_STREAM: "operations (device)", _KERNELS: "kernels (device)"}
    for kind, thread, name in (
        ("process_name", _HOST, "cuengine"),
        *(("thread_name", thread, name) for thread, name in rows.items()),
    ):
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": kind, "args": {"name": name}}


def _events(steps: Sequence[RecordedStep]) -> Iterator[dict[str, Any]]:
    for step in steps:
        origin = steps[0].host[0].start
        for span in step.host:
            yield _event(span, step.kind, _HOST, origin)
        for span in step.stream:
            yield _event(span, step.kind, _STREAM, origin)
            for launch in span.launches:
                yield _event(launch, step.kind, _KERNELS, origin)


def _event(span: Span, kind: str, thread: int, origin: int) -> dict[str, Any]:
    duration = span.duration if thread == _HOST else max(0, span.duration - 1)
    event: dict[str, Any] = {
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "name": f"{kind} step" if span.depth == 0 and thread == _HOST else span.name,
        "cat": "kernel" if thread == _KERNELS else "range" if span.work is None else "operation",
        "ts": (span.start - origin) / 1e3,
        "dur": duration / 1e3,
    }
    if span.work is not None:
        event["args"] = {"bytes": span.work.num_bytes, "operations": span.work.operations}
    if thread == _STREAM:
        event["args"]["kernels"] = [launch.name for launch in span.launches]
    return event
