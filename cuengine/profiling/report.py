"""Tables of what was recorded: by phase of the step and by operation, as text and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cuengine.counted import counted
from cuengine.profiling.recording import RecordedStep, Span
from cuengine.profiling.work import NO_WORK, Work

BETWEEN = "(between operations)"
REST = "(rest)"
"""Of a phase with operations, and of the step: time that belongs to nothing that has a name."""


@dataclass(slots=True)
class Row:
    """Everything of one name, over all steps.

    nanoseconds  in all
    kernels      of an operation on a GPU's stream: what it launched, with the time of each
    """

    name: str
    calls: int = 0
    nanoseconds: int = 0
    work: Work = NO_WORK
    kernels: dict[str, Row] = field(default_factory=dict)

    def add(self, span: Span) -> None:
        self.calls += 1
        self.nanoseconds += span.duration
        if span.work is not None:
            self.work += span.work
        for launch in span.launches:
            self.kernels.setdefault(launch.name, Row(launch.name)).add(launch)


@dataclass(slots=True)
class Phase(Row):
    """A part of the host's work on a step, with the operations in it."""

    operations: dict[str, Row] = field(default_factory=dict)

    @property
    def between(self) -> int:
        """Nanoseconds outside its operations; 0 where it has none and is one whole."""
        if not self.operations:
            return 0
        return self.nanoseconds - sum(row.nanoseconds for row in self.operations.values())


@dataclass(slots=True, kw_only=True)
class Section:
    """Steps of one kind.

    sizes        what a step held, in words
    nanoseconds  of the host, over all steps
    phases       of the host
    stream       operations on a GPU's stream; then the phases have none
    stream_time  nanoseconds from the first operation's begin to the last one's end, over all steps
    profiled     milliseconds: the median step that was timed
    unprofiled   milliseconds: the median step that was not
    before, after  the same of those that ran before the profiled ones, and of those after them
    """

    kind: str
    sizes: str
    num_steps: int
    nanoseconds: int
    phases: dict[str, Phase]
    stream: dict[str, Row]
    stream_time: int
    profiled: float
    unprofiled: float
    before: float
    after: float

    @property
    def rest(self) -> int:
        """Nanoseconds of the steps in none of their phases."""
        return self.nanoseconds - sum(phase.nanoseconds for phase in self.phases.values())

    @property
    def between(self) -> int:
        """Nanoseconds of the stream in none of its operations."""
        return self.stream_time - sum(row.nanoseconds for row in self.stream.values())

    @property
    def named_share(self) -> float:
        """Part of the steps' time that has a name, 0 to 1; of host and stream the lesser."""
        nameless = self.rest + sum(phase.between for phase in self.phases.values())
        share = 1 - nameless / self.nanoseconds
        return min(share, 1 - self.between / self.stream_time) if self.stream_time else share


def summarize(
    kind: str, sizes: str, steps: Sequence[RecordedStep], unprofiled: Sequence[Sequence[int]]
) -> Section:
    """unprofiled: nanoseconds of the steps of this kind that were run without profiling, first
    those before the profiled ones, then those after them."""
    before, after = unprofiled
    section = Section(
        kind=kind,
        sizes=sizes,
        num_steps=len(steps),
        nanoseconds=sum(step.host[0].duration for step in steps),
        phases={},
        stream={},
        stream_time=sum(s.stream[-1].end - s.stream[0].start for s in steps if s.stream),
        profiled=median(step.host[0].duration for step in steps) / 1e6,
        unprofiled=median([*before, *after]) / 1e6,
        before=median(before) / 1e6,
        after=median(after) / 1e6,
    )
    for step in steps:
        for phase, span in _by_phase(step.host):
            if phase is span:
                section.phases.setdefault(span.name, Phase(span.name)).add(span)
            elif span.work is not None:
                operations = section.phases[phase.name].operations
                operations.setdefault(span.name, Row(span.name)).add(span)
        for span in step.stream:
            section.stream.setdefault(span.name, Row(span.name)).add(span)
    return section


def _by_phase(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Every span below the step with the phase that it is, or is in."""
    phase = spans[0]
    for span in spans[1:]:
        if span.depth == 1:
            phase = span
        yield phase, span


# Text

_HOST_WIDTH, _STREAM_WIDTH = 26, 34
"""Of the column of names: the longest are operations within a phase, and kernels."""


def render(section: Section) -> str:
    """The section as a table of a terminal's width. Calls and milliseconds are of one step."""
    steps = section.num_steps
    mean = section.nanoseconds / steps / 1e6
    lines = [
        f"{section.kind}: {counted(steps, 'step')} of {section.sizes}; {mean:.2f} ms each",
        *_table(_HOST_WIDTH, _host_rows(section), section.nanoseconds, steps),
    ]
    if section.stream:
        of_step = section.stream_time / steps / 1e6
        lines += [
            "",
            f"on the device, {of_step:.2f} ms from the first operation to the last:",
            *_table(_STREAM_WIDTH, _stream_rows(section), section.stream_time, steps),
        ]
    named = f"{100 * section.named_share:.1f} % of the time has a name."
    return "\n".join([*lines, "", f"{named} {_cost(section)}"])


def _cost(section: Section) -> str:
    """What profiling added, where that is more than the rounds without it differ by."""
    profiled, unprofiled = section.profiled, section.unprofiled
    took = f"The median step took {profiled:.2f} ms, without profiling"
    if profiled > max(section.before, section.after, unprofiled):
        return f"{took} {unprofiled:.2f} ms: {100 * (profiled / unprofiled - 1):+.1f} % with it"
    return (
        f"{took} {section.before:.2f} ms before that and {section.after:.2f} ms after it: "
        "what profiling adds is lost in the noise"
    )


_NamedRows = Iterator[tuple[str, Row]]


def _host_rows(section: Section) -> _NamedRows:
    for phase in section.phases.values():
        yield phase.name, phase
        for row in _longest_first(phase.operations):
            yield f"  {row.name}", row
        if phase.operations:
            yield f"  {BETWEEN}", Row(BETWEEN, 0, phase.between)
    yield REST, Row(REST, 0, section.rest)


def _stream_rows(section: Section) -> _NamedRows:
    """Operations, each with the name of its kernel, or with a row for each where it has several."""
    for row in _longest_first(section.stream):
        yield _with_kernel(row), row
        if len(row.kernels) > 1:
            for kernel in _longest_first(row.kernels):
                yield f"  {kernel.name}", kernel
    yield BETWEEN, Row(BETWEEN, 0, section.between)


def _with_kernel(row: Row) -> str:
    """The operation's name and its kernel's, or the latter alone where it begins with the former.

    None is launched where there is nothing to do, as for `take_rows` in a step that needs all rows.
    """
    match list(row.kernels):
        case []:
            return f"{row.name}: nothing launched"
        case [kernel]:
            return kernel if kernel.startswith(row.name) else f"{row.name}: {kernel}"
        case _:
            return row.name


def _table(width: int, rows: _NamedRows, whole: int, steps: int) -> Iterator[str]:
    yield f"{'':<{width}}{'calls':>7}{'ms':>10}{'share':>8}{'GB/s':>9}{'TFLOP/s':>10}"
    for name, row in rows:
        yield f"{name:<{width}}{_cells(row, whole, steps)}"


def _longest_first(rows: dict[str, Row]) -> list[Row]:
    return sorted(rows.values(), key=lambda row: -row.nanoseconds)


def _cells(row: Row, whole: int, steps: int) -> str:
    calls = f"{row.calls / steps:.3g}" if row.calls else ""
    cells = f"{calls:>7}{row.nanoseconds / steps / 1e6:>10.3f}"
    cells += f"{100 * row.nanoseconds / whole:>7.1f}%"
    moved, computed = row.work.num_bytes, row.work.operations
    cells += f"{_rate(moved, row.nanoseconds):>9}" if moved else ""
    cells += f"{_rate(computed / 1e3, row.nanoseconds):>10}" if computed else ""
    return cells


def _rate(amount: float, nanoseconds: int) -> str:
    """Amount a nanosecond, with three digits: bytes come out as GB/s, thousands as tera."""
    if nanoseconds == 0:
        return ""
    rate = amount / nanoseconds
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


# JSON


def as_json(section: Section) -> dict[str, Any]:
    """Seconds, bytes and operations are totals over `steps`."""
    phases = []
    for phase in section.phases.values():
        facts = _facts(phase)
        if phase.operations:
            facts["operations"] = [_facts(row) for row in phase.operations.values()]
            facts["between_operations"] = phase.between / 1e9
        phases.append(facts)
    found = {
        "kind": section.kind,
        "sizes": section.sizes,
        "steps": section.num_steps,
        "seconds": section.nanoseconds / 1e9,
        "phases": phases,
        "rest": section.rest / 1e9,
        "named_share": section.named_share,
        "median_step": {
            "profiled": section.profiled / 1e3,
            "unprofiled": section.unprofiled / 1e3,
            "unprofiled_before": section.before / 1e3,
            "unprofiled_after": section.after / 1e3,
        },
    }
    if section.stream:
        found["device"] = {
            "seconds": section.stream_time / 1e9,
            "operations": [
                {**_facts(row), "kernels": [_facts(kernel) for kernel in row.kernels.values()]}
                for row in section.stream.values()
            ],
            "between_operations": section.between / 1e9,
        }
    return found


def _facts(row: Row) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": row.name,
        "calls": row.calls,
        "seconds": row.nanoseconds / 1e9,
    }
    if row.work != NO_WORK:
        facts |= {"bytes": row.work.num_bytes, "operations": row.work.operations}
    return facts
