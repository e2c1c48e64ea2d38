"""Values on the command line and in its messages: counts, sizes in memory, ports."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power, _letter: 1024**_power}


def memory_size(text: str) -> int:
    """Bytes in "2GiB", "512MB", "1.5G" or "1000000"; K, M, G, T alone are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size in memory, such as 2GiB, 512MB or 1000000 (bytes)"
        )
    return size


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def format_size(num_bytes: float) -> str:
    """94 MB, 1.3 GB: decimal, as file sizes and downloads are given."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 999.5 and len(units) > 1:
        num_bytes /= 1000
        del units[0]
    decimals = 1 if num_bytes < 9.95 and units[0] != "B" else 0
    return f"{num_bytes:.{decimals}f} {units[0]}"


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)
