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

from fixed_rate import TOKEN, Ticks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput


class FixedRateExecutor(UniProcExecutor):
    """Named on the command line: --distributed-executor-backend."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._ticks = Ticks()
        self._thread = ThreadPoolExecutor(1)

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
        future = self._thread.submit(self._at, self._ticks.next(), output)
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        raise RuntimeError("a step's output has its tokens already")

    def _at(self, tick: int, output: ModelRunnerOutput) -> ModelRunnerOutput:
        self._ticks.wait_for(tick)
        return output


def _done(output: ModelRunnerOutput) -> Future[ModelRunnerOutput]:
    future: Future[ModelRunnerOutput] = Future()
    future.set_result(output)
    return future


if __name__ == "__main__":  # its engine process imports this file by its name
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.argv[1:] += ["--distributed-executor-backend", "fixed_rate_vllm.FixedRateExecutor"]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
