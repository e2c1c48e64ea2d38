"""The end of a process that uses Ray, which may be deaf, or wait for a cluster that is gone.

Imports no Ray.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, Protocol

logger = logging.getLogger("cuengine")

SECONDS = 10.0
"""For Ray to end an application, whose replicas have nothing to do any more, and to be left."""


class Endable(Protocol):
    def end(self) -> None:
        """May take long, or for ever."""
        ...


def in_time(work: Callable[[], None]) -> bool:
    """Whether `work` is done, if need be without it: it goes on in a thread that nobody joins."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="cuengine-end", daemon=True).start()
    try:
        done.result(SECONDS)
    except TimeoutError:
        logger.warning("Ray does not answer; replicas may still run")
    except Exception as error:
        logger.warning("Replicas may still run: %s", error)
    else:
        return True
    return False


def leave(fleet: Endable, error: KeyboardInterrupt | SystemExit) -> NoReturn:
    """End the fleet, in time, and the process, with the exit code that `error` stands for. A second
    signal, whose handler raises, waits for nothing.
    """
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code
    try:
        in_time(fleet.end)
    finally:
        exit_now(code if isinstance(code, int) else 1)


def exit_now(code: int) -> NoReturn:
    """Python's own end would wait for Ray, whatever it does. A Ray that was started by this process
    the kernel ends with it.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
