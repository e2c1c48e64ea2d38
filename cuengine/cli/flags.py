"""Errors name settings as Python does: on the command line as flags, with values as typed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from cuengine.cli.values import as_memory_size

_FLAGS = {
    "max_body_bytes": "max_body_size",
    "served_model_names": "served_model_name",
    "api_keys": "api_key",
    "cors_origins": "allowed_origins",
}
"""Settings whose flags are called something else."""
_SIZES = ("kv_cache_memory", "max_body_bytes")
_VALUE = r"'[^']*'|[^\s,;()]*[^\s,;().:]"


def in_flags(message: str, args: argparse.Namespace, argv: Sequence[str]) -> str:
    """`message` with `max_num_seqs=0` as `--max-num-seqs 0`, where the command has that flag.

    A name that is also a plain word is taken for a setting only where a value follows it.
    """
    dests = {dest: dest for dest in vars(args) if dest not in ("command", "model")}
    dests |= {name: dest for name, dest in _FLAGS.items() if dest in dests}

    def flag(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if value is None and "_" not in name:
            return found[0]
        spelled = "--" + dests[name].replace("_", "-")
        if value is None:
            return spelled
        setting = getattr(args, dests[name])
        if value == repr(setting):
            value = _typed(spelled, argv) or value
        if isinstance(setting, int | float):
            value = f"{value:.80}"  # thousands of digits can be typed
        if name in _SIZES and value.isdecimal():
            value = as_memory_size(int(value))
        return f"{spelled} {value}"

    names = "|".join(sorted(dests, key=len, reverse=True))
    return re.sub(
        rf"(?<![\w./-])(?P<name>{names})(?:=(?P<value>{_VALUE})|(?![\w/=-]))", flag, message
    )


def _typed(flag: str, argv: Sequence[str]) -> str | None:
    """The value that a flag was given last, as its user wrote it."""
    for at in reversed(range(len(argv))):
        if argv[at] == flag and at + 1 < len(argv):
            return argv[at + 1]
        if argv[at].startswith(f"{flag}="):
            return argv[at].removeprefix(f"{flag}=")
    return None
