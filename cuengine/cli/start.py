"""What commands begin with: the model's files, and for `serve` and `chat` an engine on them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from cuengine.config import EngineConfig
from cuengine.errors import ConfigError
from cuengine.extras import how_to_install
from cuengine.ray_backend.address import cluster_address
from cuengine.ray_backend.environment import prepare

if TYPE_CHECKING:
    from cuengine.async_engine import AsyncEngine
    from cuengine.ray_backend.client import RayEngine
    from cuengine.ray_backend.settings import RaySettings

logger = logging.getLogger(__name__)


def note(text: str) -> None:
    """One line for the person at the terminal; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def model_folder(config: EngineConfig) -> tuple[str, Path]:
    """The model's own name and its folder, fetched and converted first where needed. ModelError."""
    from cuengine.model.find import find_model

    started = time.perf_counter()
    files = find_model(config.model, revision=config.revision)
    folder = files.path
    if files.gguf is not None:
        from cuengine.model.gguf import convert_gguf

        folder = convert_gguf(files.gguf)
    logger.info("%s: in %s, %.2f s", files.name, folder, time.perf_counter() - started)
    return files.name, folder


def build_engine(config: EngineConfig, **settings: float) -> tuple[str, AsyncEngine]:
    """The model's own name and an engine that only has to be started. ModelError, ConfigError."""
    from cuengine.async_engine import AsyncEngine

    engine = AsyncEngine.from_config(config, **settings)
    return engine.model_name, engine


def build_ray_engine(
    config: EngineConfig,
    settings: RaySettings,
    *,
    step_timeout: float,
    check: Callable[[], None],
) -> AbstractContextManager[RayEngine]:
    """The same with engines on a Ray cluster, for the time of the block; see ray_backend/start.py.

    Raises ModelError, and ConfigError where there is no Ray, too.
    """
    prepare(starts_ray=cluster_address(settings.address) is None)
    try:
        from cuengine.ray_backend.start import ray_engine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(
            f"--data-parallel-backend ray needs Ray: {how_to_install('ray')}, here and on every "
            "machine of the cluster"
        ) from error

    return ray_engine(config, settings, step_timeout=step_timeout, check=check)
