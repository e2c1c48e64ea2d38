"""What a part of the device check found: rows, printed as they come and kept in a JSON file.

A part that dies leaves the rows that it had.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One finding.

    value   in `unit`; None where there is nothing to measure
    wanted  what the value should come to, in words; "" where nothing is asked of it
    ok      whether it does, or a check came out right; None: nothing was asked
    """

    name: str
    value: float | None = None
    unit: str = ""
    wanted: str = ""
    ok: bool | None = None
    note: str = ""


class Report:
    """The rows of one part, and facts about the machine."""

    def __init__(self, part: str, path: Path) -> None:
        self.part = part
        self._path = path
        self._started = time.perf_counter()
        self.rows: list[Row] = []
        self.facts: dict[str, str] = {}
        self.save()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {format_row(row)}", flush=True)
        self.save()

    def measure(
        self, name: str, value: float, unit: str, *, at_least: float | None = None,
        at_most: float | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """A figure, held to a limit where one is given."""
        wanted, ok = "", None
        if at_least is not None:
            wanted, ok = f"at least {at_least:g}", value >= at_least
        if at_most is not None:
            wanted, ok = f"at most {at_most:g}", value <= at_most
        self.add(Row(name, value, unit, wanted, ok, note))

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """An exception becomes a row, and what follows goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines()
            message = f"{type(error).__name__}: {text[0] if text else ''}"
            self.add(Row(name, ok=False, note=message[:300]))

    def save(self) -> None:
        content = {
            "part": self.part,
            "seconds": round(time.perf_counter() - self._started, 1),
            "facts": self.facts,
            "rows": [asdict(row) for row in self.rows],
        }
        self._path.write_text(json.dumps(content, indent=1))


def format_row(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:,.4g} {row.unit}"
    mark = {True: "ok", False: "NO", None: ""}[row.ok]
    return f"{row.name:<58} {value:>18}  {mark:<2}  {row.wanted:<14} {row.note}".rstrip()
