"""The workload on cuengine's own `LLM`, offline."""

from __future__ import annotations

import time

from workload import Result, read_workload, seconds_since_start, warm_up_prompt, write_results

from cuengine import LLM, SamplingParams


def main() -> None:
    workload = read_workload()
    llm = LLM(
        workload.model,
        skip_tokenizer_init=True,
        max_model_len=max(2048, workload.longest),
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=count) for count in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    generate([warm_up_prompt(workload)], [4])
    load_seconds = seconds_since_start()
    steps_before = llm.stats().num_steps
    started = time.perf_counter()
    tokens = generate(workload.prompts, workload.max_tokens)
    seconds = time.perf_counter() - started
    steps = llm.stats().num_steps - steps_before
    mean_batch = sum(workload.max_tokens) / steps
    write_results([Result("cuengine", load_seconds, seconds, tokens, steps, mean_batch, "float32")])


if __name__ == "__main__":
    main()
