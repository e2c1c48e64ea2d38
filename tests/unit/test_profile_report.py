"""Tables and traces of recorded steps: hand-made ones, and any that a recorder can make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chrome_trace_check import check_trace
from hypothesis import given
from hypothesis import strategies as st

from cuengine.counted import counted
from cuengine.profiling.chrome_trace import chrome_trace
from cuengine.profiling.recording import RecordedStep, Recorder, Span, now
from cuengine.profiling.report import Section, as_json, render, summarize
from cuengine.profiling.work import NO_WORK, Work

MS = 10**6


def spans(*rows: tuple[str, int, float, float, Work | None]) -> list[Span]:
    """From names, depths, begins and ends in milliseconds, and work."""
    return [
        Span(name, depth, work, round(start * MS), round(end * MS))
        for name, depth, start, end, work in rows
    ]


def a_step(at: float = 0.0) -> RecordedStep:
    """10 ms: 1 to schedule, 8 of forward with 3 + 3 of two layers' products, 0.5 of sampling."""
    product = Work(6_000_000, 3_000_000_000)
    host = spans(
        ("step", 0, 0, 10, None),
        ("schedule", 1, 0, 1, None),
        ("forward", 1, 1, 9, None),
        ("layer 0", 2, 1, 4.5, None),
        ("linear o", 3, 1, 4, product),
        ("layer 1", 2, 4.5, 9, None),
        ("linear o", 3, 5, 8, product),
        ("silu_mul", 3, 8, 9, Work(1_000_000, 0)),
        ("sample", 1, 9.25, 9.75, None),
    )
    for span in host:
        span.start, span.end = span.start + round(at * MS), span.end + round(at * MS)
    return RecordedStep("decode", host)


def section(
    steps: Sequence[RecordedStep],
    before: Sequence[int] = (8 * MS,),
    after: Sequence[int] = (8 * MS,),
) -> Section:
    return summarize("decode", "2 sequences", steps, (before, after))


def test_phases_hold_their_operations_and_what_is_between_and_the_step_has_a_rest() -> None:
    found = section([a_step(), a_step(20)])
    assert (found.num_steps, found.nanoseconds) == (2, 20 * MS)
    forward = found.phases["forward"]
    assert {name: (row.calls, row.nanoseconds) for name, row in forward.operations.items()} == {
        "linear o": (4, 12 * MS),
        "silu_mul": (2, 2 * MS),
    }
    assert forward.operations["linear o"].work == Work(24_000_000, 12_000_000_000)
    assert (forward.nanoseconds, forward.between) == (16 * MS, 2 * MS)
    assert found.phases["sample"].between == 0  # a phase without operations is one whole
    assert found.rest == 1 * MS
    assert found.named_share == pytest.approx(1 - 3 / 20)


def test_the_median_steps_are_told_side_by_side() -> None:
    slow = a_step(20)
    slow.host[0].end += 90 * MS
    found = section([a_step(), slow, a_step(200)], [8 * MS, 100 * MS, 9 * MS], [9 * MS])
    assert (found.profiled, found.unprofiled) == (10.0, 9.0)
    assert "10.00 ms, without profiling 9.00 ms: +11.1 % with it" in render(found)


@pytest.mark.parametrize(("before", "after"), [(11, 11), (8, 11), (11, 8), (10, 10), (8, 10)])
def test_a_cost_below_what_the_rounds_without_profiling_differ_by_is_called_noise(
    before: float, after: float
) -> None:
    """A machine that gets slower, or faster, meanwhile brings no cost below 0."""
    text = render(section([a_step()], [before * MS] * 3, [after * MS] * 5)).splitlines()[-1]
    assert "lost in the noise" in text
    assert f"without profiling {before:.2f} ms before that and {after:.2f} ms after it" in text
    assert not re.search(r"[+-]\d", text)


def test_the_table_shows_calls_milliseconds_shares_and_rates_of_a_step() -> None:
    lines = render(section([a_step(), a_step(20)])).splitlines()
    assert lines[0] == "decode: 2 steps of 2 sequences; 10.00 ms each"
    rows = {line[:26].strip(): line[26:].split() for line in lines[2:12] if line}
    # 12 MB and 6 G operations of a step in 6 ms.
    assert rows["linear o"] == ["2", "6.000", "60.0%", "2", "1"]
    assert rows["silu_mul"] == ["1", "1.000", "10.0%", "1"]
    assert rows["(between operations)"] == ["1.000", "10.0%"]
    assert rows["(rest)"] == ["0.500", "5.0%"]
    assert list(rows)[:5] == ["schedule", "forward", "linear o", "silu_mul", "(between operations)"]
    assert "85.0 % of the time has a name" in lines[-1]
    assert max(map(len, lines[:-1])) <= 80


def on_a_stream() -> RecordedStep:
    """Three operations: of one kernel, of two, and of none."""
    host = spans(("step", 0, 0, 10, None), ("forward", 1, 0, 10, None))
    stream = spans(
        ("linear o", 0, 4, 6, Work(4_000_000_000, 8_000_000_000)),
        ("paged_attention", 0, 6.5, 7.5, Work(1_000_000_000, 0)),
        ("take_rows", 0, 8, 8, NO_WORK),
    )
    stream[0].launches = spans(("cublas gemm", 1, 4, 6, None))
    stream[1].launches = spans(
        ("paged_attention_decode", 1, 6.5, 7.25, None),
        ("paged_attention_reduce", 1, 7.25, 7.5, None),
    )
    return RecordedStep("decode", host, stream)


def test_operations_on_a_stream_have_a_table_of_their_own_with_their_kernels() -> None:
    found = section([on_a_stream()])
    assert (found.stream_time, found.between) == (4 * MS, 1 * MS)
    assert found.named_share == pytest.approx(0.75)  # the stream's, which is less than the host's
    lines = render(found).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("on the device, 4.00 ms from"))
    table = {line[:34].rstrip(): line[34:].split() for line in lines[at + 2 :] if line}
    assert lines[at + 1].split() == ["calls", "ms", "share", "GB/s", "TFLOP/s"]
    assert list(table)[:-1] == [
        "linear o: cublas gemm", "paged_attention", "  paged_attention_decode",
        "  paged_attention_reduce", "take_rows: nothing launched", "(between operations)",
    ]  # fmt: skip
    assert table["linear o: cublas gemm"] == ["1", "2.000", "50.0%", "2000", "4"]
    assert table["paged_attention"] == ["1", "1.000", "25.0%", "1000"]
    assert table["  paged_attention_decode"] == ["1", "0.750", "18.8%"]
    assert max(map(len, lines[:-1])) <= 80


@pytest.mark.parametrize(
    ("operation", "kernel", "shown"),
    [
        ("rms_norm", "rms_norm", "rms_norm"),
        ("sample", "sample_tokens", "sample_tokens"),
        ("paged_attention", "paged_attention_prefill_plain", "paged_attention_prefill_plain"),
        ("swap_in", "swap_blocks", "swap_in: swap_blocks"),
    ],
)
def test_a_kernel_that_is_named_after_its_operation_names_both(
    operation: str, kernel: str, shown: str
) -> None:
    step = on_a_stream()
    step.stream = spans((operation, 0, 4, 6, Work(1, 1)))
    step.stream[0].launches = spans((kernel, 1, 4, 6, None))
    lines = render(section([step])).splitlines()
    assert [line[:34].rstrip() for line in lines if kernel in line] == [shown]
    assert max(map(len, lines[:-1])) <= 80


def test_json_has_totals_from_which_the_rates_follow() -> None:
    found = json.loads(json.dumps(as_json(section([a_step(), a_step(20)]))))
    assert (found["kind"], found["steps"], found["seconds"]) == ("decode", 2, 0.02)
    [forward] = [phase for phase in found["phases"] if phase["name"] == "forward"]
    assert forward["operations"][0] == {
        "name": "linear o", "calls": 4, "seconds": 0.012,
        "bytes": 24_000_000, "operations": 12_000_000_000,
    }  # fmt: skip
    assert (forward["between_operations"], found["rest"]) == (0.002, 0.001)
    assert found["median_step"] == {
        "profiled": 0.01, "unprofiled": 0.008, "unprofiled_before": 0.008,
        "unprofiled_after": 0.008,
    }  # fmt: skip
    assert "device" not in found
    device = as_json(section([on_a_stream()]))["device"]
    assert (device["seconds"], device["between_operations"]) == (0.004, 0.001)
    assert [row["kernels"] for row in device["operations"]] == [
        [{"name": "cublas gemm", "calls": 1, "seconds": 0.002}],
        [
            {"name": "paged_attention_decode", "calls": 1, "seconds": 0.00075},
            {"name": "paged_attention_reduce", "calls": 1, "seconds": 0.00025},
        ],
        [],
    ]


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 step"), (2, "2 steps"), ("1", "1 step"), ("1 to 3", "1 to 3 steps")]
)
def test_things_are_counted_in_english(number: int | str, text: str) -> None:
    assert counted(number, "step") == text


# Traces


def test_a_trace_has_the_steps_with_their_parts_and_the_work_of_operations() -> None:
    trace = chrome_trace([a_step(100), a_step(120)], {"model": "tiny"})
    events = check_trace(trace)
    assert len(events) == 18
    assert events[0] == {
        "ph": "X", "pid": 1, "tid": 1, "name": "decode step", "cat": "range", "ts": 0.0,
        "dur": 10_000.0,
    }  # fmt: skip
    assert events[4] == {
        "ph": "X", "pid": 1, "tid": 1, "name": "linear o", "cat": "operation", "ts": 1000.0,
        "dur": 3000.0, "args": {"bytes": 6_000_000, "operations": 3_000_000_000},
    }  # fmt: skip
    assert trace["otherData"] == {"model": "tiny"}


def test_what_a_stream_does_is_a_row_of_its_own_that_names_kernels() -> None:
    events = check_trace(chrome_trace([on_a_stream()], {}))
    assert [(event["name"], event["tid"], event["cat"]) for event in events] == [
        ("decode step", 1, "range"), ("forward", 1, "range"),
        ("linear o", 2, "operation"), ("cublas gemm", 3, "kernel"),
        ("paged_attention", 2, "operation"), ("paged_attention_decode", 3, "kernel"),
        ("paged_attention_reduce", 3, "kernel"), ("take_rows", 2, "operation"),
    ]  # fmt: skip
    assert events[2]["args"] == {
        "bytes": 4_000_000_000, "operations": 8_000_000_000, "kernels": ["cublas gemm"],
    }  # fmt: skip
    assert events[4]["args"]["kernels"] == ["paged_attention_decode", "paged_attention_reduce"]
    assert (events[5]["ts"], events[5]["dur"]) == (6500.0, 749.999)
    assert "args" not in events[5]
    assert events[7]["args"]["kernels"] == []


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=20), st.integers(0, 10**11))
def test_launches_that_follow_at_once_do_not_overlap_however_times_are_added_up(
    durations: list[int], at: int
) -> None:
    step = on_a_stream()
    (operation,) = step.stream[:] = step.stream[:1]
    operation.start = at
    operation.launches = []
    for duration in durations:
        operation.launches.append(Span("kernel", 1, None, at, at := at + duration))
    operation.end = at
    check_trace(chrome_trace([step], {}))


def test_the_check_of_nesting_finds_an_overlap() -> None:
    step = a_step()
    step.host[1].end += 2 * MS  # schedule ends in the middle of forward
    with pytest.raises(AssertionError):
        check_trace(chrome_trace([step], {}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda trace: trace["traceEvents"].sort(key=lambda event: event.get("dur", -1)),
        lambda trace: trace["traceEvents"][-1].update(dur=float("nan")),
        lambda trace: trace["traceEvents"][-1].update(dur=-1.0),
        lambda trace: trace["traceEvents"][-1].update(ts=0.0001),
        lambda trace: trace["traceEvents"][-1].update(tid=0),
        lambda trace: trace["traceEvents"][-1].update(tid=9),
        lambda trace: trace["traceEvents"][-1].update(name=""),
        lambda trace: trace["traceEvents"][-1].pop("cat"),
        lambda trace: trace["traceEvents"][-1].update(args=["kernel"]),
        lambda trace: trace["traceEvents"].pop(0),
        lambda trace: trace["traceEvents"].pop(1),
        lambda trace: (
            trace["traceEvents"].append(trace["traceEvents"][-1] | {"ts": 10000.1, "dur": 0.2})
            or trace["traceEvents"].append(trace["traceEvents"][-1] | {"ts": 10000.3})
        ),
        lambda trace: trace.update(displayTimeUnit="us"),
    ],
)
def test_the_check_finds_what_a_reader_would_drop(spoil: Callable[[dict[str, Any]], None]) -> None:
    trace = chrome_trace([a_step()], {})
    check_trace(trace)
    spoil(trace)
    with pytest.raises((AssertionError, ValueError)):
        check_trace(trace)


Tree = list[Any]
trees = st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@given(st.lists(trees, min_size=1, max_size=3))
def test_whatever_is_recorded_adds_up_and_nests(steps: list[Tree]) -> None:
    recorder = Recorder()

    def record(tree: Tree, depth: int) -> None:
        if not tree and depth > 1:
            recorder.operation(lambda: ("operation", Work(1, 1)), ((), {}), now(), now())
            return
        with recorder.range(f"range {depth}"):
            for part in tree:
                record(part, depth + 1)

    recorded = []
    for tree in steps:
        record(tree, 0)
        recorded.append(RecordedStep("decode", recorder.take()))
    check_trace(chrome_trace(recorded, {}))
    found = section(recorded)
    parts = [found.rest]
    for phase in found.phases.values():
        inner = [row.nanoseconds for row in phase.operations.values()]
        assert not inner or sum(inner) + phase.between == phase.nanoseconds
        parts.append(phase.nanoseconds)
    assert min(parts) >= 0
    assert sum(parts) == found.nanoseconds == sum(step.host[0].duration for step in recorded)
