"""Which CPU the CPU's kernels are compiled for: this one, or the one that $NUMBA_CPU_NAME names.

Code for a named CPU runs on every machine that has at least its instructions: that is how an
image's kernels are compiled where the image is built. Numba adds this machine's own instructions to
those of a name, unless $NUMBA_CPU_FEATURES is set, to nothing if need be.

Imports no Numba: weights are packed for these kernels while that loads.
"""

from __future__ import annotations

import os

from llvmlite import binding

from cuengine.errors import ConfigError

_V2 = frozenset(("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"))
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_LEVELS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
"""Instructions by level, in LLVM's words (x86-64 psABI, 3.1.1)."""


def features() -> frozenset[str]:
    """The instructions that kernels may use. Raises ConfigError where this CPU lacks some."""
    host = frozenset(name for name, has in binding.get_host_cpu_features().items() if has)
    name = os.environ.get("NUMBA_CPU_NAME", "").lower()
    level = _LEVELS.get(name, frozenset())
    if missing := level - host:
        raise ConfigError(
            f"NUMBA_CPU_NAME={name}: this CPU has no {', '.join(sorted(missing))}. Name another, "
            "as x86-64-v2: kernels are compiled for it at the first start"
        )
    added = os.environ.get("NUMBA_CPU_FEATURES")
    if added is None and name == "generic":
        added = ""
    if added is None:
        return host | level
    signed = [feature.strip() for feature in added.split(",")]
    without = {feature[1:] for feature in signed if feature.startswith("-")}
    return (level | {feature[1:] for feature in signed if feature.startswith("+")}) - without
