"""How Numba is set up for our kernels: disk cache, threads, how these wait.

Nothing here is left behind for other users of Numba in the process, save for the thread pool.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
import numba.extending
from numba.core import config as numba_config
from numba.core.caching import UserProvidedCacheLocator

from cuengine.device.cpu_target import features
from cuengine.paths import PREBUILT_VARIABLE, cache_dir

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Names that numba.core.config makes when it is imported.
config = cast(Any, numba_config)

_SPINS = "20000"
"""Turns that an idle OpenMP thread looks for work before it sleeps: some 30 microseconds, which is
what Python takes from one kernel to the next. GNU's default is far more: on a machine with other
work a parallel loop then waits for its own spinning threads (11 ms measured, instead of 7 us)."""


def njit(
    signature: str | tuple[Any, ...] | None = None, **options: Any
) -> Callable[[_Function], _Function]:
    """numba.njit for our kernels: what it makes is called as the Python function would be.

    With a signature, the kernel is compiled, or with cache=True loaded, here and now.
    """
    arguments = () if signature is None else (signature,)

    def define(function: _Function) -> _Function:
        with _own_cache() as kept:
            chosen = options | {"cache": kept and options.get("cache", False)}
            return cast(_Function, numba.njit(*arguments, **chosen)(function))

    return define


def intrinsic(emit: Callable[..., Any]) -> Callable[..., Any]:
    """numba.extending.intrinsic, for mypy: its calls lack the first parameter."""
    return cast(Callable[..., Any], numba.extending.intrinsic(emit))


class KernelFolder(UserProvidedCacheLocator):
    """Where Numba keeps compiled kernels: right in the folder that is set.

    Its own choice depends on where the source lies, too: another install would compile anew.
    """

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        cast(Any, super()).__init__(function, source)
        self._cache_path = config.CACHE_DIR

    def ensure_cache_path(self) -> None:
        """It is there. What was built ahead may lie where nothing can be written."""


@contextmanager
def _own_cache() -> Iterator[bool]:
    """Kernels are cached in cuengine's own folder; False where there can be none.

    Numba's choice, __pycache__ beside the source, may not be writable, and it looks at the one file
    with the kernel only. Here the folder's name is made from all that makes a difference.
    """
    # Older versions have no choice of locators: they compile anew in each place.
    before = config.CACHE_DIR, getattr(config, "CACHE_LOCATOR_CLASSES", "")
    folder = _kernel_folder(before[0])
    if folder:
        config.CACHE_DIR = folder
        config.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelFolder.__name__}"
    try:
        yield bool(folder)
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


@functools.cache
def _kernel_folder(users_choice: str) -> str:
    """Built ahead, or made if need be; "" where it cannot be written."""
    name = _folder_name()
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    if prebuilt and (Path(prebuilt) / name).is_dir():
        return str(Path(prebuilt) / name)
    folder = (Path(users_choice) if users_choice else cache_dir() / "numba") / name
    why = f" ({PREBUILT_VARIABLE}={prebuilt} has none for this CPU and version)" if prebuilt else ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning(
            "compiling the CPU's kernels%s: up to a minute, at each start, as %s cannot be written",
            why,
            folder,
        )
        return ""
    if not any(folder.glob("*.nbi")):
        logger.info("compiling the CPU's kernels%s: up to a minute, the first time", why)
    return str(folder)


def _folder_name() -> str:
    """Of all that makes a difference to machine code: versions, sources, the CPU it is for."""
    cpu = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    target = f"{platform.machine()} {cpu} {config.CPU_FEATURES} {sorted(features())}"
    version = f"{platform.python_version()} {numba.__version__} {llvmlite.__version__}"
    digest = hashlib.sha256(f"{version} {target}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"cpu-{digest.hexdigest()[:16]}"


def start_threads() -> None:
    """Start Numba's threads.

    GNU's OpenMP reads its settings when it is loaded, which is here; the environment is then as
    before.
    """
    ours = not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if ours:
        os.environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        _first_parallel_loop()
    finally:
        if ours:
            del os.environ["GOMP_SPINCOUNT"]


def _first_parallel_loop() -> None:
    # Numba has no public call that loads its threading layer and compiles nothing.
    from numba.np.ufunc import parallel

    cast(Any, parallel)._launch_threads()
