"""The workload on transformers: SDPA, float32, static batches.

What iteration-level scheduling is measured against: a batch is padded on the left to its longest
prompt and runs until its longest output is done; what the others produce past their end is dropped.
Twice: 16 requests a batch in order of arrival ("hf"), then sorted by output length with the best
of several batch sizes ("hf-sorted"), which no server can do: it doesn't know the lengths. The best
size is the one that a batch from the middle, run for a few tokens, promises the least time for.
"""

from __future__ import annotations

import os
import time

import torch
import transformers
from transformers import AutoModelForCausalLM
from workload import Result, read_workload, seconds_since_start, warm_up_prompt, write_results

ARRIVAL_BATCH = 16
SORTED_BATCHES = (16, 24, 48)
TRIAL_TOKENS = 12


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    workload = read_workload()
    model = AutoModelForCausalLM.from_pretrained(
        workload.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
        return [list(row) for row in out[:, width:].tolist()]

    def expected_seconds(order: list[int], batch_size: int) -> float:
        """Of all batches, if each step takes as long as those of a batch from the middle."""
        middle = len(order) // 2 // batch_size * batch_size
        prompts = [workload.prompts[i] for i in order[middle : middle + batch_size]]
        started = time.perf_counter()
        generate(prompts, TRIAL_TOKENS)
        step = (time.perf_counter() - started) / TRIAL_TOKENS
        starts = range(0, len(order), batch_size)
        return step * sum(longest(order[start : start + batch_size]) for start in starts)

    def longest(batch: list[int]) -> int:
        return max(workload.max_tokens[i] for i in batch)

    def run(name: str, order: list[int], batch_size: int, load_seconds: float) -> Result:
        tokens: list[list[int]] = [[] for _ in order]
        steps = 0
        started = time.perf_counter()
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = generate([workload.prompts[i] for i in batch], longest(batch))
            for i, row in zip(batch, rows, strict=True):
                tokens[i] = row[: workload.max_tokens[i]]
            steps += longest(batch)
        seconds = time.perf_counter() - started
        mean_batch = sum(workload.max_tokens) / steps
        settings = f"float32, SDPA, batches of {batch_size}, {torch.get_num_threads()} threads"
        return Result(name, load_seconds, seconds, tokens, steps, mean_batch, settings)

    with torch.inference_mode():
        generate([warm_up_prompt(workload)], 4)
        load_seconds = seconds_since_start()
        arrival = list(range(len(workload.prompts)))
        by_length = sorted(
            arrival, key=lambda i: (workload.max_tokens[i], len(workload.prompts[i]))
        )
        first = run("hf", arrival, ARRIVAL_BATCH, load_seconds)
        best = min(SORTED_BATCHES, key=lambda size: expected_seconds(by_length, size))
        write_results([first, run("hf-sorted", by_length, best, load_seconds)])


if __name__ == "__main__":
    main()
