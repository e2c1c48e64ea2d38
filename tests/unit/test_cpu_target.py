"""Kernels for a named CPU: what they may use, where they are kept, and who uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuengine.device import cpu_kernels
from cuengine.errors import ConfigError, CuengineError
from cuengine.paths import PREBUILT_VARIABLE

cpu_target = pytest.importorskip("cuengine.device.cpu_target", reason="needs Numba")

ROOT = Path(__file__).resolve().parents[2]
V3 = (
    *("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
    *("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
)
V4 = (*V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

KERNEL = """
import json, sys
from cuengine.device import numba_setup

@numba_setup.njit("float32(float32)", cache=True)
def double(x):
    return x + x

loaded = sum(double.stats.cache_hits.values())
print(json.dumps({"loaded": loaded, "folder": double.stats.cache_path, "result": double(21.0)}))
"""


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> Any:
    """features(host, name, added): what kernels may use; None: the variable is not set."""

    def ask(host: tuple[str, ...], name: str | None, added: str | None) -> frozenset[str]:
        present = dict.fromkeys((*host, "sha"), True) | {"amx-tile": False}
        monkeypatch.setattr(cpu_target.binding, "get_host_cpu_features", lambda: present)
        for variable, value in (("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", added)):
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        return cpu_target.features()

    return ask


@pytest.mark.parametrize(
    ("host", "name", "added", "expected"),
    [
        (V4, None, None, {*V4, "sha"}),
        (V4, "x86-64-v3", "", set(V3)),
        (V4, "x86-64-v4", "", set(V4)),
        (V4, "x86-64-v3", None, {*V4, "sha"}),  # as Numba has it: the host's are added
        (V4, "x86-64-v3", "+avx512f,-fma", {*V3, "avx512f"} - {"fma"}),
        (V4, "generic", None, set()),
        (V3, "znver3", "+avx2,+fma", {"avx2", "fma"}),
    ],
)
def test_instructions_are_those_of_the_named_cpu_and_the_host_s_only_where_numba_adds_them(
    features: Any, host: tuple[str, ...], name: str, added: str, expected: set[str]
) -> None:
    assert features(host, name, added) == expected


def test_a_cpu_that_is_too_old_for_the_named_one_is_told_what_it_lacks(features: Any) -> None:
    with pytest.raises(ConfigError, match=r"NUMBA_CPU_NAME=x86-64-v4: .* avx512bw, avx512cd"):
        features(V3, "x86-64-v4", "")


def test_no_kernel_asks_for_the_host_s_instructions_past_the_named_cpu() -> None:
    asking = {
        path.name
        for path in (ROOT / "cuengine").rglob("*.py")
        if "get_host_cpu_features" in path.read_text(encoding="utf-8")
    }
    assert asking == {"cpu_target.py"}


def compile_one(script: Path, cache: Path, **environment: str) -> dict[str, Any]:
    ours = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_CACHE_DIR", PREBUILT_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=kept | {"CUENGINE_CACHE": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["result"] == 42
    return found


def test_kernels_built_ahead_are_read_by_who_has_the_same_cpu_named_and_never_written(
    tmp_path: Path,
) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    built, cache = tmp_path / "built", tmp_path / "cache"
    named = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""}
    compile_one(script, cache, NUMBA_CACHE_DIR=str(built), **named)
    before = {path: path.stat().st_mtime_ns for path in [built, *built.rglob("*")]}
    assert not cache.exists()

    ahead = {PREBUILT_VARIABLE: str(built)}
    used = compile_one(script, cache, **ahead, **named)
    assert used["loaded"] == 1
    assert Path(used["folder"]).parent == built
    assert not cache.exists()

    # Another CPU finds none that it could use, and leaves that folder alone.
    other = compile_one(script, cache, **ahead, NUMBA_CPU_NAME="generic")
    assert other["loaded"] == 0
    assert Path(other["folder"]).parent == cache / "numba"
    assert {path: path.stat().st_mtime_ns for path in [built, *built.rglob("*")]} == before


def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    (tmp_path / "file").touch()
    found = compile_one(script, tmp_path / "file" / "cache")
    assert found["folder"] is None
    assert not list(tmp_path.rglob("*.nbi"))


FAKE = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["NUMBA_CACHE_DIR"], "cpu-1")
folder.mkdir()
(folder / "kernel.nbc").touch()
if {failing}:
    sys.exit("no space")
print("x86-64-v3")
"""


def test_kernels_built_ahead_appear_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_kernels, "_COMPILE", FAKE.format(failing=True))
    with pytest.raises(CuengineError, match="could not be compiled: no space"):
        cpu_kernels.compile_cpu_kernels(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []

    monkeypatch.setattr(cpu_kernels, "_COMPILE", FAKE.format(failing=False))
    for _ in range(2):
        assert cpu_kernels.compile_cpu_kernels(tmp_path / "out") == "x86-64-v3"
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["cpu-1"]
    assert (tmp_path / "out" / "cpu-1" / "kernel.nbc").exists()
