"""How Numba is set up for our kernels: disk cache, threads, how these wait.

Nothing here is left behind for other users of Numba in the process, save for the thread pool.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
import numba.extending
from numba.core import config as numba_config
from numba.core.caching import UserProvidedCacheLocator

from cuengine.device.cpu_target import features
from cuengine.errors import ConfigError
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
        if signature is not None and options.get("cache"):
            for folder in _kernel_folders(function):
                if (kernel := _from_folder(folder, function, signature, options)) is not None:
                    return cast(_Function, kernel)
        uncached = options | {"cache": False}
        return cast(_Function, numba.njit(*arguments, **uncached)(function))

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
def _cached_in(folder: Path) -> Iterator[None]:
    """Kernels are loaded from this folder, and kept there.

    Numba's choice, __pycache__ beside the source, may not be writable, and it looks at the one file
    with the kernel only. Here the folder's name is made from all that makes a difference.
    """
    # Older versions have no choice of locators: they compile anew in each place.
    before = config.CACHE_DIR, getattr(config, "CACHE_LOCATOR_CLASSES", "")
    config.CACHE_DIR = str(folder)
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelFolder.__name__}"
    try:
        yield
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def _from_folder(
    folder: Path, function: Callable[..., Any], signature: Any, options: Mapping[str, Any]
) -> Any:
    """The kernel, loaded from there or else compiled and kept there; None where neither works."""
    for _ in range(2):
        with _cached_in(folder):
            kernel: Any = numba.njit(**options)(function)
            try:
                kernel.compile(signature)
            except (OSError, MemoryError) as error:  # the file may well be whole
                _note_not_kept(folder, getattr(error, "strerror", "") or repr(error))
                if not kernel.signatures:
                    return None
            except Exception as error:  # a damaged file can bring any
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if kernel.signatures or not _discard_damaged(folder, function, why):
                    return None
                continue
        kernel.disable_compile()
        return kernel
    return None


def _kernel_folders(function: Callable[..., Any]) -> Iterator[Path]:
    """Where the kernel is looked for, in turn: built ahead, else in the folder that is the user's.

    Where neither can be used nothing is kept.
    """
    ahead = _built_ahead()
    if ahead is not None and _files(ahead, function):
        yield ahead
    if (own := _own_folder(config.CACHE_DIR)) is not None:
        yield own


@functools.cache
def _built_ahead() -> Path | None:
    """The part of $CUENGINE_KERNELS for this CPU and version, if there is one."""
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    if not prebuilt:
        return None
    try:
        found = _folder_name() in os.listdir(prebuilt)
    except OSError as error:
        logger.warning("%s=%s: %s", PREBUILT_VARIABLE, prebuilt, error.strerror)
        return None
    return Path(prebuilt) / _folder_name() if found else None


@functools.cache
def _own_folder(users_choice: str) -> Path | None:
    """The user's, made if need be; None where there is none and none can be made."""
    name = _folder_name()
    try:
        folder = (Path(users_choice) if users_choice else cache_dir() / "numba") / name
        folder.mkdir(parents=True, exist_ok=True)
        filled = any(file.endswith(".nbi") for file in os.listdir(folder))
        writable = os.access(folder, os.W_OK)
    except ConfigError as error:
        _note_not_kept(None, str(error))
        return None
    except OSError as error:
        _note_not_kept(folder, error.strerror or str(error))
        return None
    if not filled and not writable:
        _note_not_kept(folder, "it cannot be written")
        return None
    if not filled:
        prebuilt = os.environ.get(PREBUILT_VARIABLE)
        why = f" ({PREBUILT_VARIABLE}={prebuilt} has none for this CPU and version)"
        if not prebuilt or _built_ahead() is not None:
            why = ""
        logger.info("compiling the CPU's kernels%s: up to a minute, the first time", why)
    return folder


not_kept: list[str] = []
"""Why kernels that were compiled here are not there for the next start, if so."""


@functools.cache
def _note_not_kept(folder: Path | None, why: str) -> None:
    """Once, and not for every kernel."""
    not_kept.append(why if folder is None else f"{folder}: {why}")
    logger.warning(
        "compiling the CPU's kernels: up to a minute, at each start, as they cannot be kept: %s",
        not_kept[-1],
    )


def _discard_damaged(folder: Path, function: Callable[..., Any], why: str) -> bool:
    """Take a kernel that cannot be loaded out of the user's folder; False: it is still there."""
    files = _files(folder, function)
    if not files:
        return False
    logger.warning("damaged, and compiled anew: %s (%s)", files[0], why)
    if folder == _built_ahead():
        return False
    try:
        for path in files:
            path.unlink()
    except OSError:
        return False
    return True


def _files(folder: Path, function: Callable[..., Any]) -> list[Path]:
    """What Numba has kept of a function there."""
    name = glob.escape(re.sub("[<>]", "", function.__qualname__))
    return sorted(folder.glob(f"*.{name}-*.nb[ci]"))


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
