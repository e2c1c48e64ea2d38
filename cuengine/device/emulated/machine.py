"""The machine's C, compiled by gcc where its cache lacks it, and loaded.

Groups of handlers (instructions.py) are libraries of their own, compiled when a program first wants
one of them: what kernels use is a few of them, and nothing is compiled per kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from cuengine.device.emulated import instructions
from cuengine.device.emulated.program import Program
from cuengine.errors import CuengineError
from cuengine.paths import cache_dir

_FLAGS = ("-O2", "-ftree-vectorize", "-shared", "-fPIC", "-w", "-fno-strict-aliasing",
          "-ffp-contract=off", "-frounding-math", "-fno-math-errno",
          "-fno-trapping-math")  # fmt: skip
"""Nothing is fused or folded: C computes what PTX says, in the rounding that is set."""

_SANITIZE = ("-O0", "-g", "-fsanitize=undefined")


class Launch(ctypes.Structure):
    """Of runtime.c."""

    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
                ("static_bytes", ctypes.c_uint32), ("dynamic_bytes", ctypes.c_uint32),
                ("local_bytes", ctypes.c_uint32), ("file_bytes", ctypes.c_uint32),
                ("order", ctypes.c_uint32), ("seed", ctypes.c_uint32),
                ("allocations", ctypes.c_void_p), ("num_allocations", ctypes.c_uint64),
                ("code", ctypes.c_void_p), ("constants", ctypes.c_void_p),
                ("params", ctypes.c_char_p)]  # fmt: skip


class Fault(ctypes.Structure):
    """Of runtime.c."""

    _fields_ = [("code", ctypes.c_int32), ("pc", ctypes.c_int32), ("block", ctypes.c_uint32 * 3),
                ("thread", ctypes.c_uint32), ("other", ctypes.c_uint32),
                ("address", ctypes.c_uint64), ("size", ctypes.c_uint64)]  # fmt: skip


def load(program: Program, sanitize: bool) -> Callable[..., int]:
    """Fills in the records' functions; returns `launch`."""
    groups = sorted({instructions.RUNTIME, *(group for group, _ in program.handlers)})
    libraries = dict(zip(groups, _libraries(tuple(groups), sanitize), strict=True))
    addresses: dict[tuple[str, str], int] = {}
    for handler in set(program.handlers):
        function = getattr(libraries[handler[0]], handler[1])
        addresses[handler] = ctypes.cast(function, ctypes.c_void_p).value or 0
    program.records["run"] = [addresses[handler] for handler in program.handlers]
    launch: Callable[..., int] = libraries[instructions.RUNTIME].launch
    return launch


_loaded: dict[tuple[str, bool], ctypes.CDLL] = {}


def _libraries(groups: tuple[str, ...], sanitize: bool) -> list[ctypes.CDLL]:
    """Those that the cache lacks are compiled side by side."""
    running = [
        (group, *_begin(group, sanitize)) for group in groups if (group, sanitize) not in _loaded
    ]
    for group, path, compiler in running:
        if compiler:
            compiler()
        _loaded[group, sanitize] = ctypes.CDLL(str(path))
    return [_loaded[group, sanitize] for group in groups]


@cache
def _compiler(sanitize: bool) -> tuple[str, ...]:
    """gcc with its flags; the last one is its version, for the key of the cache."""
    try:
        version = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, check=True)
    except FileNotFoundError:
        raise CuengineError("the emulated device needs gcc: install it, or take cpu") from None
    cpu = Path("/proc/cpuinfo")
    words = set(cpu.read_text().split()) if cpu.is_file() else set()
    features = [f"-m{name}" for name in ("avx2", "fma") if name in words]
    extra = _SANITIZE if sanitize else ()
    return ("gcc", *_FLAGS, *features, *extra, version.stdout.decode().strip())


def _begin(group: str, sanitize: bool) -> tuple[Path, Callable[[], None] | None]:
    """Where the library of a group is or will be; what waits for gcc, if it had to be started."""
    *command, version = _compiler(sanitize)
    here = Path(__file__).parent
    code = instructions.c_source(group)
    included = [here / "numbers.h", here / "warp.h"]
    if group == instructions.RUNTIME:
        included.append(here / "runtime.c")
    parts = [code, version, *command, *(path.read_text() for path in included)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = cache_dir() / "emulated" / f"{group}.{key[:16]}.so"
    if path.is_file():
        return path, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        raise CuengineError(
            f"{path.parent}: the emulator is compiled there: {error.strerror}. Set CUENGINE_CACHE "
            "to a folder that can be written"
        ) from error
    # The source stays beside the library, where gdb looks for it.
    source, made = Path(folder.name) / f"{path.stem}.c", Path(folder.name) / path.name
    source.write_text(code)
    process = subprocess.Popen(
        [*command, f"-I{here}", f"-fdebug-prefix-map={folder.name}={path.parent}",
         "-o", str(made), str(source), "-lm"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def finish() -> None:
        _, errors = process.communicate()
        if process.returncode:
            raise CuengineError(f"gcc failed on the emulator's {group}: {errors[:2000]}")
        os.replace(source, path.with_suffix(".c"))
        os.replace(made, path)
        folder.cleanup()

    return path, finish
