"""The engine's process as tests need it: its steps wait, take long, fail, hang or kill when told.

Told by files in the folder $CUENGINE_TEST_CONTROL, which engine_control.py writes; there it counts
what it does, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

# On a busy machine two threads wait for each other longer than a tiny model takes.
os.environ["NUMBA_NUM_THREADS"] = "1"

from cuengine import engine_process, loading
from cuengine.batch import Batch, PendingOutput, SamplingBatch
from cuengine.config import EngineConfig
from cuengine.engine import Engine, Runner
from cuengine.engine_process import Compiled, Connection, Order
from cuengine.grammar import Grammar
from cuengine.sampling_params import SamplingParams

CONTROL = Path(os.environ["CUENGINE_TEST_CONTROL"])


def is_set(name: str) -> bool:
    return (CONTROL / name).exists()


def take(name: str) -> bool:
    """Whether it is set; it is not any more."""
    try:
        (CONTROL / name).unlink()
    except FileNotFoundError:
        return False
    return True


def wait_while(name: str) -> None:
    while is_set(name):
        time.sleep(0.001)


def size(name: str) -> int:
    return (CONTROL / name).stat().st_size if is_set(name) else 0


def count(name: str) -> None:
    with (CONTROL / name).open("a") as file:
        file.write(".")


class Controlled:
    """A runner that looks into the folder before each step."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.overlaps = inner.overlaps
        self.range = inner.range
        self.taken = size("tickets")

    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput:
        count("begun")
        while is_set("closed") and size("tickets") <= self.taken:
            time.sleep(0.001)
        if is_set("closed"):
            self.taken += 1
        else:
            self.taken = size("tickets")
        if take("fail"):
            raise RuntimeError("the machine is on fire")
        if take("hang"):
            ctypes.PyDLL(None).sleep(1000)  # nothing else in the process runs, either
        if is_set("poison") and (batch.token_ids == size("poison")).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.run(batch, sampling)


def load(config: EngineConfig) -> Engine:
    count("loads")
    wait_while("held")
    if is_set("unloadable"):
        raise MemoryError("nothing left")
    engine = load_engine(config)
    engine.runner = Controlled(engine.runner)
    compile_grammar = engine.compile_grammar

    def compile_slowly(params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is not None:
            count("compiles")
            wait_while("slow")
            if params.structured_outputs.regex == "deadly":
                os.kill(os.getpid(), signal.SIGKILL)
        return compile_grammar(params)

    engine.compile_grammar = compile_slowly  # type: ignore[method-assign]
    return engine


def put(connection: Connection, order: Order) -> None:
    put_order(connection, order)
    if not isinstance(order, Compiled):
        count("orders")


if __name__ == "__main__":
    load_engine, put_order = loading.load_engine, Connection.put
    loading.load_engine = load
    Connection.put = put  # type: ignore[method-assign]
    os._exit(engine_process.main())
