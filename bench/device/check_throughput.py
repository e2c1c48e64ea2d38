"""Part (d): output tokens per second on a trace of real request lengths, beside transformers.

A random Llama-2-7B-shaped model in bfloat16, the same weights in both, greedy, past any end of
text. cuengine has all requests at once and goes through the trace twice, the second time with other
prompts: graphs are captured in the first. transformers (transformers_trace.py, a process of its
own) has static batches, of which it runs as many as its time allows.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from check_report import Report, Row
from check_target import Target
from random_model import LLAMA_2_7B, TINY, random_checkpoint

from cuengine import LLM, SamplingParams

TRACE = Path(__file__).resolve().parent.parent / "data" / "sharegpt_lengths.json"
TIMES_TRANSFORMERS = 14
TRANSFORMERS_SECONDS = 50
"""For transformers' batches; its start and weights come on top."""


def run(target: Target, report: Report) -> None:
    config = TINY if target.dry else LLAMA_2_7B
    requests: list[tuple[int, int]] = json.loads(TRACE.read_text())["requests"][:512]
    if target.dry:
        requests = [(min(prompt, 20), min(output, 4)) for prompt, output in requests[:3]]
    max_tokens = [output for _, output in requests]
    prompts = _prompts(requests, config["vocab_size"], target.seed)
    report.measure("requests", len(requests), "", note=f"{sum(max_tokens)} output tokens")

    # First, while this process holds no memory of the GPU.
    others: dict[str, Any] = {}
    with report.trying("transformers"):
        others = _transformers(target, config, prompts, max_tokens)
    for result in others.get("results", []):
        report.measure(result["name"], result["tokens_per_second"], "tokens/s", note=result["note"])
    if reason := others.get("skipped"):
        report.add(Row("transformers", note=f"left out: {reason}"))

    with (
        tempfile.TemporaryDirectory() as folder,
        random_checkpoint(config, target.seed, Path(folder)) as path,
    ):
        started = time.perf_counter()
        llm = LLM(
            str(path),
            device=target.device_name,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=64 if target.dry else 2048,
            max_num_seqs=4 if target.dry else 256,
            max_num_batched_tokens=32 if target.dry else 2048,
            kv_cache_memory=2**20 if target.dry else None,
        )
        report.measure("start of cuengine", time.perf_counter() - started, "s")
        warm_up = _prompts(requests, config["vocab_size"], target.seed + 1)
        first, _ = _generate(llm, warm_up, max_tokens)
        report.measure("cuengine, first time", sum(max_tokens) / first, "tokens/s")
        steps = llm.stats().num_steps
        seconds, tokens = _generate(llm, prompts, max_tokens)
        steps = llm.stats().num_steps - steps
        speed = sum(max_tokens) / seconds
        report.measure(
            "cuengine", speed, "tokens/s",
            note=f"{seconds:.1f} s, {steps} steps, {1e3 * seconds / steps:.2f} ms a step",
        )  # fmt: skip
    for result in others.get("results", []):
        firsts = {int(index): token for index, token in result["first_tokens"].items()}
        same = sum(tokens[index][0] == token for index, token in firsts.items())
        # In bfloat16 some of the most likely tokens differ; with other weights, all but a few do.
        report.measure(
            f"same first token as {result['name']}", 100 * same / len(firsts), "%", at_least=50
        )
        wanted = TIMES_TRANSFORMERS if result["limit"] and not target.dry else None
        report.measure(
            f"cuengine / {result['name']}", speed / result["tokens_per_second"], "x",
            at_least=wanted,
        )  # fmt: skip


def _prompts(requests: Sequence[tuple[int, int]], vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(3, vocab), k=prompt) for prompt, _ in requests]


def _generate(
    llm: LLM, prompts: list[list[int]], max_tokens: list[int]
) -> tuple[float, list[list[int]]]:
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in max_tokens]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    seconds = time.perf_counter() - started
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    if [len(ids) for ids in tokens] != max_tokens:
        raise RuntimeError("outputs are not as long as asked for")
    return seconds, tokens


def _transformers(
    target: Target, config: dict[str, Any], prompts: list[list[int]], max_tokens: list[int]
) -> dict[str, Any]:
    """{"results": [...]} of transformers_trace.py, or {"skipped": why}."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            return {"skipped": f"no {module} here"}
    with tempfile.TemporaryDirectory() as folder:
        workload, results = Path(folder) / "workload.json", Path(folder) / "results.json"
        content = {
            "config": config,
            "seed": target.seed,
            "prompts": prompts,
            "max_tokens": max_tokens,
            "seconds": 1 if target.dry else TRANSFORMERS_SECONDS,
        }
        workload.write_text(json.dumps(content))
        script = Path(__file__).with_name("transformers_trace.py")
        subprocess.run([sys.executable, script, workload, results], check=True, timeout=240)
        found: dict[str, Any] = json.loads(results.read_text())
        return found
