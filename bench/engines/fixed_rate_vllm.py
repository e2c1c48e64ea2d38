"""vLLM's OpenAI server whose model makes up tokens at a fixed rate: arguments as those of its own.

All is as it is but the executor's two methods that run a step: scheduler, engine process, text and
server are real. Steps are run on a thread, as on a device that works while the host goes on, which
is what lets vLLM schedule ahead.
"""

from __future__ import annotations

import os
import runpy
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fixed_rate import TOKEN, Device
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput


class FixedRateExecutor(UniProcExecutor):
    """Named on the command line: --distributed-executor-backend."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._device = Device()
        self._thread = ThreadPoolExecutor(1)
        self._step: Future[ModelRunnerOutput] = Future()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        names = list(scheduler_output.num_scheduled_tokens)
        for new in scheduler_output.scheduled_new_reqs:
            scheduled = scheduler_output.num_scheduled_tokens[new.req_id]
            if new.num_computed_tokens + scheduled < len(new.prompt_token_ids or ()):
                raise RuntimeError("a prompt was cut: raise --max-num-batched-tokens")
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] for _ in names],
        )
        if not names:
            return _done(output) if non_block else output
        self._step = self._thread.submit(self._at, self._device.take(), output)
        return _done(None) if non_block else None  # as a GPU's: the tokens are fetched below

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._step if non_block else self._step.result()

    def _at(self, end: float, output: ModelRunnerOutput) -> ModelRunnerOutput:
        self._device.wait_until(end)
        return output


def _schedule_ahead_on_cpus_too() -> None:
    """vLLM has it switched off there, as it gains nothing where the host is the device."""
    check = CpuPlatform.check_and_update_config

    def check_all_else(cls: type[CpuPlatform], config: VllmConfig) -> None:
        ahead = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = ahead

    CpuPlatform.check_and_update_config = classmethod(check_all_else)


_schedule_ahead_on_cpus_too()


def _done(output: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future


if __name__ == "__main__":  # its engine process imports this file by its name
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.argv[1:] += ["--distributed-executor-backend", "fixed_rate_vllm.FixedRateExecutor"]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
