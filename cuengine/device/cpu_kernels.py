"""The CPU's kernels, compiled before anything runs: for images, and for a first start at once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cuengine.errors import CuengineError
from cuengine.paths import PREBUILT_VARIABLE

_COMPILE = """
import sys
from cuengine.device import numba_kernels, numba_sampler, numba_setup, products
if numba_setup.not_kept:
    sys.exit(numba_setup.not_kept[0])
print(numba_setup.config.CPU_NAME or "this CPU")
"""


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def compile_cpu_kernels(out: Path | None = None) -> str:
    """Compile what is not there yet; returns what for: "this CPU", or what $NUMBA_CPU_NAME says.

    out: where to write instead of the user's cache; for $CUENGINE_KERNELS. They appear there whole
    or not at all. Raises CuengineError.
    """
    if out is None:
        return _compile(os.environ)
    environment = {key: value for key, value in os.environ.items() if key != PREBUILT_VARIABLE}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".part-") as scratch:
            target = _compile(environment | {"NUMBA_CACHE_DIR": scratch})
            (made,) = Path(scratch).iterdir()
            if not (out / made.name).is_dir():
                made.rename(out / made.name)
    except OSError as error:
        raise CuengineError(f"{out}: kernels cannot be written there: {error.strerror}") from error
    return target


def _compile(environment: os._Environ[str] | dict[str, str]) -> str:
    # In a process of its own: Numba compiles for what it found when it was loaded.
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CuengineError(f"the CPU's kernels could not be compiled: {reason}")
    return done.stdout.strip()
