"""The workload on vLLM's CPU build: float32, every core, offline."""

from __future__ import annotations

import os
import time

from workload import Result, read_workload, seconds_since_start, warm_up_prompt, write_results

KV_CACHE_GIB = "4"


def main() -> None:
    workload = read_workload()
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    eager = os.environ.get("CUENGINE_BENCH_VLLM_EAGER", "0") == "1"

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=workload.model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=max(2048, workload.longest),
        max_num_seqs=max(48, len(workload.prompts)),
        enforce_eager=eager,
        seed=0,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in max_tokens
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    generate([warm_up_prompt(workload)], [4])
    load_seconds = seconds_since_start()
    started = time.perf_counter()
    tokens = generate(workload.prompts, workload.max_tokens)
    seconds = time.perf_counter() - started
    settings = f"float32, cores {cores}, {'eager' if eager else 'compiled'}"
    write_results([Result("vllm", load_seconds, seconds, tokens, settings=settings)])


if __name__ == "__main__":  # vLLM spawns its engine process, which imports this file
    main()
