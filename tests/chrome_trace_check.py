"""Whether a Chrome trace is one that Perfetto shows whole.

What is asked for is what "Trace Event Format" (Chromium's documents) says of complete and metadata
events, and what Perfetto's importer makes of them: it drops events in silence that it cannot place
(src/trace_processor/importers/json/json_trace_tokenizer.cc and importers/common/slice_tracker.cc).
Perfetto counts in whole nanoseconds; other readers, as speedscope, add ts and dur as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_NANOSECONDS = 10**3
"""Of a trace's microsecond."""

_KEYS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur"},
}
"""That an event has to have; complete ones (X) may have args, too."""

Event = dict[str, Any]


def check_trace_file(text: str) -> list[Event]:
    """Its complete events. The type of a file is known by how it begins, and nothing may follow."""
    assert text.startswith('{"')
    assert text.endswith("}")
    trace = json.loads(text)
    assert isinstance(trace, dict)
    return check_trace(trace)


def check_trace(trace: dict[str, Any]) -> list[Event]:
    """Its complete events."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    named: set[tuple[str, int, int]] = set()
    events = []
    for event in trace["traceEvents"]:
        _check_keys(event)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            assert isinstance(event["args"]["name"], str)
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            events.append(event)
    threads = {(event["pid"], event["tid"]) for event in events}
    assert threads == {(pid, tid) for kind, pid, tid in named if kind == "thread_name"}
    assert {pid for pid, _ in threads} == {pid for kind, pid, _ in named if kind == "process_name"}
    for thread in threads:
        own = [event for event in events if (event["pid"], event["tid"]) == thread]
        check_nesting(own, lambda microseconds: round(microseconds * _NANOSECONDS))
        check_nesting(own, lambda microseconds: microseconds)
    return events


def _check_keys(event: Event) -> None:
    kind = event["ph"]
    assert event.keys() - {"args"} == _KEYS[kind] - {"args"}
    assert isinstance(event["name"], str)
    assert event["name"]
    for key in ("pid", "tid"):
        assert type(event[key]) is int
        assert 0 < event[key] < 2**32  # a tid of 0 is taken for the process's
    assert isinstance(event.get("args", {}), dict)
    if kind == "X":
        assert isinstance(event["cat"], str)
        for key in ("ts", "dur"):
            assert type(event[key]) in (int, float)
            assert event[key] >= 0
            exact = event[key] * _NANOSECONDS
            assert math.isclose(exact, round(exact), abs_tol=1e-3), f"{key} is cut off: {exact}"


def check_nesting(events: list[Event], as_read: Callable[[float], float]) -> None:
    """Of one thread: of two events one lies in the other, or they have nothing in common; and of
    those that begin together the outer one comes first in the file.

    as_read: what a reader makes of a time
    """
    open_until: list[float] = []
    for event in sorted(events, key=lambda event: as_read(event["ts"])):  # in a stable order
        start = as_read(event["ts"])
        end = start + as_read(event["dur"])
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"dropped: {event}"
        open_until.append(end)
