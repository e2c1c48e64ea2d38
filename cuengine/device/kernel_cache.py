"""Compiled kernels on disk: cubin, PTX and the symbols' names, made by NVRTC where missing.

The key covers all that can change a result: every source and header under cuda/, the options,
NVRTC's version and the architecture. Several processes may fill one cache at once: a program
appears whole or not at all. `get_kernels` is for devices, `compile_program` for `cuengine compile`
and the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuengine.device.cuda.find import cupy_cuda_major
from cuengine.device.kernel_variants import Program
from cuengine.device.nvrtc import Nvrtc, NvrtcError, find_nvrtc
from cuengine.paths import PREBUILT_VARIABLE, cache_dir, kernel_source_dir

OPTIONS = ("--std=c++17", "--generate-line-info", "--diag-suppress=177")
"""Division and square root stay exact (no --use_fast_math): the sampler's must equal NumPy's.
177: a constant of a shared header that one program does not use."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One compiled program. names: template instance, as `rms_norm<bf16>`, to symbol in it."""

    cubin: Path
    ptx: Path
    names: Mapping[str, str]


@cache
def source_hash(folder: Path) -> str:
    """Of all sources and headers, names and contents."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("include/*.cuh")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def get_kernels(program: Program, architecture: int) -> Kernels:
    """The program for a GPU of this compute capability (90 for sm_90), compiled if need be.

    Takes what was built ahead in $CUENGINE_KERNELS, else the user's cache, else NVRTC. Code for
    an earlier chip of the same generation will do: sm_80's runs on sm_86.
    Raises NvrtcError where there is neither a built program nor an NVRTC that can make it.
    """
    generation = range(architecture, architecture // 10 * 10 - 1, -1)
    if prebuilt := os.environ.get(PREBUILT_VARIABLE):
        for candidate in generation:
            if found := _load(Path(prebuilt), _stem(program, candidate), _sources_key()):
                return found
    # Of the version that CuPy is for, and so the driver: a driver for 12 takes no code made by 13.
    nvrtc = find_nvrtc(cupy_cuda_major())
    supported = set(nvrtc.architectures())
    for candidate in generation:
        if candidate in supported:
            return compile_program(nvrtc, program, candidate)
    raise NvrtcError(
        f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} ({nvrtc.library}) makes no code for this "
        f"GPU's sm_{architecture}, only for {', '.join(f'sm_{a}' for a in sorted(supported))}: "
        "install another CUDA version's wheels"
    )


def compile_program(
    nvrtc: Nvrtc, program: Program, architecture: int, folder: Path | None = None
) -> Kernels:
    """The program's kernels, from the cache or compiled into it.

    folder: where to write instead of the user's cache, under names that a person can read.
    Raises NvrtcError.
    """
    sources = kernel_source_dir()
    # The folder is part of it: line information names it.
    parts = [_sources_key(), str(sources), OPTIONS, nvrtc.version, program.expressions]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    stem = _stem(program, architecture)
    if folder is None:
        folder = cache_dir() / "kernels"
        stem = f"{stem}.{key}"
        if found := _load(folder, stem, _sources_key()):
            return found
    path = sources / program.source
    compiled = nvrtc.compile(
        path.read_text(),
        path,
        architecture=architecture,
        options=OPTIONS,
        expressions=program.expressions,
    )
    folder.mkdir(parents=True, exist_ok=True)
    # The names come last: where they are, the rest is.
    _write(folder / f"{stem}.cubin", compiled.cubin)
    _write(folder / f"{stem}.ptx", compiled.ptx)
    record = {"sources": _sources_key(), "names": compiled.names}
    _write(folder / f"{stem}.json", json.dumps(record, indent=1).encode())
    return Kernels(folder / f"{stem}.cubin", folder / f"{stem}.ptx", compiled.names)


def _stem(program: Program, architecture: int) -> str:
    return f"{program.name}.sm_{architecture}"


def _sources_key() -> str:
    return source_hash(kernel_source_dir())


def _load(folder: Path, stem: str, sources: str) -> Kernels | None:
    """Kernels in a folder; None where they are missing, or made from other sources."""
    names = folder / f"{stem}.json"
    if not names.is_file():
        return None
    record = json.loads(names.read_text())
    if record["sources"] != sources:
        return None
    return Kernels(folder / f"{stem}.cubin", folder / f"{stem}.ptx", record["names"])


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    # What a temporary file is given is for its owner alone; containers run as somebody else.
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
