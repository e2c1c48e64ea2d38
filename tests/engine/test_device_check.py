"""bench/device_check.py: all its parts on the emulated device; and that it sees what is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPT = BENCH / "device_check.py"


def load(path: Path) -> ModuleType:
    """A script of bench/, with what it puts before sys.path for its own modules."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


@pytest.fixture
def device_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load(SCRIPT)
    monkeypatch.syspath_prepend(str(BENCH.parent / "tests" / "kernels"))
    monkeypatch.syspath_prepend(str(BENCH / "device"))
    return module


@pytest.mark.usefixtures("emulator")
def test_a_dry_run_walks_every_part_and_finds_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path), "--seed", "7"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "device_check.json").read_text())
    assert (found["seed"], found["dry_run"]) == (7, True)
    names = {part["part"]: " ".join(row["name"] for row in part["rows"]) for part in found["parts"]}
    for part, words in {
        "kernels": ("add_rms_norm", "swap_blocks", "rotary_cache", "attention, mixed", "gather"),
        "rates": ("copy bandwidth", "matrix rate", "decode attention", "blocks in order", "sample"),
        "decode": ("graph", "eager"),
        "throughput": ("cuengine",),
        "golden": ("whole", "greedy, float32, graphs"),
    }.items():
        assert not [word for word in words if word not in names[part]], part
    assert not [row for part in found["parts"] for row in part["rows"] if row["ok"] is False]


def test_a_part_that_hangs_or_dies_is_a_row_and_the_others_go_on(
    device_check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [device_check.start_part("golden", 1, dry=True, limit=0.01)]
    # The child does not know this name, and ends with an error.
    results.append(device_check.start_part("unheard of", 1, dry=True, limit=60))
    assert results[0]["rows"][-1]["note"] == "stopped after 0.01 s"
    assert results[1]["rows"][-1]["note"] == "ended with status 2"
    capsys.readouterr()
    assert device_check.print_table(results, 1.0) == 2
    assert "2 rows, 2 not as they should be" in capsys.readouterr().out


def test_an_exception_is_a_row_and_what_follows_goes_on(
    device_check: ModuleType, tmp_path: Path
) -> None:
    report = device_check.Report("rates", tmp_path / "part.json")
    with report.trying("a kernel"):
        raise RuntimeError("an illegal memory access\nwas encountered")
    report.measure("a rate", 79.0, "%", at_least=80)
    report.measure("an error", 0.5, "off", at_most=1)
    report.measure("a fact", 3.0, "s")
    rows = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [False, False, True, None]
    assert rows[0]["note"] == "RuntimeError: an illegal memory access"


@pytest.mark.parametrize(
    ("actual", "fine"),
    [([1.0, 2.0], True), ([1.0, 2.2], False), ([1.0, np.nan], False), ([1.0, np.inf], False)],
)
def test_a_result_out_of_bounds_or_not_a_number_is_wrong(
    device_check: ModuleType, tmp_path: Path, actual: list[float], fine: bool
) -> None:
    import check_kernels  # type: ignore[import-not-found]

    check: Any = object.__new__(check_kernels._Check)
    check.report = device_check.Report("kernels", tmp_path / "part.json")
    check.dtype = "float32"
    check.close("kernel", np.array(actual), np.array([1.0, 2.0]), np.array([0.1, 0.1]))
    row = check.report.rows[-1]
    assert row.ok is fine
    assert np.isfinite(row.value)


@pytest.mark.usefixtures("device_check")
def test_random_weights_follow_from_seed_and_name_alone() -> None:
    from random_model import Pool  # type: ignore[import-not-found]

    pool, other = Pool(1), Pool(2)
    weight = pool.tensor("a.weight", (3, 5))
    assert np.array_equal(weight, Pool(1).tensor("a.weight", (3, 5)))
    assert not np.array_equal(weight, pool.tensor("b.weight", (3, 5)))
    assert not np.array_equal(weight, other.tensor("a.weight", (3, 5)))
    # Longer than the pool: it begins again.
    long = pool.tensor("a.weight", (2**12 + 1, 2**12))
    values = (long.astype(np.uint32) << 16).view(np.float32)
    assert 0.019 < values.std() < 0.021
    assert set(pool.tensor("norm.weight", (4,)).tolist()) == {0x3F80}


@pytest.mark.usefixtures("device_check")
@pytest.mark.parametrize("count", [1, 2, 5, 8, 32])
def test_batches_are_picked_from_the_middle_outwards_each_once(count: int) -> None:
    from static_batches import spread  # type: ignore[import-not-found]

    order = spread(count)
    assert sorted(order) == list(range(count))
    if count == 8:
        assert order == [4, 0, 6, 2, 5, 1, 7, 3]
