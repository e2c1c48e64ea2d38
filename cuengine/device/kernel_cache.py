"""Compiled kernels on disk: cubin, PTX and the symbols' names, made by NVRTC where missing.

The key covers all that can change a result: every source and header under cuda/, the options,
NVRTC's version and the architecture. Several processes may fill one cache at once: a program
appears whole or not at all. `get_kernels` is for devices, `compile_program` for `cuengine compile`
and the tests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuengine.device.cuda.find import cupy_cuda_major
from cuengine.device.kernel_variants import Program
from cuengine.device.nvrtc import Nvrtc, NvrtcError, find_nvrtc
from cuengine.paths import PREBUILT_VARIABLE, cache_dir, kernel_source_dir

logger = logging.getLogger(__name__)

OPTIONS = ("--std=c++17", "--generate-line-info", "--diag-suppress=177")
"""Division and square root stay exact (no --use_fast_math): the sampler's must equal NumPy's.
177: a constant of a shared header that one program does not use."""


_ELF = b"\x7fELF"
"""What a cubin begins with."""


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
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    if prebuilt:
        for candidate in generation:
            if found := _load(Path(prebuilt), _stem(program, candidate), _sources_key()):
                return found
    # Of the version that CuPy is for, and so the driver: a driver for 12 takes no code made by 13.
    try:
        nvrtc = find_nvrtc(cupy_cuda_major())
    except NvrtcError as error:
        if not prebuilt:
            raise
        raise NvrtcError(
            f"{PREBUILT_VARIABLE}={prebuilt} has no {program.name} for sm_{architecture} that was "
            f"made by this version of cuengine{_built_for(Path(prebuilt), program)}, and it cannot "
            f"be compiled: {error}"
        ) from None
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
    otherwise = "Name another folder"
    if folder is None:
        otherwise = "Set CUENGINE_CACHE to another folder"
        folder = cache_dir() / "kernels"
        stem = f"{stem}.{key}"
        if found := _load(folder, stem, _sources_key()):
            return found
    path = sources / program.source
    compiled = nvrtc.compile(
        path.read_text(encoding="utf-8"),
        path,
        architecture=architecture,
        options=OPTIONS,
        expressions=program.expressions,
    )
    record = {"sources": _sources_key(), "names": compiled.names}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The names come last: where they are, the rest is.
        _write(folder / f"{stem}.cubin", compiled.cubin)
        _write(folder / f"{stem}.ptx", compiled.ptx)
        _write(folder / f"{stem}.json", json.dumps(record, indent=1).encode())
    except OSError as error:
        raise NvrtcError(
            f"{folder}: compiled kernels cannot be written there: {error.strerror}. {otherwise}"
        ) from None
    return Kernels(folder / f"{stem}.cubin", folder / f"{stem}.ptx", compiled.names)


def _built_for(folder: Path, program: Program) -> str:
    """What the folder has of the program, in brackets."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        return f" ({error.strerror})"
    found = [re.fullmatch(rf"{re.escape(program.name)}\.(sm_\d+)\.json", name) for name in names]
    made = sorted(match[1] for match in found if match)
    return f" (it has files for {', '.join(made)})" if made else ""


def _stem(program: Program, architecture: int) -> str:
    return f"{program.name}.sm_{architecture}"


def _sources_key() -> str:
    return source_hash(kernel_source_dir())


def _load(folder: Path, stem: str, sources: str) -> Kernels | None:
    """Kernels in a folder; None where they are missing, damaged, or made from other sources."""
    names, cubin = folder / f"{stem}.json", folder / f"{stem}.cubin"
    try:
        record = json.loads(names.read_text(encoding="utf-8"))
        if record["sources"] != sources:
            return None
        kernels = Kernels(cubin, folder / f"{stem}.ptx", dict(record["names"]))
        with cubin.open("rb") as file:
            if file.read(len(_ELF)) == _ELF:
                return kernels
        why = f"{cubin.name} is no cubin"
    except FileNotFoundError as error:
        if error.filename == str(names):
            return None
        why = f"{cubin.name} is missing"
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    logger.warning("%s: not used: %s", names, why)
    return None


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            os.unlink(file.name)
            raise
    # What a temporary file is given is for its owner alone; containers run as somebody else.
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
