"""Compiled kernels on disk: cubin, PTX and the symbols' names, made by NVRTC where missing.

The key covers all that can change a result: every source and header under cuda/, the options, NVRTC's
version and the architecture. Several processes may fill one cache at once: a file appears whole or
not at all. `compile_program` is all that devices, `cuengine compile` and the tests use.
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

from cuengine.device.kernel_variants import Program
from cuengine.device.nvrtc import Nvrtc
from cuengine.paths import cache_dir, kernel_source_dir

OPTIONS = ("--std=c++17", "--generate-line-info", "--diag-suppress=177")
"""Division and square root stay exact (no --use_fast_math): the sampler's must equal NumPy's."""


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


def file_stem(program: Program, architecture: int) -> str:
    """What the program's files are called in a folder made ahead: one for all NVRTC versions."""
    return f"{program.name}.sm_{architecture}"


def load_kernels(folder: Path, stem: str) -> Kernels | None:
    """Kernels that are already in a folder, or None. The names are written last."""
    names = folder / f"{stem}.json"
    if not names.is_file():
        return None
    return Kernels(
        folder / f"{stem}.cubin", folder / f"{stem}.ptx", json.loads(names.read_text())["names"]
    )


def compile_program(
    nvrtc: Nvrtc, program: Program, architecture: int, folder: Path | None = None
) -> Kernels:
    """The program's kernels, from the cache or compiled into it.

    folder: where to write instead of the user's cache, under names that a person can read.
    Raises NvrtcError.
    """
    sources = kernel_source_dir()
    options = OPTIONS
    major, minor = nvrtc.version
    key = hashlib.sha256(
        json.dumps(
            [source_hash(sources), str(sources), options, major, minor, program.expressions]
        ).encode()
    ).hexdigest()[:16]
    stem = file_stem(program, architecture)
    if folder is None:
        folder = cache_dir() / "kernels"
        stem = f"{stem}.{key}"
    if found := load_kernels(folder, stem):
        recorded = json.loads((folder / f"{stem}.json").read_text())["key"]
        if recorded == key:
            return found
    path = sources / program.source
    compiled = nvrtc.compile(
        path.read_text(),
        path,
        architecture=architecture,
        options=options,
        expressions=program.expressions,
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{stem}.cubin", compiled.cubin)
    _write(folder / f"{stem}.ptx", compiled.ptx)
    record = {"key": key, "names": compiled.names}
    _write(folder / f"{stem}.json", json.dumps(record, indent=1).encode())
    return Kernels(folder / f"{stem}.cubin", folder / f"{stem}.ptx", compiled.names)


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
