"""Part (a): every kernel against the oracle, with random data that is new at each run.

Operations are called as the model calls them. The formulas are those of the tests
(tests/kernels/oracles.py), in float64; the sampler's oracle is the CPU device's, whose random
numbers are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracles
from check_report import Report, Row
from check_target import (
    DTYPES,
    Array,
    Deadline,
    Target,
    attention_shape,
    fill_cache,
    make_batch,
    normal,
    write_new_tokens,
)

from cuengine.batch import SamplingBatch
from cuengine.device.cpu import CpuDevice
from cuengine.device.cuda.device import CudaDevice
from cuengine.device.interface import AttentionShape, StepLimits
from cuengine.device.kernel_cache import get_kernels
from cuengine.device.kernel_variants import HEAD_DIMS, programs, uses_tensor_cores

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""What rounding to the type changes at most, relatively."""

SINGLE = 2.0**-20
"""Some roundings of float32, of the largest term that a result is the sum of."""

CASES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 300), (1, 1029)],
    "decode, one long": [(1, 4500)],
    "verification": [(3, 70), (8, 33), (1, 129)],
    "prefill": [(40, 40), (300, 300), (129, 700), (9, 9)],
    "mixed": [(1, 65), (2, 40), (77, 300), (1, 513), (16, 16)],
}
"""(queries, tokens in the cache) of each sequence."""

DRY_CASES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (1, 16), (1, 37)],
    "mixed": [(1, 19), (2, 20), (17, 40)],
}


def run(target: Target, report: Report) -> None:
    """Most used variants first; no new one is begun after two minutes."""
    deadline = Deadline(120)
    dry = target.dry
    dtypes = ("float32", "bfloat16") if dry else ("bfloat16", "float16", "float32")
    head_dims = (16,) if dry else (128, 64, *(d for d in HEAD_DIMS if d not in (64, 128)))
    if not dry:
        _compile_all(target, report, dtypes, head_dims)
    for index, head_dim in enumerate(head_dims):
        for dtype in dtypes:
            if deadline.passed:
                report.add(Row(f"{dtype}, head_dim {head_dim}", ok=False, note="no time left"))
                continue
            with report.trying(f"{dtype}, head_dim {head_dim}"):
                check = _Check(target, report, dtype, head_dim)
                if index == 0:
                    check.elementwise()
                    check.products()
                    check.blocks()
                check.rotary()
                for name, sequences in (DRY_CASES if dry else CASES).items():
                    check.attention(name, sequences)
    with report.trying("sampling"):
        _sampling(target, report)


def _compile_all(
    target: Target, report: Report, dtypes: Sequence[str], head_dims: Sequence[int]
) -> None:
    """Into the cache, all at once, on all cores; what was built ahead is only looked up."""
    architecture = target.runtime.architecture
    wanted = {
        program.name: program
        for head_dim in head_dims
        for dtype in dtypes
        for program in programs(dtype, head_dim, architecture)
    }
    started = time.perf_counter()
    with report.trying("compilation"), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda program: get_kernels(program, architecture), wanted.values()))
    report.measure(f"compilation of {len(wanted)} programs", time.perf_counter() - started, "s")


class _Check:
    """The operations of one device; each method adds one row for each kernel."""

    def __init__(self, target: Target, report: Report, dtype: str, head_dim: int) -> None:
        self.target, self.report, self.dtype, self.head_dim = target, report, dtype, head_dim
        self.unit = UNIT[dtype]
        self.random = target.random(list(DTYPES).index(dtype), head_dim)
        limits = StepLimits(max_num_batched_tokens=1024, max_num_seqs=16, max_model_len=8192)
        if target.dry:
            limits = StepLimits(max_num_batched_tokens=128, max_num_seqs=8, max_model_len=256)
        self.size = limits.block_size
        self.device: CudaDevice = target.device(dtype, limits)
        # A GQA ratio that fills no tile of rows evenly, and one for the small head sizes.
        self.shape: AttentionShape = attention_shape(*((6, 2) if target.dry else (12, 4)), head_dim)
        self.device.prepare(self.shape)

    def close(self, name: str, actual: Array, expected: Array, bound: Array | float) -> None:
        """One row: the largest error as a part of what roundings may come to."""
        if actual.shape != expected.shape:
            raise ValueError(f"{name}: shape {actual.shape}, not {expected.shape}")
        error = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        # NaN is no number below a bound.
        ratio = np.where(error <= bound, error / bound, np.inf) if error.size else np.zeros(1)
        fine = bool((error <= bound).all())
        worst = float(np.where(np.isfinite(ratio), ratio, 0).max())
        note = "" if fine else f"{int((~(error <= bound)).sum())} of {error.size} are wrong"
        value = worst if fine else float(np.nan_to_num((error / bound).max(), nan=1e9, posinf=1e9))
        label = f"{name}, {self.dtype}"
        self.report.add(Row(label, value, "of bound", "at most 1", fine, note))

    def rounded(self, expected: Array) -> Array:
        """Bound of a result of float32 arithmetic that is rounded once."""
        return (self.unit + SINGLE) * np.abs(expected) + 2.0**-24

    def elementwise(self) -> None:
        device, random = self.device, self.random
        rows, width = (5, 128) if self.target.dry else (131, 2560)
        x, residual = (normal(random, (rows, width), self.dtype, s) for s in (2, 3))
        weight, gate_up = (
            normal(random, shape, self.dtype) for shape in ((width,), (rows, 2 * width))
        )
        on_device = device.upload(x)
        out = device.download(device.rms_norm(on_device, device.upload(weight), 1e-5))
        expected = oracles.rms_norm(x, weight, 1e-5)
        self.close("rms_norm", out, expected, self.rounded(expected))

        summed = device.upload(residual)
        out = device.download(device.add_rms_norm(on_device, summed, device.upload(weight), 1e-5))
        total = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
        expected = oracles.rms_norm(total, weight, 1e-5)
        self.close("add_rms_norm", out, expected, self.rounded(expected))
        self.close("add_rms_norm, residual", device.download(summed), total, 2.0**-30)

        out = device.download(device.silu_mul(device.upload(gate_up)))
        expected = oracles.silu_mul(gate_up)
        self.close("silu_mul", out, expected, self.rounded(expected))

        ids = random.integers(0, rows, 40 if self.target.dry else 300).astype(np.int32)
        device.allocate_kv_cache(1, len(ids) // self.size + 1, self.size, self.shape)
        tables = np.arange(len(ids) // self.size + 1, dtype=np.int32)[None]
        wanted = random.integers(0, len(ids), 7).astype(np.int32)
        batch = make_batch(
            tables, [len(ids)], [len(ids)], self.size, token_ids=ids, logits_indices=wanted
        )
        staged = device.stage(batch)
        embedded = device.embedding(on_device, staged)
        self.close("embedding", device.download(embedded), x[ids], 2.0**-30)
        out = device.download(device.take_rows(embedded, staged))
        self.close("take_rows", out, x[ids][wanted], 2.0**-30)

    def products(self) -> None:
        """cuBLAS through our binding; and broadcast_row, which brings the bias."""
        device, random = self.device, self.random
        depth, width = (64, 40) if self.target.dry else (1536, 768)
        for rows in (1, 7) if self.target.dry else (1, 7, 300):
            x = normal(random, (rows, depth), self.dtype)
            weight = normal(random, (width, depth), self.dtype)
            bias = normal(random, (width,), self.dtype)
            products = x.astype(np.float64) @ weight.astype(np.float64).T
            # Sums of `depth` products in float32, in whatever order; tensor cores cut off what is
            # below a sum's last bit. TF32 would be off by 2^-11 * sqrt(depth).
            unit = 2.0**-17 if self.dtype == "float32" else 2.0**-14
            bound = unit * np.sqrt(depth) + np.abs(products) * 2.0**-20
            x_there, w_there = device.upload(x), device.upload_matrix(weight)
            if rows <= 24:
                out = device.download(device.logits(x_there, w_there))
                self.close(f"logits [{rows}, {depth}]", out, products, bound)
            out = device.download(device.linear(x_there, w_there, device.upload(bias)))
            expected = products + bias.astype(np.float64)
            # The bias goes in and the sum comes out in the type.
            self.close(
                f"linear with bias [{rows}, {depth}]",
                out,
                expected,
                bound + self.unit * np.abs(expected),
            )

    def blocks(self) -> None:
        """Copies within the cache, to the host's and back: exact."""
        device, random, size = self.device, self.random, self.size
        layers, blocks = 3, 9
        cache = device.allocate_kv_cache(layers, blocks, size, self.shape)
        content = normal(random, cache.shape, self.dtype)
        host = device.allocate_host_cache(layers, 4, size, self.shape)
        host[...] = normal(random, host.shape, self.dtype)
        expected, expected_host = content.copy(), host.copy()

        def pairs(*numbers: tuple[int, int]) -> Array:
            return np.array(numbers, np.int32)

        fill_cache(device.runtime, cache, content)
        batch = make_batch(
            np.array([[8]], np.int32), [1], [1], size,
            swap_outs=pairs((7, 1), (0, 3)), block_copies=pairs((1, 5), (2, 6), (1, 7)),
            swap_ins=pairs((0, 0), (2, 4)),
        )  # fmt: skip
        staged = device.stage(batch)
        device.swap_out(cache, host, staged)
        device.copy_blocks(cache, staged)
        device.swap_in(cache, host, staged)
        device.runtime.synchronize()
        for source, to in ((7, 1), (0, 3)):
            expected_host[:, :, to] = expected[:, :, source]
        for source, to in ((1, 5), (2, 6), (1, 7)):
            expected[:, :, to] = expected[:, :, source]
        for source, to in ((0, 0), (2, 4)):
            expected[:, :, to] = expected_host[:, :, source]
        actual = self._whole(cache)
        # Blocks of nobody may not be read back on the emulator; on a GPU all are compared.
        owned = slice(None) if not self.target.dry else [0, 4, 5, 6, 7]
        self.close("copy_blocks, swap_blocks", actual[:, :, owned], expected[:, :, owned], 2.0**-30)
        self.close("swap_blocks to the host", host, expected_host, 2.0**-30)

    def _whole(self, cache: object) -> Array:
        """The cache on the host, whatever the emulator guards."""
        device = self.device
        if self.target.dry:
            values: Array = cache.values  # type: ignore[attr-defined]
            return values.copy()
        return device.download(cache)

    def rotary(self) -> None:
        device, random, shape, size = self.device, self.random, self.shape, self.size
        counts, lengths = ([3, 20], [3, 30]) if self.target.dry else ([1, 200, 60], [90, 200, 333])
        blocks = [-(-length // size) for length in lengths]
        tables = _shuffled_tables(random, blocks)
        cache = device.allocate_kv_cache(1, sum(blocks) + 2, size, shape)
        before = normal(random, cache.shape, self.dtype)
        fill_cache(device.runtime, cache, before)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        qkv = normal(random, (sum(counts), heads * shape.head_dim), self.dtype, 2)
        angles = random.uniform(-3, 3, (max(lengths), shape.head_dim // 2))
        cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        batch = make_batch(tables, counts, lengths, size)
        staged = device.stage(batch)
        out = device.rotary_cache(
            device.upload(qkv), device.upload(cos_sin), cache[0], staged, shape
        )
        wide = qkv.reshape(sum(counts), heads, shape.head_dim)
        cos, sin = np.split(cos_sin[batch.positions], 2, axis=1)
        turned = oracles.rotate(wide[:, : shape.num_heads + shape.num_kv_heads], cos, sin)
        # Two products, and what cancels between them.
        bound = self.unit * np.abs(turned) + SINGLE * 16
        num_heads = shape.num_heads
        actual = device.download(out).reshape(sum(counts), num_heads, shape.head_dim)
        name = f"rotary_cache, head_dim {shape.head_dim}"
        self.close(f"{name}, q", actual, turned[:, :num_heads], bound[:, :num_heads])

        block, offset = np.divmod(batch.slot_mapping, size)
        written = self._whole(cache)[0]
        keys, values = (written[part][block, :, offset] for part in range(2))
        self.close(f"{name}, k", keys, turned[:, num_heads:], bound[:, num_heads:])
        expected = wide[:, num_heads + shape.num_kv_heads :]
        self.close(f"{name}, v", values, expected, 2.0**-30)
        rest = before[0].copy()
        rest[:, block, :, offset] = written[:, block, :, offset]
        same = bool(np.array_equal(written.view(np.uint8), rest.view(np.uint8)))
        self.report.add(Row(f"{name}, the rest of the cache, {self.dtype}", ok=same))

    def attention(self, name: str, sequences: list[tuple[int, int]]) -> None:
        """NaN in every slot that belongs to no sequence: whoever reads one, shows it."""
        device, random, shape, size = self.device, self.random, self.shape, self.size
        counts, lengths = [n for n, _ in sequences], [length for _, length in sequences]
        blocks = [-(-length // size) for length in lengths]
        tables = _shuffled_tables(random, blocks)
        cache = device.allocate_kv_cache(1, sum(blocks) + 2, size, shape)
        content = np.full(cache.shape, np.nan, DTYPES[self.dtype])
        q = normal(random, (sum(counts), shape.num_heads, shape.head_dim), self.dtype)
        out, magnitude = np.empty(q.shape), np.empty(q.shape)
        new: list[Array] = []
        first = 0
        for row, (count, length) in enumerate(sequences):
            pair = normal(random, (2, length, shape.num_kv_heads, shape.head_dim), self.dtype)
            slots = np.arange(length)
            content[0][:, tables[row, slots // size], :, slots % size] = pair.swapaxes(0, 1)
            new.append(pair[:, length - count :])
            found = oracles.attention(q[first : first + count], pair[0], pair[1], shape.scale)
            out[first : first + count] = found.out
            magnitude[first : first + count] = found.magnitude
            first += count
        fill_cache(device.runtime, cache, content)
        staged = device.stage(make_batch(tables, counts, lengths, size))
        # The newest tokens' come in the step itself.
        qkv = np.concatenate([q, *np.concatenate(new, axis=1)], axis=1).reshape(len(q), -1)
        queries = write_new_tokens(device, cache, staged, shape, qkv)
        result = device.download(device.paged_attention(queries, cache[0], staged, shape))
        # As tests/kernels/paged_cases.py derives it: weights and the result each rounded once.
        tensor_cores = uses_tensor_cores(self.dtype, device.runtime.architecture)
        weights = self.unit if tensor_cores else 0
        bound = (weights + 2.0**-16) * magnitude + self.unit * np.abs(out) + 2.0**-19
        label = f"attention, {name}, head_dim {shape.head_dim}"
        self.close(label, result.reshape(q.shape), out, bound)


def _shuffled_tables(random: np.random.Generator, blocks: list[int]) -> Array:
    """int32 [num_seqs, widest]: blocks in no order, and two that nobody owns."""
    order = random.permutation(sum(blocks) + 2).astype(np.int32)
    tables = np.full((len(blocks), max(blocks)), -1, np.int32)
    used = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[used : used + count]
        used += count
    return tables


def _sampling(target: Target, report: Report) -> None:
    """Penalties, bias, masks, truncation, draws and log-probabilities against the CPU's sampler;
    then the tokens as the next step's inputs."""
    rows, vocab = (6, 500) if target.dry else (96, 50_257)
    random = target.random(99)
    limits = StepLimits(max_num_batched_tokens=128, max_num_seqs=128, max_model_len=256)
    device = target.device("float32", limits)
    shape = attention_shape(4, 2, 16)
    device.prepare(shape)
    logits = normal(random, (rows, vocab), "float32", 3)
    plain = SamplingBatch.greedy(rows)
    plain.num_logprobs[:] = 5
    mixed = _mixed(random, rows, vocab)
    for name, sampling in (("greedy, logprobs", plain), ("mixed", mixed)):
        expected = CpuDevice(use_numba=False).sample(logits.copy(), sampling).fetch()
        actual = device.sample(device.upload(logits), sampling).fetch()
        same = int((actual.token_ids == expected.token_ids).sum())
        # An exponential that is a bit different may move a border between two tokens.
        report.measure(f"sampling, {name}: tokens", same / rows * 100, "% same", at_least=98)
        reported = sampling.num_logprobs >= 0
        drawn = reported & (actual.token_ids == expected.token_ids)
        error = np.abs(actual.logprobs - expected.logprobs)[drawn].max(initial=0)
        ranks = bool((actual.ranks == expected.ranks)[drawn].all())
        tops = bool((actual.top_ids == expected.top_ids)[reported].all())
        report.measure(f"sampling, {name}: log-probabilities", float(error), "off", at_most=1e-4)
        report.add(Row(f"sampling, {name}: ranks and most likely tokens", ok=ranks and tops))

    device.allocate_kv_cache(1, 8, limits.block_size, shape)
    tokens = device.sample(device.upload(logits), plain).fetch().token_ids
    weight = normal(random, (vocab, 64), "float32")
    batch = make_batch(
        np.arange(3, dtype=np.int32)[:, None], [1, 1, 1], [1, 1, 1], limits.block_size,
        token_ids=np.array([0, 7, 0], np.int32), token_sources=np.array([4, -1, 2], np.int32),
    )  # fmt: skip
    out = device.download(device.embedding(device.upload_matrix(weight), device.stage(batch)))
    fine = np.array_equal(out, weight[[tokens[4], 7, tokens[2]]])
    report.add(Row("gather_tokens", ok=fine))


def _mixed(random: np.random.Generator, rows: int, vocab: int) -> SamplingBatch:
    """Every kind of request in one batch."""
    sampling = SamplingBatch.greedy(rows)
    sampling.temperature[:] = random.choice([0.0, 0.3, 1.0, 1.7], rows)
    sampling.top_k[:] = random.choice([0, 1, 20, 200], rows)
    sampling.top_p[:] = random.choice([1.0, 0.9, 0.5], rows)
    sampling.min_p[:] = random.choice([0.0, 0.05], rows)
    sampling.seeds[:] = random.integers(0, 2**63, rows)
    sampling.positions[:] = random.integers(0, 2**31, rows)
    sampling.num_logprobs[:] = random.choice([-1, 0, 4], rows)
    lengths = random.integers(0, 40, rows)
    sampling.prompt_ids = random.integers(0, vocab, lengths.sum()).astype(np.int32)
    sampling.prompt_offsets = np.cumsum([0, *lengths]).astype(np.int32)
    sampling.output_ids = random.integers(0, vocab, lengths.sum()).astype(np.int32)
    sampling.output_offsets = sampling.prompt_offsets.copy()
    sampling.repetition_penalty = random.choice([1.0, 1.3], rows).astype(np.float32)
    sampling.presence_penalty = random.choice([0.0, 0.7], rows).astype(np.float32)
    sampling.frequency_penalty = random.choice([0.0, 0.2], rows).astype(np.float32)
    sampling.bias_rows = np.sort(random.integers(0, rows, 2 * rows)).astype(np.int32)
    sampling.bias_ids = random.permutation(vocab)[: 2 * rows].astype(np.int32)
    sampling.bias_values = random.uniform(-5, 5, 2 * rows).astype(np.float32)
    mask = random.integers(0, 2**32, (rows, -(-vocab // 32)), np.uint32)
    mask[: rows // 2] = 0xFFFFFFFF
    sampling.allowed_mask = mask
    return sampling
