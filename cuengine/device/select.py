"""Which device a run gets, by name or by what the machine has."""

from __future__ import annotations

import logging

from cuengine.device.cpu import CpuDevice
from cuengine.device.interface import Device
from cuengine.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu")
DTYPES = ("auto", "float32")


def choose_device(name: str) -> tuple[str, str]:
    """The name of the device that `name` comes to here, and why it is that one.

    Raises ConfigError for a device that there is not.
    """
    if name not in DEVICES:
        raise ConfigError(f"device={name!r} is not one of: {', '.join(DEVICES)}")
    return "cpu", "asked for" if name == "cpu" else "the only device of this version"


def select_device(name: str, dtype: str) -> Device:
    """The device called name; "auto" takes the best there is. One log line says which and why.

    Raises ConfigError for a device or a dtype that there is not.
    """
    chosen, why = choose_device(name)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of: {', '.join(DTYPES)} (device {chosen})")
    device = CpuDevice()
    logger.info(
        "device %s (%s), dtype %s, kernels in %s", chosen, why, device.dtype, device.kernels
    )
    return device
