"""Kernels on disk that are damaged, cannot be kept or cannot be found, and Numba's own variables:
the CPU's kernels work all the same, or there is one line that says what to change."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuengine.device import cpu, numba_environment
from cuengine.errors import ConfigError
from cuengine.paths import PREBUILT_VARIABLE

pytest.importorskip("numba", reason="needs Numba")

from cuengine.device import cpu_target, numba_setup


def forget() -> None:
    """As in another process, which looks for folders anew."""
    for remembered in (
        numba_setup._built_ahead,
        numba_setup._own_folder,
        numba_setup._note_not_kept,
    ):
        remembered.cache_clear()
    numba_setup.not_kept.clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache; nothing is remembered of other places, before and after."""
    forget()
    monkeypatch.setattr(numba_setup.config, "CACHE_DIR", "")
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(PREBUILT_VARIABLE, raising=False)
    yield tmp_path / "cache"
    forget()


def kernel() -> Any:
    """Compiled, or loaded; it works."""

    @numba_setup.njit("float32(float32)", cache=True)
    def double(x: Any) -> Any:
        return x + x

    assert double(21.0) == 42
    return double


def loaded(made: Any) -> bool:
    return sum(made.stats.cache_hits.values()) == 1


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.nb[ci]")}


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def zeros(content: bytes) -> bytes:
    return bytes(len(content))


def other_pickle(content: bytes) -> bytes:
    return b"\x80\x04N."


DAMAGES = [truncated, zeros, other_pickle, lambda content: b"", lambda content: b"no pickle"]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_kernel_is_compiled_anew_and_kept(
    cache: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not loaded(kernel())
    whole = files(cache)
    assert len(whole) == 2
    for damage in DAMAGES:
        (path,) = cache.rglob(f"*.{suffix}")
        path.write_bytes(damage(path.read_bytes()))
        caplog.clear()
        assert not loaded(kernel())
        assert loaded(kernel())
        assert files(cache).keys() == whole.keys()
        assert len(caplog.records) <= 1
    assert numba_setup.not_kept == []


def test_a_damaged_kernel_that_was_built_ahead_is_left_alone_and_the_user_s_is_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel()
    built = cache.parent / "built"
    (cache / "numba").rename(built)
    for path in built.rglob("*.nbc"):
        path.write_bytes(b"no pickle")
    before = files(built)
    monkeypatch.setenv(PREBUILT_VARIABLE, str(built))
    forget()
    assert not loaded(kernel())
    assert "damaged, and compiled anew" in caplog.text
    assert loaded(kernel())
    assert files(built) == before
    assert len(files(cache)) == 2


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_on_a_full_disk_kernels_are_compiled_once_and_said_not_to_be_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", no_space)
    compiled = []
    compile_all = numba_setup.numba.core.compiler.compile_extra
    monkeypatch.setattr(
        "numba.core.compiler.compile_extra",
        lambda *args, **kwargs: compiled.append(1) or compile_all(*args, **kwargs),
    )
    assert not loaded(kernel())
    assert len(compiled) == 1
    kernel()
    assert "at each start, as they cannot be kept: " in caplog.text
    assert len(caplog.records) == 1
    (why,) = numba_setup.not_kept
    assert why.startswith(str(cache))
    assert why.endswith("No space left on device")


def test_kernels_that_are_there_are_used_where_nothing_can_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel()
    forget()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert loaded(kernel())
    assert numba_setup.not_kept == []


def is_file(cache: Path) -> Path:
    cache.write_text("")
    return cache


def is_missing(cache: Path) -> Path:
    return cache / "none"


def is_empty(cache: Path) -> Path:
    cache.mkdir()
    return cache


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (is_file, "Not a directory"),
        (is_missing, "No such file"),
        (is_empty, "has none for this CPU"),
    ],
)
def test_where_nothing_was_built_ahead_kernels_are_compiled_and_it_is_said(
    cache: Path,
    place: Callable[[Path], Path],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "cuengine")
    folder = place(cache.parent / "built")
    monkeypatch.setenv(PREBUILT_VARIABLE, str(folder))
    assert not loaded(kernel())
    assert loaded(kernel())
    assert f"{PREBUILT_VARIABLE}={folder}" in caplog.text
    assert says in caplog.text


def test_without_a_home_kernels_are_compiled_and_it_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUENGINE_CACHE", "~no_such_user_here/cache")
    kernel()
    assert "set CUENGINE_CACHE" in caplog.text


# Variables


@pytest.mark.parametrize(
    ("name", "added", "says"),
    [
        ("nonsense", None, "NUMBA_CPU_NAME=nonsense: LLVM knows no CPU of that name"),
        ("X86-64-V3", "", "NUMBA_CPU_NAME=X86-64-V3: LLVM knows no CPU of that name"),
        (None, "+avx2,+nonsense", "LLVM knows no feature nonsense"),
        (None, "avx2", "NUMBA_CPU_FEATURES=avx2: is not a list as "),
        (None, "+avx2, +fma", "is not a list as "),  # LLVM ends the process at the space
        (None, "+", "is not a list as "),
        (None, ",", "is not a list as "),
    ],
)
def test_what_llvm_does_not_know_is_refused(
    name: str | None, added: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", added)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refused:
        cpu_target.features()
    assert says in str(refused.value)


@pytest.mark.parametrize("given", ["0", "-1", "abc", "", "1.5", "100000"])
def test_a_number_of_threads_that_is_none_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_NUM_THREADS", given)
    with pytest.raises(ConfigError, match=f"NUMBA_NUM_THREADS={given}: is not a whole number"):
        cpu._numba_operations()


@pytest.mark.parametrize(("given", "kernels"), [("1", "NumPy"), ("0", "Numba"), ("x", "Numba")])
def test_where_numba_is_to_compile_nothing_kernels_are_numpy_s(
    given: str, kernels: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", given)
    monkeypatch.setattr(cpu, "_numba_operations", lambda: None)
    assert cpu.CpuDevice().kernels == kernels
    assert ("NUMBA_DISABLE_JIT is set" in caplog.text) == (kernels == "NumPy")


def test_variables_with_which_numba_fails_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("Unknown value specified for threading layer: fast")

    monkeypatch.setattr(numba_setup, "start_threads", fail)
    monkeypatch.setenv("NUMBA_THREADING_LAYER", "fast")
    with pytest.raises(ConfigError, match=r"Numba does not work with NUMBA_\S+=.*: Unknown value"):
        cpu._numba_operations()


def test_a_failure_without_any_variable_is_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NUMBA_")]:
        monkeypatch.delenv(name)
    assert numba_environment.refused(ValueError("x")) is None
