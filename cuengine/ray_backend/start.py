"""Puts a RayEngine together: the model's text side here, replicas on the cluster, SIGHUP."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from pathlib import Path

from cuengine.config import EngineConfig
from cuengine.ray_backend.client import RayEngine
from cuengine.ray_backend.deployment import ServeFleet
from cuengine.ray_backend.settings import RaySettings
from cuengine.text_side import load_text_side

logger = logging.getLogger("cuengine")


def start_ray_engine(
    config: EngineConfig, settings: RaySettings, *, step_timeout: float
) -> RayEngine:
    """Returns when the replicas have loaded their engines. Raises ModelError and ConfigError.

    From then on SIGHUP replaces them, one after the other, by such as read the model's files anew.
    """
    text = load_text_side(config, found=lambda _config: None)
    path = Path(config.model)
    if path.exists():  # where Ray's processes run, the working folder is another
        config = dataclasses.replace(config, model=str(path.resolve()))
    fleet = ServeFleet(config, settings, step_timeout=step_timeout)
    try:
        ready = fleet.deploy()
    except BaseException:
        fleet.close()
        raise
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, lambda *_: _update(fleet))
    return RayEngine(config, text, ready, fleet)


def _update(fleet: ServeFleet) -> None:
    def work() -> None:
        try:
            fleet.update()
        except Exception:
            logger.exception("The replicas could not be replaced")

    threading.Thread(target=work, name="cuengine-update", daemon=True).start()
