"""Variables of Numba's that would keep it from working, read before it is imported.

Numba answers some of them with a traceback, LLVM some with the end of the process. Which CPU is
named is cpu_target.py's business.
"""

from __future__ import annotations

import os

from cuengine.errors import ConfigError

MAX_THREADS = 1024


def jit_disabled() -> bool:
    """Numba is told to compile nothing. Our kernels cannot run as Python: they have LLVM's IR."""
    try:
        return int(os.environ.get("NUMBA_DISABLE_JIT", "0")) != 0
    except ValueError:
        return False  # as Numba has it, with a warning


def check_threads() -> None:
    """Raises ConfigError for a NUMBA_NUM_THREADS that is no number of threads."""
    given = os.environ.get("NUMBA_NUM_THREADS")
    if given is None:
        return
    if not given.strip().isdecimal() or not 1 <= int(given) <= MAX_THREADS:
        raise ConfigError(
            f"NUMBA_NUM_THREADS={given}: is not a whole number from 1 to {MAX_THREADS}. Unset it "
            "for as many threads as there are cores"
        )


def refused(error: Exception) -> ConfigError | None:
    """What to say where Numba fails and somebody has set variables of it; None where nobody has."""
    names = sorted(name for name in os.environ if name.startswith("NUMBA_"))
    if not names:
        return None
    given = ", ".join(f"{name}={os.environ[name]}" for name in names)
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ConfigError(f"Numba does not work with {given}: {reason}. Unset what is not needed")
