"""`cuengine info`: what cuengine finds on this machine; the first thing to paste into a bug report.

Shows no tokens and no keys. Everything that may be missing is asked for so that it may be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from cuengine.cli.values import format_memory, format_size
from cuengine.errors import ConfigError
from cuengine.extras import how_to_install
from cuengine.paths import cache_dir

CPU_FEATURES = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"),
    *("amx_int8", "asimd", "asimdhp", "bf16", "sve"),
)
ENVIRONMENT = re.compile(r"(CUENGINE|OMP|OPENBLAS|MKL|NUMBA|CUDA|HF)_\w+|XDG_CACHE_HOME")
SECRET = re.compile(r"TOKEN|KEY")
PASSWORD = re.compile(r"(?<=//)[^/@\s]+(?=@)")
NVIDIA = re.compile(r"cupy|nvidia-(cublas|cuda)", re.IGNORECASE)


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for section, entries in facts.items():
        print(f"{section}:" if entries else f"{section}: -")
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            print(f"  {name:<{width}}  {_shown(value)}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Section -> name -> value; values are JSON's, None where there is nothing."""
    return {
        "cuengine": _cuengine(),
        "machine": _machine(),
        "device": _device(),
        "numpy": _numpy(),
        "numba": _numba(),
        "cuda": _cuda(),
        "cache": _cache(),
        "built-in models": _builtin_models(),
        "environment": _environment(),
    }


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return str(value)


def _cuengine() -> dict[str, Any]:
    return {
        "version": importlib.metadata.version("cuengine"),
        "folder": str(Path(__file__).parents[1]),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }


def _machine() -> dict[str, Any]:
    cpuinfo = _read("/proc/cpuinfo")
    name = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "features": [feature for feature in CPU_FEATURES if feature in present],
        "cores": f"{usable} usable of {os.cpu_count()}",
        "memory": _kilobytes(memory.get("MemTotal")),
        "available": _kilobytes(memory.get("MemAvailable")),
        "container limit": _container_limit(),
    }


def _container_limit() -> str | None:
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return format_memory(int(limit)) if limit.isdecimal() else None


def _device() -> dict[str, Any]:
    from cuengine.device.select import choose_device

    name, why = choose_device("auto")
    return {"auto takes": name, "because": why}


def _numpy() -> dict[str, Any]:
    import numpy as np

    built_with: Any = np.show_config(mode="dicts")
    blas = built_with["Build Dependencies"]["blas"]
    return {
        "version": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        **_openblas(),
    }


def _openblas() -> dict[str, Any]:
    """Threads and kernel of the OpenBLAS that NumPy has loaded; nothing for another BLAS."""
    paths = set(re.findall(r"/\S*openblas\S*", _read("/proc/self/maps")))
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                threads = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
                kernel = getattr(library, f"{prefix}openblas_get_corename{suffix}", None)
                if threads is not None and kernel is not None:
                    kernel.restype = ctypes.c_char_p
                    return {"blas threads": threads(), "blas kernel": kernel().decode()}
    return {}


def _numba() -> dict[str, Any]:
    if importlib.util.find_spec("numba") is None:
        return {"version": None, "note": f"not installed; faster with it: {how_to_install('cpu')}"}
    try:
        numba: Any = importlib.import_module("numba")
    except Exception as error:
        # A broken Numba is what a bug report has to show, whatever it raises.
        return {"version": importlib.metadata.version("numba"), "note": f"broken: {error!r}"}
    return {
        "version": numba.__version__,
        "threads": numba.config.NUMBA_NUM_THREADS,
        "threading layers": [
            name
            for name, module in (("tbb", "tbbpool"), ("omp", "omppool"), ("workqueue",) * 2)
            if _importable(f"numba.np.ufunc.{module}")
        ],
        "threading layer asked for": numba.config.THREADING_LAYER,
    }


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _cuda() -> dict[str, Any]:
    installed = {
        distribution.name: distribution.version
        for distribution in importlib.metadata.distributions()
        if NVIDIA.match(distribution.name)
    }
    return {**_cuda_driver(), **_cuda_libraries(), **dict(sorted(installed.items()))}


def _cuda_libraries() -> dict[str, str]:
    """What the CUDA device would compile and multiply with; of both CUDA versions, where found."""
    from cuengine.device.cuda.cublas import MAJORS, CublasError, find_cublas, library_version
    from cuengine.device.nvrtc import NvrtcError, find_nvrtc

    facts = {}
    for major in MAJORS:
        # What is missing is missing; what to install the device says when it is needed.
        with contextlib.suppress(NvrtcError):
            nvrtc = find_nvrtc(major)
            facts[f"nvrtc {major}"] = f"{'.'.join(map(str, nvrtc.version))}, {nvrtc.library}"
        with contextlib.suppress(CublasError):
            cublas = find_cublas(major)
            facts[f"cublas {major}"] = f"{library_version(cublas)}, {cublas}"
    return facts


def _cuda_driver() -> dict[str, Any]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"driver": None}
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return {"driver": "present, but gives no version"}
    facts: dict[str, Any] = {"driver": f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"}
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return facts | {"gpus": f"none usable: driver error {status}"}
    for index in range(count.value):
        name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        if not (
            driver.cuDeviceGetName(name, 256, index)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(size), index)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, index)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)
        ):
            capability = f"sm_{major.value}{minor.value}"
            facts[f"gpu {index}"] = (
                f"{name.value.decode()}, {capability}, {format_memory(size.value)}"
            )
    return facts


def _cache() -> dict[str, Any]:
    try:
        folder = cache_dir()
    except ConfigError as error:
        return {"folder": None, "note": str(error)}
    facts: dict[str, Any] = {"folder": str(folder)}
    try:
        for part in sorted(folder.iterdir()):
            if part.is_dir():
                facts[f"{part.name}/"] = format_size(folder_size(part))
    except FileNotFoundError:
        pass
    except OSError as error:
        facts["note"] = f"cannot be read: {error.strerror}"
    return facts


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder that are there and can be seen."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile, as what is being compiled
            size += path.stat().st_size if path.is_file() else 0
    return size


def _builtin_models() -> dict[str, Any]:
    from cuengine.model.builtin import BUILTIN_MODELS, find_builtin

    facts = {}
    for model in BUILTIN_MODELS.values():
        found = None
        with contextlib.suppress(ConfigError):  # no home, no cache
            found = find_builtin(model)
        facts[model.name] = f"{model.description}, {model.licence}: " + (
            f"in {found}"
            if found
            else f"not fetched yet, a download of {format_size(model.wheel_size)}"
        )
    return facts


def _environment() -> dict[str, Any]:
    return {
        name: "(set)" if SECRET.search(name) else PASSWORD.sub("...", value)
        for name, value in sorted(os.environ.items())
        if ENVIRONMENT.fullmatch(name)
    }


def _kilobytes(value: str | None) -> str | None:
    return format_memory(int(value) * 1024) if value else None


def _read(path: str) -> str:
    """A file of the system, or nothing where this system has no such file."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
