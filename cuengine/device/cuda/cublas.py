"""cuBLAS, NVIDIA's matrix products: a ctypes binding of the few calls we need.

CuPy's own sets the stream before each product and refuses while a graph is captured. Here a handle
keeps the stream and the workspace it was given, so that a product is one call, eager and captured
alike. Which weights are multiplied with what is the device's business (device.py).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cuengine.errors import CuengineError
from cuengine.extras import how_to_install

WORKSPACE_BYTES = 32 * 2**20
"""What NVIDIA advises for Hopper and Blackwell; 4 MiB would do before (cuBLAS manual, 2.1.8)."""

MAJORS = (12, 13)
_LIBRARIES = {12: "cublas/lib/libcublas.so.12", 13: "cu13/lib/libcublas.so.13"}

# Values of the enumerations in cublas_api.h and library_types.h, the same in CUDA 12 and 13.
_OP_N, _OP_T = 0, 1
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_32F = 68
_GEMM_DEFAULT = -1
_DEFAULT_MATH = 0
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_LIBRARY_VERSION_PARTS = 3

_STATUS = {
    1: ("NOT_INITIALIZED", "the driver or the GPU is missing, or out of memory"),
    3: ("ALLOC_FAILED", "out of GPU memory"),
    7: ("INVALID_VALUE", "a size, stride or pointer it cannot take"),
    8: ("ARCH_MISMATCH", "this GPU lacks what the product needs"),
    11: ("MAPPING_ERROR", "memory it could not map"),
    13: ("EXECUTION_FAILED", "a kernel failed on the GPU, this one or one before it"),
    14: ("INTERNAL_ERROR", "an internal operation failed"),
    15: ("NOT_SUPPORTED", "no product of these types, sizes and alignments"),
    16: ("LICENSE_ERROR", "a licence that is missing"),
}

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(_pointer),),
    "cublasDestroy_v2": (_pointer,),
    "cublasGetProperty": (_int, ctypes.POINTER(_int)),
    "cublasSetStream_v2": (_pointer, _pointer),
    "cublasSetWorkspace_v2": (_pointer, _pointer, ctypes.c_size_t),
    "cublasSetMathMode": (_pointer, _int),
    "cublasGemmEx": (
        *(_pointer, _int, _int, _int, _int, _int),  # handle, op of a, op of b, m, n, k
        *(_pointer, _pointer, _int, _int, _pointer, _int, _int),  # alpha; a and b, type, stride
        *(_pointer, _pointer, _int, _int, _int, _int),  # beta; c, type, stride; compute, algorithm
    ),
}


class CublasError(CuengineError):
    """cuBLAS is missing, or refused a call."""


class Cublas:
    """One handle on one stream, with one workspace; for one thread at a time.

    Made while the GPU's context is current.
    """

    def __init__(self, library: Path | str) -> None:
        """Raises CublasError where the library can't be loaded or finds no GPU."""
        self.library = str(library)
        self._library = _load(Path(library))
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._gemm = self._library.cublasGemmEx
        self.version = _version(self._library)
        self._handle = ctypes.c_void_p()
        self._check("cublasCreate_v2", ctypes.byref(self._handle))
        # Products are given host pointers to these, read when the call is made or captured.
        self._one = ctypes.pointer(ctypes.c_float(1.0))
        self._zero = ctypes.pointer(ctypes.c_float(0.0))
        mode = _DEFAULT_MATH | _DISALLOW_REDUCED_PRECISION_REDUCTION
        self._check("cublasSetMathMode", self._handle, mode)

    def use(self, stream: int, workspace: int, workspace_bytes: int) -> None:
        """Run on this stream with this workspace (its address on the GPU) from now on.

        Both must outlive the handle and every graph that was captured with it. Needed once: setting
        a stream takes the workspace away, so they are set together and in this order.
        """
        self._check("cublasSetStream_v2", self._handle, stream)
        self._check("cublasSetWorkspace_v2", self._handle, workspace, workspace_bytes)

    def linear(
        self,
        y: int,
        x: int,
        weight: int,
        *,
        num_tokens: int,
        in_features: int,
        out_features: int,
        dtype: str,
        out_dtype: str,
        accumulate: bool = False,
    ) -> None:
        """y = x @ weight.T, accumulated in float32; y += with `accumulate`.

        Addresses of contiguous rows on the GPU: x [num_tokens, in_features] and weight
        [out_features, in_features] of dtype, y [num_tokens, out_features] of out_dtype ("float32",
        "float16" or "bfloat16": that of x, or float32). Returns before it is done.
        Raises CublasError.
        """
        # Column by column, as cuBLAS reads memory, each of these is its own transpose:
        # y.T [out, tokens] = weight [out, in] (stored as [in, out]: to be turned) @ x.T.
        status = self._gemm(
            self._handle,
            _OP_T,
            _OP_N,
            out_features,
            num_tokens,
            in_features,
            self._one,
            weight,
            _TYPES[dtype],
            in_features,
            x,
            _TYPES[dtype],
            in_features,
            self._one if accumulate else self._zero,
            y,
            _TYPES[out_dtype],
            out_features,
            _COMPUTE_32F,
            _GEMM_DEFAULT,
        )
        if status:
            raise CublasError(
                f"cublasGemmEx of x [{num_tokens}, {in_features}] and weight [{out_features}, "
                f"{in_features}], {dtype} to {out_dtype}: {describe(status)}"
            )

    def close(self) -> None:
        """Free the handle; nothing may be using it any more."""
        if self._handle:
            self._check("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()

    def _check(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise CublasError(f"{function} ({self.library}): {describe(status)}")


def describe(status: int) -> str:
    """A status of cuBLAS by name, with what it means."""
    name, meaning = _STATUS.get(status, ("a status that cuBLAS's manual does not list", ""))
    return f"{name} (status {status}){': ' + meaning if meaning else ''}"


def library_version(path: Path | str) -> str:
    """Of this cuBLAS, as "12.9.1"; needs no GPU. Raises CublasError where it can't be loaded."""
    return _version(_load(Path(path)))


def _version(library: ctypes.CDLL) -> str:
    parts = []
    for part in range(_LIBRARY_VERSION_PARTS):
        value = ctypes.c_int()
        if status := library.cublasGetProperty(part, ctypes.byref(value)):
            raise CublasError(f"cublasGetProperty: {describe(status)}")
        parts.append(str(value.value))
    return ".".join(parts)


def find_cublas(major: int) -> Path:
    """libcublas of this CUDA major version.

    The one this process has loaded already, else NVIDIA's wheel on sys.path, else $CUDA_PATH or
    /usr/local/cuda, else the system's. Raises CublasError that says what to install.
    """
    for candidate in _candidates(major):
        if candidate.is_file():
            return candidate
    # Not to be found by its path, but perhaps by the loader's own search.
    name = f"libcublas.so.{major}"
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise CublasError(
            f"cuBLAS {major} ({name}) was found neither in Python's packages nor on the system: "
            f"{how_to_install(f'cuda{major}')}"
        ) from error
    return Path(name)


def _candidates(major: int) -> Iterator[Path]:
    name = f"libcublas.so.{major}"
    yield from _mapped(re.compile(rf"/.*/{re.escape(name)}(\.[\d.]+)?$", re.MULTILINE))
    for folder in map(Path, sys.path):
        yield folder / "nvidia" / _LIBRARIES[major]
    yield Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "lib64" / name


def _mapped(pattern: re.Pattern[str]) -> list[Path]:
    """Files of that name in this process; Linux only, none elsewhere."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return [Path(match[0]) for match in pattern.finditer(maps)]


def _load(path: Path) -> ctypes.CDLL:
    """The library, with the cublasLt that lies beside it and no other."""
    beside = path.parent / path.name.replace("libcublas", "libcublasLt")
    try:
        if beside.is_file():
            ctypes.CDLL(str(beside))
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CublasError(f"{path}: cannot be loaded ({error})") from error
