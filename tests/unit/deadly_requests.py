"""Requests of which some kill the engine that runs them, and who listens to what becomes of each.

The model is checksum_model.py's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from checksum_model import ChecksumModel, expected_output
from hypothesis import strategies as st

from cuengine.batch import Batch, PendingOutput, SamplingBatch
from cuengine.engine import Runner
from cuengine.errors import EngineDiedError
from cuengine.front_desk import FrontDesk
from cuengine.sampling_params import SamplingParams

POISON = 3
"""As the first token of a prompt it kills the engine that computes it."""


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams

    @property
    def kills(self) -> bool:
        return self.prompt[0] == POISON


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    prompt = draw(st.lists(st.integers(1, 2), min_size=1, max_size=20))
    if draw(st.integers(0, 4)) == 0:
        prompt[0] = POISON
    return Job(
        prompt,
        SamplingParams(
            n=draw(st.sampled_from([1, 1, 2])),
            seed=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(1, 12)),
            ignore_eos=draw(st.booleans()),
        ),
    )


class Death(Exception):
    pass


class Deadly:
    """A runner that dies of POISON."""

    def __init__(self, inner: ChecksumModel) -> None:
        self.inner: Runner = inner
        self.overlaps, self.range = inner.overlaps, inner.range

    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput:
        if ((batch.positions == 0) & (batch.token_ids == POISON)).any():
            raise Death
        return self.inner.run(batch, sampling)


class Reader:
    """Listens to one stream; `died` where it was refused."""

    def __init__(self, engine: FrontDesk, name: str, job: Job) -> None:
        self.name, self.job = name, job
        self.tokens: dict[int, list[int]] = {i: [] for i in range(job.params.n)}
        self.aborted = self.died = False
        self.task = asyncio.create_task(self._listen(engine))

    async def _listen(self, engine: FrontDesk) -> None:
        job = self.job
        stream = engine.generate(job.prompt, job.params, request_id=self.name)
        try:
            async for delta in stream:
                for sample in delta.sequences:
                    self.tokens[sample.index] += sample.token_ids
        except EngineDiedError:
            self.died = True
        finally:
            await stream.aclose()

    def check(self) -> None:
        for index, tokens in self.tokens.items():
            expected = expected_output(self.job.prompt, self.job.params, index)
            assert tokens == (expected[: len(tokens)] if self.aborted or self.died else expected)
