"""Which device a run gets, by name or by what the machine has."""

from __future__ import annotations

import logging

from cuengine.device.cpu import CpuDevice
from cuengine.device.interface import Device
from cuengine.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu")
DTYPES = ("auto", "float32")


def select_device(name: str, dtype: str) -> Device:
    """The device called name; "auto" takes the best there is. One log line says which and why.

    Raises ConfigError for a device or a dtype that there is not.
    """
    if name not in DEVICES:
        raise ConfigError(f"device={name!r} is not one of: {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of: {', '.join(DTYPES)} (device cpu)")
    device = CpuDevice()
    why = "asked for" if name == "cpu" else "the only device of this version"
    logger.info("device cpu (%s), dtype %s", why, device.dtype)
    return device
