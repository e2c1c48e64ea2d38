"""Where cuengine's own files lie. Models and their caches: model/find.py."""

from __future__ import annotations

import os
from pathlib import Path

from cuengine.errors import ConfigError, CuengineError

PREBUILT_VARIABLE = "CUENGINE_KERNELS"
"""Environment variable with the folder that `cuengine compile --out` filled."""


def cache_dir() -> Path:
    """Where what can be made or fetched again lies; it need not exist yet.

    $CUENGINE_CACHE, else cuengine/ in $XDG_CACHE_HOME, else ~/.cache/cuengine.
    Raises ConfigError where there is no home directory that it could be in, and for a path that
    is not UTF-8.
    """
    own = os.environ.get("CUENGINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            folder = Path(own).expanduser()
        else:
            folder = (Path(base) if base else Path.home() / ".cache") / "cuengine"
        str(folder).encode()  # of libraries that read a model's files, some take no other
        return folder
    except UnicodeEncodeError:
        raise ConfigError(
            f"the cache's path {str(folder)!r} is not UTF-8: set CUENGINE_CACHE to one that is"
        ) from None
    except RuntimeError as error:  # pathlib's, of a user whom the system does not know
        said = f"CUENGINE_CACHE={own}: " if own else ""
        raise ConfigError(
            f"{said}{str(error).rstrip('.')}: set CUENGINE_CACHE to the path of a folder that "
            "can be written"
        ) from None


def kernel_source_dir() -> Path:
    """The folder with the CUDA sources: cuengine/cuda when installed, cuda/ in a checkout.

    Raises CuengineError where the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    installed = package / "cuda"
    if installed.is_dir():
        return installed
    root = package.parent
    # In site-packages a folder named cuda beside cuengine is NVIDIA's, not ours.
    if (root / "pyproject.toml").is_file() and (root / "cuda").is_dir():
        return root / "cuda"
    raise CuengineError(f"no CUDA sources at {installed}: reinstall cuengine")
