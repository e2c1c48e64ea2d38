"""NVRTC, NVIDIA's run-time compiler: CUDA C++ in, cubin or PTX out. Needs no GPU and no driver.

A ctypes binding of the few calls we need, and the search for the library and the CUDA headers: in
NVIDIA's wheels, else on the system. What is compiled, and where the results are kept, is in
kernel_cache.py.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuengine.errors import CuengineError
from cuengine.extras import how_to_install

_LIBRARIES = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}
_HEADERS = {12: "cuda_runtime/include", 13: "cu13/include"}


class NvrtcError(CuengineError):
    """NVRTC is missing, or refused a program; the message carries its log."""


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """names: the symbol of each name expression. log: warnings, and ptxas's report if asked for."""

    cubin: bytes
    ptx: bytes
    names: dict[str, str]
    log: str


class Nvrtc:
    """One NVRTC library and the headers that go with it."""

    def __init__(self, library: Path | str, include: Path) -> None:
        """Raises NvrtcError where the library can't be loaded."""
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise NvrtcError(f"{library}: cannot be loaded ({error})") from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.library = str(library)
        self.include = include
        self.version = self._version()

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities it compiles for: 80 is sm_80."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def compile(
        self,
        source: str,
        path: Path,
        *,
        architecture: int,
        options: tuple[str, ...],
        expressions: tuple[str, ...] = (),
    ) -> CompiledProgram:
        """Compile one source for one architecture, the template instances that `expressions` name.

        path: its real place, which profilers show and quoted includes are relative to.
        Raises NvrtcError with the compiler's log.
        """
        program = ctypes.c_void_p()
        self._check(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            str(path).encode(),
            0,
            None,
            None,
        )
        try:
            for expression in expressions:
                self._check("nvrtcAddNameExpression", program, expression.encode())
            flags = [
                f"--gpu-architecture=sm_{architecture}",
                f"--include-path={path.parent}",
                f"--include-path={self.include}",
                *options,
            ]
            array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            status = self._library.nvrtcCompileProgram(program, len(flags), array)
            log = self._bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise NvrtcError(
                    f"{path.name}: NVRTC {self.version[0]}.{self.version[1]} does not compile it "
                    f"for sm_{architecture} ({self._error(status)}):\n{log.strip()}"
                )
            return CompiledProgram(
                cubin=self._bytes(program, "nvrtcGetCUBIN"),
                ptx=self._bytes(program, "nvrtcGetPTX").rstrip(b"\0"),
                names={
                    expression: self._lowered(program, expression) for expression in expressions
                },
                log=log,
            )
        finally:
            self._check("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"{getter}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getter, program, buffer)
        return buffer.raw

    def _lowered(self, program: ctypes.c_void_p, expression: str) -> str:
        name = ctypes.c_char_p()
        self._check("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(name))
        return (name.value or b"").decode()

    def _check(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise NvrtcError(f"{function}: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


@cache
def find_nvrtc(major: int | None = None) -> Nvrtc:
    """NVRTC of this CUDA major version, or the newest there is, with its headers.

    Looks into NVIDIA's wheels on sys.path, then at the system's library with $CUDA_PATH or
    /usr/local/cuda. Raises NvrtcError that says what to install.
    """
    majors = sorted(_LIBRARIES, reverse=True) if major is None else [major]
    for candidate in majors:
        for folder in map(Path, sys.path):
            library = folder / "nvidia" / _LIBRARIES[candidate]
            include = folder / "nvidia" / _HEADERS[candidate]
            if library.is_file() and (include / "cuda_fp16.h").is_file():
                return Nvrtc(library, include)
    toolkit = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))
    if (toolkit / "include" / "cuda_fp16.h").is_file():
        for candidate in majors:
            library = toolkit / "lib64" / f"libnvrtc.so.{candidate}"
            if library.is_file():
                return Nvrtc(library, toolkit / "include")
    of_version = "" if major is None else f" {major}"
    raise NvrtcError(
        f"NVRTC{of_version} with its headers was found neither in Python's packages nor in "
        f"{toolkit}: {how_to_install(f'cuda{majors[0]}')}"
    )
