"""The workload of check_throughput.py on transformers: bfloat16, SDPA, static batches.

    python transformers_trace.py WORKLOAD.json RESULTS.json

A batch is padded on the left to its longest prompt and runs until its longest output is done; what
the others make past their end is dropped. Twice: 16 requests a batch in order of arrival; then
sorted by output length, with the best of several batch sizes whose largest batch fits, which no
server can do, as it does not know the lengths. Neither runs to its end in the time there is: some
batches, evenly chosen, are timed, and the others taken to need as long for each of their steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from random_model import Pool
from static_batches import batches_of, spread
from transformers import AutoConfig, AutoModelForCausalLM

ARRIVAL_BATCH = 16
SORTED_BATCHES = (32, 64, 96)


def main() -> None:
    workload = json.loads(Path(sys.argv[1]).read_text())
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    bench = Bench(make_model(workload["config"], workload["seed"], device), workload, device)
    print(f"transformers {transformers.__version__}: {time.perf_counter() - started:.1f} s to load")
    with torch.inference_mode():
        Path(sys.argv[2]).write_text(json.dumps({"results": bench.run(workload["seconds"])}))


def make_model(config: dict[str, Any], seed: int, device: str) -> Any:
    settings = dict(config)
    # Both spellings, for transformers 4 and 5.
    rope = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    settings |= {"rope_parameters": rope}
    settings.pop("dtype")
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            made, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    pool = Pool(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            bits = pool.tensor(name, tuple(parameter.shape)).view(np.int16)
            parameter.copy_(torch.from_numpy(bits).view(torch.bfloat16))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Bench:
    def __init__(self, model: Any, workload: dict[str, Any], device: str) -> None:
        self.model, self.device = model, device
        self.prompts: list[list[int]] = workload["prompts"]
        self.max_tokens: list[int] = workload["max_tokens"]
        config = workload["config"]
        self.token_bytes = (
            4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        )

    def run(self, seconds: float) -> list[dict[str, Any]]:
        """Half of the time for each order; of the sorted one only the best size is reported."""
        arrival = list(range(len(self.prompts)))
        by_length = sorted(arrival, key=lambda i: (self.max_tokens[i], len(self.prompts[i])))
        first = self.measure("transformers, arrival", arrival, ARRIVAL_BATCH, seconds / 2)
        sizes = [size for size in SORTED_BATCHES if self.fits(by_length, size)]
        found = [
            self.measure("transformers, sorted", by_length, size, seconds / 2 / len(sizes))
            for size in sizes
        ]
        best = max(found, key=lambda result: result["tokens_per_second"])
        return [first | {"limit": True}, best | {"limit": False}]

    def fits(self, order: list[int], size: int) -> bool:
        """Whether the largest batch's keys and values, and as much again for what comes and goes,
        find room. The smallest size always goes."""
        if size == SORTED_BATCHES[0]:
            return True
        if self.device == "cpu":
            return False
        free, _ = torch.cuda.mem_get_info()
        tokens = max(len(batch) * self.width(batch) for batch in batches_of(order, size))
        return tokens * self.token_bytes * 1.2 < free

    def width(self, batch: list[int]) -> int:
        return max(len(self.prompts[i]) for i in batch) + self.steps(batch)

    def steps(self, batch: list[int]) -> int:
        return max(self.max_tokens[i] for i in batch)

    def measure(self, name: str, order: list[int], size: int, seconds: float) -> dict[str, Any]:
        batches = batches_of(order, size)
        self.generate(batches[0], 4)
        run, timed, steps = 0, 0.0, 0
        firsts: dict[int, int] = {}
        for index in spread(len(batches)):
            started = time.perf_counter()
            rows = self.generate(batches[index], self.steps(batches[index]))
            firsts |= {i: row[0] for i, row in zip(batches[index], rows, strict=True)}
            timed += time.perf_counter() - started
            steps += self.steps(batches[index])
            run += 1
            if timed >= seconds:
                break
        whole = timed / steps * sum(map(self.steps, batches))
        note = (
            f"batches of {size}, {run} of {len(batches)} timed, {1e3 * timed / steps:.1f} ms/step"
        )
        print(f"{name}: {note}", flush=True)
        return {
            "name": name,
            "tokens_per_second": sum(self.max_tokens) / whole,
            "note": note,
            "first_tokens": firsts,
        }

    def generate(self, batch: list[int], num_tokens: int) -> list[list[int]]:
        """All are on the host when it returns."""
        prompts = [self.prompts[i] for i in batch]
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            do_sample=False,
            max_new_tokens=num_tokens,
        )
        rows: list[list[int]] = out[:, width:].tolist()
        if any(len(row) != num_tokens for row in rows):
            raise RuntimeError(f"{len(rows[0])} tokens, not {num_tokens}")
        return rows


if __name__ == "__main__":
    main()
