"""Puts a RayEngine together, and ends what belongs to it: on the cluster, in Ray, in this process.

While Ray connects, starts and loads, it is deaf to signals and swallows what their handlers raise.
All that is done with it is therefore done in a thread of its own, for which the main thread waits.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cuengine.config import EngineConfig
from cuengine.errors import ConfigError
from cuengine.ray_backend.client import RayEngine
from cuengine.ray_backend.deployment import ServeFleet
from cuengine.ray_backend.fleet import FleetGoneError
from cuengine.ray_backend.leaving import exit_now, in_time, leave
from cuengine.ray_backend.settings import RaySettings
from cuengine.text_side import load_text_side

logger = logging.getLogger("cuengine")


@contextmanager
def ray_engine(
    config: EngineConfig,
    settings: RaySettings,
    *,
    step_timeout: float,
    check: Callable[[], None],
) -> Iterator[RayEngine]:
    """An engine whose replicas have loaded theirs. SIGHUP replaces them, one after the other, by
    such as read the model's files anew.

    The end of the block ends them. SystemExit and KeyboardInterrupt, in the block or before it has
    begun, end the process: see leaving.py.

    check  raises what a signal's handler raised before, and somebody swallowed
    Raises ModelError and ConfigError.
    """
    text = load_text_side(config, found=lambda _config: None)
    path = Path(config.model)
    if path.exists():  # where Ray's processes run, the working folder is another
        config = dataclasses.replace(config, model=str(path.resolve()))
    fleet = ServeFleet(config, settings, step_timeout=step_timeout)
    with ThreadPoolExecutor(1, thread_name_prefix="cuengine-ray") as thread:
        try:
            try:
                with _updates_on_sighup(fleet):
                    check()
                    ready = thread.submit(fleet.deploy).result()
                    yield RayEngine(config, text, ready, fleet)
            except Exception:
                in_time(fleet.close)
                raise
            if not in_time(fleet.close):
                exit_now(1)
        except (KeyboardInterrupt, SystemExit) as error:
            leave(fleet, error)


@contextmanager
def _updates_on_sighup(fleet: ServeFleet) -> Iterator[None]:
    """By default it would end the process, and leave the application."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: _update(fleet))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _update(fleet: ServeFleet) -> None:
    def work() -> None:
        try:
            fleet.update()
        except FleetGoneError:
            pass  # the server ends
        except ConfigError as error:
            logger.error("The replicas could not be replaced: %s", error)
        except Exception:
            logger.exception("The replicas could not be replaced")

    threading.Thread(target=work, name="cuengine-update", daemon=True).start()
