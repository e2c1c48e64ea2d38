"""Whether a Chrome trace has the shape that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from typing import Any

_NANOSECONDS = 10**3
"""Of a trace's microsecond."""


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Its complete events."""
    assert json.loads(json.dumps(trace)) == trace
    named = set()
    events = []
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        events.append(event)
    assert {(event["pid"], event["tid"]) for event in events} <= named
    for row in named:
        check_nesting([event for event in events if (event["pid"], event["tid"]) == row])
    return events


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Of one thread: of two events one lies in the other, or they have nothing in common."""
    open_until: list[int] = []
    # To the nanosecond, in which the viewers count.
    times = [
        (round(e["ts"] * _NANOSECONDS), round((e["ts"] + e["dur"]) * _NANOSECONDS)) for e in events
    ]
    for start, end in sorted(times, key=lambda time: (time[0], -time[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)
