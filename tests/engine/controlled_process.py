"""The engine's process as tests need it: its steps wait, take long, fail, hang or kill when told.

Told by files in the folder $CUENGINE_TEST_CONTROL, which engine_control.py writes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from cuengine import engine_process, loading
from cuengine.batch import Batch, PendingOutput, SamplingBatch
from cuengine.config import EngineConfig
from cuengine.engine import Engine, Runner
from cuengine.grammar import Grammar
from cuengine.sampling_params import SamplingParams

CONTROL = Path(os.environ["CUENGINE_TEST_CONTROL"])


class Controlled:
    """A runner that looks into the folder before each step."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.overlaps = inner.overlaps
        self.range = inner.range
        self.taken = self.size("tickets")

    def size(self, name: str) -> int:
        file = CONTROL / name
        return file.stat().st_size if file.exists() else 0

    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput:
        while (CONTROL / "closed").exists() and self.size("tickets") <= self.taken:
            time.sleep(0.001)
        if (CONTROL / "closed").exists():
            self.taken += 1
        if (CONTROL / "delay").exists():
            time.sleep(float((CONTROL / "delay").read_text()))
        if (CONTROL / "fail").exists():
            raise RuntimeError("the machine is on fire")
        if (CONTROL / "hang").exists():
            (CONTROL / "hang").unlink()
            time.sleep(1000)
        if (CONTROL / "poison").exists() and (batch.token_ids == self.size("poison")).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.run(batch, sampling)


def load(config: EngineConfig) -> Engine:
    if (CONTROL / "unloadable").exists():
        raise MemoryError("nothing left")
    engine = original(config)
    engine.runner = Controlled(engine.runner)
    compile_grammar = engine.compile_grammar

    def compile_slowly(params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is not None:
            with (CONTROL / "compiling").open("a") as file:
                file.write(".")
            while (CONTROL / "slow").exists():
                time.sleep(0.001)
        return compile_grammar(params)

    engine.compile_grammar = compile_slowly  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    original = loading.load_engine
    loading.load_engine = load
    sys.exit(engine_process.main())
