"""Which CPU the CPU's kernels are compiled for: this one, or the one that $NUMBA_CPU_NAME names.

Code for a named CPU runs on every machine that has at least its instructions: that is how an
image's kernels are compiled where the image is built. Numba adds this machine's own instructions to
those of a name, unless $NUMBA_CPU_FEATURES is set, to nothing if need be.

Imports no Numba: weights are packed for these kernels while that loads.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

from llvmlite import binding

from cuengine.errors import ConfigError

_V2 = frozenset(("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"))
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_LEVELS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
"""Instructions by level, in LLVM's words (x86-64 psABI, 3.1.1)."""

_PROBE = """
import sys
from llvmlite import binding
try:
    binding.initialize_native_target()
except RuntimeError:
    pass  # a newer one, which needs no such call
binding.Target.from_default_triple().create_target_machine(cpu=sys.argv[1], features=sys.argv[2])
"""


def features() -> frozenset[str]:
    """The instructions that kernels may use.

    Raises ConfigError where this CPU lacks some, and for what LLVM knows nothing of.
    """
    host = frozenset(name for name, has in binding.get_host_cpu_features().items() if has)
    name = os.environ.get("NUMBA_CPU_NAME", "")
    added = os.environ.get("NUMBA_CPU_FEATURES")
    _check(name, added or "")
    level = _LEVELS.get(name, frozenset())
    if missing := level - host:
        raise ConfigError(
            f"NUMBA_CPU_NAME={name}: this CPU has no {', '.join(sorted(missing))}. Name another, "
            "as x86-64-v2: kernels are compiled for it at the first start"
        )
    if added is None and name == "generic":
        added = ""
    if added is None:
        return host | level
    signed = added.split(",")
    without = {feature[1:] for feature in signed if feature.startswith("-")}
    return (level | {feature[1:] for feature in signed if feature.startswith("+")}) - without


@functools.cache
def _check(name: str, added: str) -> None:
    """Raises ConfigError for what LLVM would ignore, but for a message, or end the process at."""
    if added and not re.fullmatch(r"[+-][^\s,+]+(,[+-][^\s,+]+)*", added):
        raise ConfigError(
            f"NUMBA_CPU_FEATURES={added}: is not a list as +avx2,-fma, without spaces"
        )
    if not added and name in ("", "generic", binding.get_host_cpu_name(), *_LEVELS):
        return
    # In a process of its own: what LLVM does not know it tells stderr alone.
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, name, added],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    unknown = re.findall(r"'([^']+)' is not a recognized (processor|feature)", probe.stderr)
    for what, kind in unknown:
        if kind == "processor":
            raise ConfigError(
                f"NUMBA_CPU_NAME={what}: LLVM knows no CPU of that name here. Give one as "
                f"x86-64-v3 or {binding.get_host_cpu_name()} (this one), or unset it"
            )
        raise ConfigError(
            f"NUMBA_CPU_FEATURES={added}: LLVM knows no feature {what[1:]} here. Give a list as "
            "+avx2,-fma, or unset it"
        )
    if probe.returncode:
        raise ConfigError(
            f"NUMBA_CPU_NAME={name} and NUMBA_CPU_FEATURES={added}: LLVM cannot compile for that. "
            "Unset them"
        )
