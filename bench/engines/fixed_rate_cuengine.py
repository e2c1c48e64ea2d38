"""`cuengine serve` whose model makes up tokens at a fixed rate: arguments as those of `serve`.

All is as it is but the model's runner, in the engine's own process: admission, scheduler, block
pool, the socket between both processes, text and server are real.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from fixed_rate import TOKEN, Device

from cuengine import engine_link, engine_process, loading
from cuengine.batch import Batch, SamplerOutput, SamplingBatch
from cuengine.cli.main import main
from cuengine.config import EngineConfig
from cuengine.engine import Engine


@dataclass(slots=True)
class _Step:
    device: Device
    end: float
    rows: int

    def fetch(self) -> SamplerOutput:
        self.device.wait_until(self.end)
        none = np.empty((self.rows, 0))
        return SamplerOutput(
            token_ids=np.full(self.rows, TOKEN, np.int32),
            logprobs=np.full(self.rows, np.nan, np.float32),
            ranks=np.zeros(self.rows, np.int32),
            top_ids=none.astype(np.int32),
            top_logprobs=none.astype(np.float32),
        )


class FixedRateRunner:
    """As a GPU, it works while the host prepares its next step."""

    overlaps = True

    def __init__(self) -> None:
        self._device = Device()

    def run(self, batch: Batch, sampling: SamplingBatch) -> _Step:
        return _Step(self._device, self._device.take(), len(batch.logits_indices))

    def range(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


_load_engine = loading.load_engine


def _load_fixed_rate(config: EngineConfig) -> Engine:
    engine = _load_engine(config)
    engine.runner = FixedRateRunner()
    return engine


if __name__ == "__main__":
    if sys.argv[1] == "--engine":  # started by the other one, with its end of their socket
        del sys.argv[1]
        loading.load_engine = _load_fixed_rate
        sys.exit(engine_process.main())
    engine_link.COMMAND = [sys.executable, __file__, "--engine"]
    sys.exit(main(["serve", *sys.argv[1:]]))
