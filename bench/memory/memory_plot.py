"""The figures of kv_memory.py as a picture. matplotlib is in the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

USES = {
    "tokens": ("tokens", "#2f6b9a"),
    "reservation": ("reserved for tokens to come", "#8fb8d6"),
    "internal": ("reserved, never used", "#e3a857"),
    "external": ("free, or lost between reservations", "#d9d9d9"),
}
"""Label and colour of each use of memory."""

METHODS = {"parallel": ("parallel samples", "#2f6b9a"), "beam": ("beams", "#e3a857")}
"""The same of each method of sharing."""


def draw(
    uses: Sequence[Mapping[str, Any]],
    sharing: Sequence[Mapping[str, Any]],
    paper: Mapping[str, tuple[float, float]],
    path: Path,
) -> None:
    """Write a picture in the format of the path's suffix: memory by use, and blocks saved.

    uses     rows with `memory`, the four uses in percent, and `paper`, tokens in percent or None
    sharing  rows with `method`, `size` and `saved` in percent
    paper    lowest and highest percentage saved, by method
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same figures give the same file; text stays text.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kv_memory", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=(3, 2), layout="constrained"
    )
    names = [row["memory"] for row in uses]
    starts = [0.0] * len(uses)
    for use, (label, color) in USES.items():
        widths = [row[use] for row in uses]
        left.barh(names, widths, left=starts, color=color, label=label)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    known = [row for row in uses if row["paper"] is not None]
    left.plot(
        [row["paper"] for row in known],
        [row["memory"] for row in known],
        "kD",
        markersize=4,
        label="tokens, in the paper",
    )
    left.invert_yaxis()
    left.set(xlim=(0, 100), xlabel="% of KV memory under load")

    place = 0
    ticks: dict[int, str] = {}
    for method, (_, color) in METHODS.items():
        rows = [row for row in sharing if row["method"] == method]
        if not rows:
            continue
        places = range(place, place + len(rows))
        right.bar(places, [row["saved"] for row in rows], color=color)
        right.fill_between(
            (place - 0.5, place + len(rows) - 0.5),
            *paper[method],
            facecolor="none",
            edgecolor="black",
            hatch="////",
            linewidth=0,
            zorder=0,
            label=None if place else "the paper, 2 to 6",
        )
        for at, row in zip(places, rows, strict=True):
            middle = at == places[len(rows) // 2]
            ticks[at] = f"{row['size']}\n{METHODS[method][0]}" if middle else str(row["size"])
        place += len(rows) + 1
    right.set_xticks(list(ticks), list(ticks.values()))
    right.set(ylabel="% of blocks saved by sharing", ylim=(0, 100))
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
