"""Steps of a known shape on an engine, with and without profiling.

A round computes prompts of the wanted length in full steps (prefill), and then, with their blocks
found in the prefix cache, goes on with all sequences at once (decode). There are four rounds of the
same work: one to warm up, one without profiling, the profiled one, and one without again, so that a
machine that gets slower or faster meanwhile does not look like a cost of profiling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np

from cuengine.counted import counted
from cuengine.device.cuda.device import CudaDevice
from cuengine.device.interface import Device
from cuengine.engine import Engine
from cuengine.model.llama import Llama
from cuengine.model_runner import ModelRunner
from cuengine.profiling.device import Counts, ProfiledDevice
from cuengine.profiling.recording import RecordedStep, Recorder, now
from cuengine.profiling.report import Section, summarize
from cuengine.profiling.stream import StreamTimes
from cuengine.profiling.workload import Workload
from cuengine.sampling_params import SamplingParams
from cuengine.scheduler import Chunk

PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True)
class _Step:
    """kind: PREFILL, DECODE, or None: a mixture, while sequences come in one by one.

    nanoseconds  from the end of the step before to where its tokens are known
    """

    kind: str | None
    sequences: int
    tokens: int
    longest: int
    nanoseconds: int = 0


class Profiler:
    """One engine and one workload.

    recorded  the profiled steps, in order, once `run` is done
    """

    def __init__(self, engine: Engine, workload: Workload) -> None:
        """engine: made with the workload's `settings`. Raises ConfigError where its KV cache is too
        small all the same."""
        self._engine = engine
        self._workload = workload
        self._runner = cast(ModelRunner, engine.runner)
        self._llama = cast(Llama, self._runner.model)
        self._counts = Counts(self._llama, workload.block_size)
        workload.check_cache(engine.pool.num_blocks, self._counts.block_bytes)
        self.device_name, self.dtype = self._llama.device.name, self._llama.device.dtype
        self.recorded: list[RecordedStep] = []
        random = np.random.default_rng(0)
        shape = (workload.batch, workload.context)
        self._prompts: list[list[int]] = random.integers(
            0, engine.model.vocab_size, shape, np.int32
        ).tolist()

    def run(self, note: Callable[[str], None]) -> list[Section]:
        """Prefill and decode. note: told what is going on, round by round."""
        note("warming up")
        self._round("warm-up")
        note("without profiling")
        before = self._round("before")
        note("profiling")
        with self._profiling() as take:
            profiled = self._round("profiled", take)
        note("without profiling, again")
        after = self._round("after")

        def times(steps: list[_Step], kind: str) -> list[int]:
            return [step.nanoseconds for step in steps if step.kind == kind]

        return [
            summarize(
                kind,
                _sizes([step for step in profiled if step.kind == kind]),
                [step for step in self.recorded if step.kind == kind],
                (times(before, kind), times(after, kind)),
            )
            for kind in (PREFILL, DECODE)
        ]

    @contextmanager
    def _profiling(self) -> Iterator[Callable[[str | None], None]]:
        """Gives what is to be called after each step, with its kind."""
        llama, runner = self._llama, self._runner
        device, overlaps = llama.device, runner.overlaps
        recorder = Recorder()
        stream = None
        watching: AbstractContextManager[None] = nullcontext()
        if isinstance(device, CudaDevice):
            stream = StreamTimes(device.runtime)
            watching = device.watched(stream.launch)

        def take(kind: str | None) -> None:
            host, operations = recorder.take(), [] if stream is None else stream.take()
            if kind is not None:
                self.recorded.append(RecordedStep(kind, host, operations))

        profiled = ProfiledDevice(device, self._counts, recorder, stream)
        # Each step waits for its tokens, so that nothing that is recorded is another step's.
        llama.device, runner.overlaps = cast(Device, profiled), False
        try:
            with watching:
                yield take
        finally:
            llama.device, runner.overlaps = device, overlaps

    def _round(
        self, name: str, take: Callable[[str | None], None] = lambda kind: None
    ) -> list[_Step]:
        """All of the work once. The name keeps rounds from finding each other's blocks."""
        work = self._workload
        prefills = list(self._steps(name, PREFILL, 1, take))
        decodes: list[_Step] = []
        with closing(self._steps(name, DECODE, work.length - work.context, take)) as steps:
            for step in steps:
                if step.kind == DECODE:
                    decodes.append(step)
                if len(decodes) == work.steps:
                    break
        for index in range(work.batch):
            self._engine.abort(_request_id(name, DECODE, index))
        while self._engine.has_unfinished():
            self._engine.step()
            take(None)
        return prefills + decodes

    def _steps(
        self, name: str, wanted: str, max_tokens: int, take: Callable[[str | None], None]
    ) -> Generator[_Step, None, None]:
        """Add the prompts and run; where the engine overlaps steps, each is given when it is done.

        Of the kind that is wanted are only steps that are full of it.
        """
        engine = self._engine
        launched: deque[_Step] = deque()

        def note(chunks: list[Chunk]) -> None:
            launched.append(self._look_at(chunks, wanted))

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for index, prompt in enumerate(self._prompts):
            engine.add_request(_request_id(name, wanted, index), prompt, params, cache_salt=name)
        engine.before_launch = note
        elapsed = 0
        try:
            while engine.has_unfinished():
                completed = engine.num_completed_steps
                started = now()
                engine.step()
                elapsed += now() - started
                if engine.num_completed_steps > completed:
                    step = launched.popleft()
                    step.nanoseconds, elapsed = elapsed, 0
                    take(step.kind)
                    yield step
        finally:
            engine.before_launch = None

    def _look_at(self, chunks: list[Chunk], wanted: str) -> _Step:
        decodes = sum(chunk.start >= chunk.sequence.prompt_len for chunk in chunks)
        full = {PREFILL: decodes == 0, DECODE: decodes == self._workload.batch}
        return _Step(
            wanted if full[wanted] else None,
            len(chunks),
            sum(chunk.end - chunk.start for chunk in chunks),
            max(chunk.end for chunk in chunks),
        )


def _request_id(round_name: str, kind: str, index: int) -> str:
    return f"{round_name}-{kind}-{index}"


def _sizes(steps: list[_Step]) -> str:
    """What a step held, as "8 sequences, 8 tokens, context 257 to 288"; contexts: the longest."""

    def span(values: list[int]) -> str:
        low, high = min(values), max(values)
        return f"{low}" if low == high else f"{low} to {high}"

    sequences = counted(span([step.sequences for step in steps]), "sequence")
    tokens = counted(span([step.tokens for step in steps]), "token")
    return f"{sequences}, {tokens}, context {span([step.longest for step in steps])}"
