"""Values on the command line and in its messages: counts, sizes, ports, texts.

Memory is counted in powers of 1024 (MiB, GiB), files and downloads in powers of 1000 (MB, GB), and
each is written with its own unit.
"""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power, _letter: 1024**_power}


_MAX_SIZE = 2**63 - 1


def memory_size(text: str) -> int:
    """Bytes in "2GiB", "512MB", "1.5G" or "1000000"; K, M, G, T alone are KiB, MiB, GiB, TiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = 0 if match is None or unit is None else float(match[1]) * unit
    if not 1 <= size <= _MAX_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a size in memory from 1 byte to 8388607TiB, such as 2GiB (of "
            "1024^3 bytes), 512MB (of 1000^2 bytes) or 1000000 (bytes)"
        )
    return int(size)


def as_memory_size(num_bytes: int) -> str:
    """At least so many bytes, as `memory_size` reads them: 360MiB, 17KiB."""
    unit, name = (1024**2, "MiB") if num_bytes >= 1024**2 else (1024, "KiB")
    return f"{-(-num_bytes // unit)}{name}"


def format_memory(num_bytes: float) -> str:
    """512 MiB, 15.6 GiB: memory."""
    return _with_unit(num_bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])


def whole(text: str) -> int:
    """A whole number; of which size, the setting says."""
    try:
        return int(text)
    except ValueError:  # also where it has thousands of digits
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number") from None


def number(text: str) -> float:
    """A number; of which size, the setting says."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number") from None


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not re.fullmatch(r"\d{1,20}", text) or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a whole number from 1 to {2**31 - 1}"
        )
    return int(text)


def format_size(num_bytes: float) -> str:
    """94 MB, 1.3 GB: files and downloads."""
    return _with_unit(num_bytes, 1000, ["B", "kB", "MB", "GB", "TB"])


def _with_unit(size: float, step: int, units: list[str]) -> str:
    while size >= step - 0.5 and len(units) > 1:
        size /= step
        del units[0]
    decimals = 1 if size < 9.95 and units[0] != "B" else 0
    return f"{size:.{decimals}f} {units[0]}"


def text(value: str) -> str:
    """Any but none, and none that is not UTF-8: no model, no JSON and no client could read it."""
    if not value:
        raise argparse.ArgumentTypeError("it is empty: give it a value, or leave it out")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise argparse.ArgumentTypeError(f"{value!r:.200} is not UTF-8")
    return value


def port(text: str) -> int:
    if not re.fullmatch(r"\d{1,20}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a port, 0 to 65535")
    return int(text)
