"""Which device and which dtype a run gets, by name or by what machine and model are."""

from __future__ import annotations

import logging

from cuengine.device.cpu import CpuDevice
from cuengine.device.cuda.runtime import Runtime
from cuengine.device.interface import Device, StepLimits
from cuengine.errors import ConfigError, CuengineError

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cuda", "cpu", "emulated")
DTYPES = ("auto", "float32", "float16", "bfloat16")

_BFLOAT16_ARCHITECTURE = 80
"""From here on there are matrix products in bfloat16."""


def choose_device(name: str) -> tuple[str, str]:
    """The name of the device that `name` comes to here, and why it is that one.

    Raises ConfigError for a device that there is not.
    """
    if name not in DEVICES:
        raise ConfigError(f"device={name!r} is not one of: {', '.join(DEVICES)}")
    if name != "auto":
        return name, "asked for"
    from cuengine.device.cuda.find import usable_gpu

    usable, why = usable_gpu()
    return "cuda" if usable else "cpu", why


def choose_dtype(dtype: str, checkpoint: str | None, architecture: int) -> tuple[str, str]:
    """The dtype that `dtype` comes to on a GPU of this architecture, and why.

    checkpoint: the dtype of the weights; None where they were quantized. Raises ConfigError for a
    dtype that there is not, or not there.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of: {', '.join(DTYPES)}")
    has_bfloat16 = architecture >= _BFLOAT16_ARCHITECTURE
    if dtype == "bfloat16" and not has_bfloat16:
        raise ConfigError(
            f"dtype='bfloat16': this GPU (sm_{architecture}) has no matrix products in it, only "
            "those from sm_80 on do. Take float16 or float32"
        )
    if dtype != "auto":
        return dtype, "asked for"
    if checkpoint in (None, "bfloat16") and not has_bfloat16:
        return "float16", f"sm_{architecture} has no bfloat16"
    if checkpoint is None:
        return "bfloat16", "the weights were quantized"
    return checkpoint, "the checkpoint's"


def select_device(
    name: str,
    dtype: str,
    *,
    checkpoint_dtype: str | None = "float32",
    limits: StepLimits | None = None,
    use_graphs: bool = True,
) -> Device:
    """The device called name; "auto" takes the best there is. One log line says which and why.

    checkpoint_dtype  what "auto" is for a dtype; None where the weights were quantized
    limits            the largest step (CUDA devices); None: StepLimits()
    use_graphs        replay decode steps as CUDA graphs
    Raises ConfigError for a device or a dtype that there is not.
    """
    chosen, why = choose_device(name)
    if chosen == "cpu":
        return _cpu_device(dtype, why)
    runtime: Runtime
    if chosen == "emulated":
        from cuengine.device.emulated.host import EmulatedRuntime

        runtime = EmulatedRuntime()
    else:
        from cuengine.device.cuda.cupy_runtime import CupyRuntime

        try:
            runtime = CupyRuntime()
        except CuengineError as error:
            if name != "auto":
                raise
            return _cpu_device(dtype, f"{why}, but it cannot be used: {error}")
    from cuengine.device.cuda.device import CudaDevice

    taken, dtype_why = choose_dtype(dtype, checkpoint_dtype, runtime.architecture)
    device = CudaDevice(runtime, taken, limits or StepLimits(), use_graphs=use_graphs)
    free, total = runtime.memory_info()
    logger.info(
        "device %s (%s), dtype %s (%s), sm_%d, %d multiprocessors, %.1f of %.1f GiB free",
        chosen,
        why,
        taken,
        dtype_why,
        runtime.architecture,
        runtime.multiprocessors,
        free / 2**30,
        total / 2**30,
    )
    return device


def _cpu_device(dtype: str, why: str) -> CpuDevice:
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"dtype={dtype!r} is not one of: auto, float32 (device cpu: {why})")
    device = CpuDevice()
    logger.info("device cpu (%s), dtype %s, kernels in %s", why, device.dtype, device.kernels)
    return device
