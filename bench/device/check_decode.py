"""Part (c): one decode step of a random Llama-3-8B-shaped model, over the bytes that it must read.

Those are all weights but the embedding's other rows, and the keys and values of every sequence;
the floor is their number over the copy bandwidth. A step is what the engine does in it: index
arrays in, forward pass, sampling, tokens out, the next step launched before the tokens of this one
are fetched. Graphs first, then every launch by itself.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from check_rates import copy_bandwidth
from check_report import Report
from check_target import Target, make_batch, random_cache
from random_model import LLAMA_3_8B, TINY, random_checkpoint

from cuengine.batch import PendingOutput, SamplingBatch
from cuengine.device.interface import StepLimits
from cuengine.model.config import read_model_config
from cuengine.model.layout import outer_parts
from cuengine.model.llama import Llama
from cuengine.model.loader import load_weights, weight_bytes
from cuengine.model_runner import ModelRunner

AT_MOST = {1: 1.25, 64: 1.4}
"""Times the floor, with graphs."""

ITEM = 2


def run(target: Target, report: Report) -> None:
    bandwidth = copy_bandwidth(target)
    report.measure("copy bandwidth", bandwidth / 1e12, "TB/s")
    config_json, batches, context = (LLAMA_3_8B, (1, 16, 64, 128), 1024)
    if target.dry:
        config_json, batches, context = (TINY, (2,), 20)
    limits = StepLimits(
        max_num_batched_tokens=512, max_num_seqs=max(batches), max_model_len=2 * context
    )
    device = target.device("bfloat16", limits, use_graphs=True)
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        random_checkpoint(config_json, target.seed, Path(folder)) as path,
    ):
        config = read_model_config(path)
        weights = load_weights(
            path, config, device, max_model_len=limits.max_model_len, progress=False
        )
    device.runtime.synchronize()
    report.measure("weights to the device", time.perf_counter() - started, "s")
    embedding = outer_parts(config)["embedding"].shape
    read = weight_bytes(config, ITEM) - ITEM * embedding[0] * embedding[1]
    per_token = 2 * ITEM * config.num_layers * config.num_kv_heads * config.head_dim
    blocks = max(batches) * -(-context // limits.block_size)
    random = target.random(3)

    for use_graphs in (True, False):
        way = "graph" if use_graphs else "eager"
        if not use_graphs:
            device = target.device("bfloat16", limits, use_graphs=False)
        llama = Llama(config, weights, device)
        device.prepare(llama.attention_shape)
        cache = random_cache(
            device, config.num_layers, blocks, limits.block_size, llama.attention_shape, random
        )
        runner = ModelRunner(llama, cache)
        for count in batches:
            with report.trying(f"decode step, batch {count}, {way}"):
                tables = random.permutation(blocks).astype(np.int32)
                width = -(-context // limits.block_size)
                batch = make_batch(
                    tables[: count * width].reshape(count, width),
                    [1] * count, [context] * count, limits.block_size,
                    token_ids=random.integers(3, config.vocab_size, count).astype(np.int32),
                )  # fmt: skip
                seconds = _step_seconds(runner, batch, dry=target.dry)
                moved = read + count * (context * per_token + ITEM * embedding[1])
                floor = moved / bandwidth
                limit = None if target.dry or not use_graphs else AT_MOST.get(count)
                report.measure(
                    f"decode step, batch {count}, context {context}, {way}",
                    seconds / floor,
                    "x floor",
                    at_most=limit,
                    note=f"{seconds * 1e3:.3f} ms, floor {floor * 1e3:.3f} ms, "
                    f"{count / seconds:,.0f} tokens/s",
                )
        # Gone before the next one is made.
        runner.kv_cache = cache = None


def _step_seconds(runner: ModelRunner, batch: Any, *, dry: bool) -> float:
    sampling = SamplingBatch.greedy(len(batch.seq_lens))

    def steps(number: int) -> float:
        started = time.perf_counter()
        pending: PendingOutput | None = None
        for _ in range(number):
            latest = runner.run(batch, sampling)
            if pending is not None:
                pending.fetch()
            pending = latest
        assert pending is not None
        pending.fetch()
        return (time.perf_counter() - started) / number

    if dry:
        return steps(2)
    steps(5)
    return min(steps(30) for _ in range(3))
