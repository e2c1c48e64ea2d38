"""Time of each operation of the CPU device, kernels in Numba beside those in NumPy.

    python bench/cpu_ops.py [--rows 1,8,24,48,256] [--context 300]

Shapes are SmolLM2-135M's. Each operation goes through several copies of its weights or cache, more
than the last-level cache holds, as a model's layers do. The least of many runs is reported: the
machine may have other work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cuengine.batch import Batch, SamplingBatch
from cuengine.device.cpu import CpuDevice
from cuengine.device.interface import AttentionShape

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 576, 1536, 49152, 30
SHAPE = AttentionShape(9, 3, 64, 0.125)
BLOCK_SIZE = 16
COPIES = 6


def least(operation: Callable[[int], object], runs: int = 40) -> float:
    """Milliseconds of the fastest of many runs; operation is given the number of its run."""
    times = []
    for run in range(runs):
        start = time.perf_counter()
        operation(run % COPIES)
        times.append(time.perf_counter() - start)
    return min(times[COPIES:]) * 1e3


def decode_batch(rows: int, context: int) -> Batch:
    blocks = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    last = context - 1
    return Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.full(rows, last, np.int32),
        slot_mapping=tables[:, -1].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables=tables.astype(np.int32),
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.full(rows, context, np.int32),
        logits_indices=np.arange(rows, dtype=np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )


def sampling_batch(rows: int, temperature: float, top_p: float) -> SamplingBatch:
    return replace(
        SamplingBatch.greedy(rows),
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
    )


def measure(device: CpuDevice, rows: int, context: int) -> dict[str, tuple[float, int]]:
    """Milliseconds of each operation, and how often a step does it."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    batch = decode_batch(rows, context)
    caches = [normal(2, batch.block_tables.size, 3, BLOCK_SIZE, 64) for _ in range(COPIES)]
    x, residual, gate_up = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(rows, 3072)
    norm, cos_sin, q = normal(HIDDEN), normal(context, 64), normal(rows, HIDDEN)
    results = {}
    for name, shape in {
        "qkv": (960, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
        "logits": (VOCAB, HIDDEN),
    }.items():
        matrices = [device.upload_matrix(normal(*shape)) for _ in range(COPIES)]
        inputs = normal(rows, shape[1])
        time_taken = least(lambda i, m=matrices, v=inputs: device.linear(v, m[i]))
        results[name] = (time_taken, 1 if name == "logits" else LAYERS)
    qkv = normal(rows, 960)
    results["rope"] = (
        least(lambda i: device.rotary_cache(qkv, cos_sin, caches[i], batch, SHAPE)),
        LAYERS,
    )
    results["attention"] = (
        least(lambda i: device.paged_attention(q, caches[i], batch, SHAPE)),
        LAYERS,
    )
    results["add+norm"] = (
        least(lambda _: device.add_rms_norm(x, residual, norm, 1e-5)),
        2 * LAYERS,
    )
    results["silu*mul"] = (least(lambda _: device.silu_mul(gate_up)), LAYERS)
    logits = normal(rows, VOCAB) * 3
    for name, temperature, top_p in (
        ("greedy", 0.0, 1.0),
        ("temperature", 0.8, 1.0),
        ("top-p", 0.8, 0.9),
    ):
        sampling = sampling_batch(rows, temperature, top_p)
        times = least(lambda _, s=sampling: device.sample(logits, s), 15)
        results[name] = (times, int(name == "greedy"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,24,48", help="sequences in a step")
    parser.add_argument("--context", type=int, default=300, help="tokens of each")
    arguments = parser.parse_args()
    devices = {kind: CpuDevice(use_numba=kind == "Numba") for kind in ("NumPy", "Numba")}
    for rows in map(int, arguments.rows.split(",")):
        print(f"\n{rows} sequences of {arguments.context} tokens; ms a call")
        both = {kind: measure(device, rows, arguments.context) for kind, device in devices.items()}
        for name, (numpy_time, times) in both["NumPy"].items():
            numba_time = both["Numba"][name][0]
            ratio = numpy_time / numba_time
            columns = f"NumPy {numpy_time:9.3f}  Numba {numba_time:9.3f}  {ratio:5.1f}"
            print(f"{name:12} x{times:<3} {columns}")
        sums = {
            kind: sum(taken * times for taken, times in results.values())
            for kind, results in both.items()
        }
        print(
            f"{'step':16} NumPy {sums['NumPy']:9.1f}  Numba {sums['Numba']:9.1f}  "
            f"{sums['NumPy'] / sums['Numba']:5.1f}"
        )


if __name__ == "__main__":
    main()
