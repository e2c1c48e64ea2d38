"""Whether there is a GPU that the CUDA device can use. Imports no CuPy to find out."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from typing import Any

from cuengine.extras import how_to_install

OLDEST_ARCHITECTURE = 70
"""Volta: the first with what the plain kernels use (independent threads, __syncwarp)."""

DRIVERS = {12: "525", 13: "580"}
"""For each CUDA major version the oldest driver that runs it on Linux (NVIDIA's CUDA release notes,
minor version compatibility)."""

INSTALL = (
    f"{how_to_install('cuda13')} (driver {DRIVERS[13]} or newer) or {how_to_install('cuda12')} "
    f"(driver {DRIVERS[12]} or newer)"
)

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


def usable_gpu() -> tuple[bool, str]:
    """Whether `cuda` can be had here, and the reason, as the end of a sentence.

    Looks at the first GPU that is visible, which is the one that the device would take.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False, (
            "no NVIDIA driver (libcuda.so.1) was found; a container sees it with --gpus all"
        )
    count, version = ctypes.c_int(), ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return False, f"the NVIDIA driver finds no usable GPU (error {status}): see nvidia-smi"
    if count.value == 0:
        return False, "the NVIDIA driver finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    gpu, architecture = _first_gpu(driver)
    if architecture < OLDEST_ARCHITECTURE:
        return False, (
            f"{gpu} has compute capability {architecture // 10}.{architecture % 10}, and cuengine "
            "needs 7.0 (Volta) or newer: CUDA_VISIBLE_DEVICES chooses another"
        )
    if importlib.util.find_spec("cupy") is None:
        return False, f"there is a GPU ({gpu}), but CuPy is not installed: {INSTALL}"
    driver.cuDriverGetVersion(ctypes.byref(version))
    major = cupy_cuda_major()
    if major is not None and version.value // 1000 < major:
        return False, (
            f"the NVIDIA driver is one for CUDA {version.value // 1000}, and the CuPy that is "
            f"installed is for CUDA {major}: update the driver to {DRIVERS[major]} or newer, or in "
            f"cupy-cuda{major}x's place {INSTALL}"
        )
    return True, f"found {gpu}"


def cupy_cuda_major() -> int | None:
    """CUDA major version of the CuPy wheel that is installed; None for one of another kind."""
    for major in DRIVERS:
        try:
            importlib.metadata.version(f"cupy-cuda{major}x")
        except importlib.metadata.PackageNotFoundError:
            continue
        return major
    return None


def _first_gpu(driver: Any) -> tuple[str, int]:
    """Name and compute capability (90 for 9.0)."""
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return name.value.decode(errors="replace"), major.value * 10 + minor.value
