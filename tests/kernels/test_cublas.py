"""The cuBLAS binding against a stand-in library that multiplies on the host, and the search for
the library. The stand-in (cublas_stub.c) is written from NVIDIA's manual and knows nothing of ours.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cuengine.device.cuda import cublas
from cuengine.device.cuda.cublas import MAJORS, Cublas, CublasError, find_cublas

STREAM, WORKSPACE, WORKSPACE_BYTES = 0x5EA0, 0xC0FFEE00, 1 << 20
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

ROUNDING = {"float32": 2**-20, "float16": 2**-10, "bfloat16": 2**-7}
"""Of sums of up to 40 products in float32, and then of the result."""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = tmp_path_factory.mktemp("cublas") / "libcublas_stub.so"
    source = Path(__file__).with_name("cublas_stub.c")
    subprocess.run(
        ["gcc", "-std=c11", "-O1", "-Wall", "-shared", "-fPIC", "-o", library, source, "-lm"],
        check=True,
    )  # fmt: skip
    return library


class Calls:
    """What the stand-in was asked for since this was made."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.stub_log.restype = ctypes.c_char_p
        self.start = len(self.library.stub_log())

    def lines(self) -> list[str]:
        log: bytes = self.library.stub_log()
        return log[self.start :].decode().splitlines()


@pytest.fixture
def handle(stub: Path) -> Iterator[Cublas]:
    found = Cublas(stub)
    found.use(STREAM, WORKSPACE, WORKSPACE_BYTES)
    yield found
    found.close()


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 8, 24), (3, 40, 16), (17, 5, 7)])
def test_linear_is_x_times_the_transpose_of_weight(
    handle: Cublas, tokens: int, inputs: int, outputs: int, dtype: str, out_dtype: str,
    accumulate: bool,
) -> None:  # fmt: skip
    random = np.random.default_rng(tokens)
    x = random.standard_normal((tokens, inputs)).astype(DTYPES[dtype])
    weight = random.standard_normal((outputs, inputs)).astype(DTYPES[dtype])
    # A row more than the product has: it must stay.
    y = random.standard_normal((tokens + 1, outputs)).astype(DTYPES[out_dtype])
    before = y.astype(np.float64)
    if not accumulate:
        y[:tokens] = np.nan
    handle.linear(
        address(y), address(x), address(weight),
        num_tokens=tokens, in_features=inputs, out_features=outputs,
        dtype=dtype, out_dtype=out_dtype, accumulate=accumulate,
    )  # fmt: skip
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    if accumulate:
        expected += before[:tokens]
    tolerance = ROUNDING[out_dtype] * max(1.0, np.abs(expected).max())
    assert np.abs(y[:tokens].astype(np.float64) - expected).max() <= tolerance
    assert np.array_equal(y[tokens].astype(np.float64), before[tokens])


def test_the_stream_is_set_once_and_the_workspace_after_it(stub: Path) -> None:
    calls = Calls(stub)
    handle = Cublas(stub)
    handle.use(STREAM, WORKSPACE, WORKSPACE_BYTES)
    x = y = np.ones((1, 1), np.float32)
    for _ in range(3):
        handle.linear(
            address(y), address(x), address(x), num_tokens=1, in_features=1, out_features=1,
            dtype="float32", out_dtype="float32",
        )  # fmt: skip
    handle.close()
    lines = calls.lines()
    # 16: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION alone, so no TF32 (3, or 3 with flags).
    setup = ["create", "math mode 16", f"stream {STREAM:x}"]
    assert lines[:4] == [*setup, f"workspace {WORKSPACE:x} {WORKSPACE_BYTES}"]
    assert [line.split()[0] for line in lines[4:]] == ["gemm"] * 3 + ["destroy"]


def test_a_handle_is_freed_once(stub: Path) -> None:
    handle, calls = Cublas(stub), Calls(stub)
    handle.close()
    handle.close()
    assert calls.lines() == ["destroy"]


def test_a_refused_product_says_which_and_why(handle: Cublas) -> None:
    Calls(Path(handle.library)).library.stub_fail(15)
    x = np.ones((2, 3), np.float32)
    with pytest.raises(CublasError, match=r"x \[2, 3\].*weight \[5, 3\].*NOT_SUPPORTED.*status 15"):
        handle.linear(
            address(x), address(x), address(x), num_tokens=2, in_features=3, out_features=5,
            dtype="float32", out_dtype="float32",
        )  # fmt: skip


def test_a_status_that_nobody_knows_is_given_by_number() -> None:
    assert "status 4242" in cublas.describe(4242)


def test_the_version_is_the_library_s(handle: Cublas) -> None:
    assert handle.version == "12.9.1"


@pytest.mark.parametrize("major", MAJORS)
def test_a_missing_library_is_an_error_that_says_what_to_install(
    major: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setattr(cublas.ctypes, "CDLL", missing)
    with pytest.raises(CublasError, match=rf"pip install '\.\[cuda{major}\]'"):
        find_cublas(major)


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libcublas.so.12"
    path.write_text("not one")
    with pytest.raises(CublasError, match=str(path)):
        Cublas(path)


@pytest.mark.parametrize(
    ("major", "place"), [(12, "cublas/lib/libcublas.so.12"), (13, "cu13/lib/libcublas.so.13")]
)
def test_the_wheel_of_the_major_version_is_found(
    major: int, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "nvidia" / place
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    assert find_cublas(major) == library


def test_a_library_that_is_loaded_already_comes_first(stub: Path, tmp_path: Path) -> None:
    # In a process of its own: a loaded library stays.
    folder = tmp_path / "a folder"
    wheel = tmp_path / "nvidia" / "cublas" / "lib"
    for place in (folder, wheel):
        place.mkdir(parents=True)
        shutil.copy(stub, place / "libcublas.so.12")
    script = (
        "import ctypes, sys; from cuengine.device.cuda.cublas import find_cublas\n"
        f"sys.path.insert(0, {str(tmp_path)!r}); print(find_cublas(12))\n"
        f"ctypes.CDLL({str(folder / 'libcublas.so.12')!r}); print(find_cublas(12))"
    )
    command = [sys.executable, "-P", "-c", script]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == [str(wheel / "libcublas.so.12"), str(folder / "libcublas.so.12")]
