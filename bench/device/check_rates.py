"""Part (b): what the machine can do, and each kernel's share of it.

Copy bandwidth counts the bytes read and written by a copy within device memory; the matrix rate is
that of a square bfloat16 product of cuBLAS. A kernel's bytes are those that it must move, once
each. Layers of the KV cache take turns, so that little of what is read is left in the L2 cache from
the time before; of the shortest contexts some is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from check_report import Report, Row
from check_target import (
    Array,
    Target,
    attention_shape,
    make_batch,
    normal,
    random_cache,
    send,
    write_new_tokens,
)

from cuengine.batch import SamplingBatch
from cuengine.device.cuda.device import CudaDevice
from cuengine.device.cuda.inputs import StagedStep
from cuengine.device.cuda.runtime import DeviceArray
from cuengine.device.interface import StepLimits

DTYPE, ITEM = "bfloat16", 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Heads and widths are Llama-3-8B's, or small ones.

    turn_tokens  tokens that the cache of all layers together holds, where layers take turns
    """

    heads: tuple[int, int, int]
    hidden: int
    intermediate: int
    vocab: int
    copy_bytes: int
    matrix: int
    rows: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    layers: int
    turn_tokens: int


REAL = Sizes(
    heads=(32, 8, 128),
    hidden=4096,
    intermediate=14336,
    vocab=128256,
    copy_bytes=4 * 2**30,
    matrix=8192,
    rows=8192,
    decode=tuple((batch, context) for batch in (1, 8, 64, 256) for context in (512, 4096, 32768)),
    prefill=(1024, 4096, 16384),
    layers=8,
    turn_tokens=8 * 2**20,
)
DRY = Sizes(
    heads=(4, 2, 16),
    hidden=64,
    intermediate=96,
    vocab=256,
    copy_bytes=2**16,
    matrix=64,
    rows=8,
    decode=((2, 40),),
    prefill=(24,),
    layers=2,
    turn_tokens=512,
)

DECODE_SHARE = 80
"""Per cent of the copy bandwidth that decode attention has to reach, from batch 64 and 4096 tokens
on."""

PREFILL_RATE = 300
"""TFLOP/s that prefill attention has to reach on an H200 with 16k tokens."""


def run(target: Target, report: Report) -> None:
    sizes = DRY if target.dry else REAL
    with report.trying("copy bandwidth and matrix rate"):
        ceilings = measure_ceilings(target, sizes)
        report.measure("copy bandwidth", ceilings.bandwidth / 1e12, "TB/s")
        report.measure("bf16 matrix rate", ceilings.rate / 1e12, "TFLOP/s")
        bench = _Bench(target, report, sizes, ceilings)
        with report.trying("rows"):
            bench.elementwise()
        with report.trying("products"):
            bench.products()
        with report.trying("decode attention"):
            bench.decode_attention()
        with report.trying("prefill attention"):
            bench.prefill_attention()
        with report.trying("sampling"):
            bench.sampling()


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bandwidth in bytes a second, rate in operations a second."""

    bandwidth: float
    rate: float


def measure_ceilings(target: Target, sizes: Sizes) -> Ceilings:
    return Ceilings(_bandwidth(target, sizes.copy_bytes), _matrix_rate(target, sizes.matrix))


def copy_bandwidth(target: Target) -> float:
    """Bytes a second, for the parts that need no more."""
    return _bandwidth(target, (DRY if target.dry else REAL).copy_bytes)


def _bandwidth(target: Target, size: int) -> float:
    """The driver's own copy on a GPU; our block copies on the emulator, which has no other."""
    runtime = target.runtime
    if target.dry:
        bench = _Bench(target, None, DRY, Ceilings(1, 1))
        seconds, moved = bench.block_copies()
        return moved / seconds
    source, copy = (runtime.empty((size,), np.dtype(np.uint8)) for _ in range(2))
    import cupy

    cuda = cupy.cuda.runtime
    addresses = runtime.address(copy), runtime.address(source)
    stream = runtime.stream_pointer  # type: ignore[attr-defined]
    cuda.memsetAsync(addresses[1], 0x5A, size, stream)

    def work() -> None:
        cuda.memcpyAsync(*addresses, size, cuda.memcpyDeviceToDevice, stream)

    return 2 * size / target.seconds(work, least=0.2)


def _matrix_rate(target: Target, side: int) -> float:
    runtime, random = target.runtime, target.random(1)
    x, weight, out = (runtime.empty((side, side), _bfloat16()) for _ in range(3))
    for array in (x, weight):
        rows = normal(random, (min(side, 512), side), DTYPE)
        for start in range(0, side, len(rows)):
            send(runtime, array[start : start + len(rows)], rows)
    seconds = target.seconds(lambda: runtime.gemm(out, x, weight), least=0.3)
    return 2 * side**3 / seconds


def _bfloat16() -> np.dtype[np.generic]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


class _Bench:
    def __init__(
        self, target: Target, report: Report | None, sizes: Sizes, ceilings: Ceilings
    ) -> None:
        self.target, self.report, self.sizes, self.ceilings = target, report, sizes, ceilings
        self.random = target.random(2)
        self.shape = attention_shape(*sizes.heads)
        longest = max(*(context for _, context in sizes.decode), *sizes.prefill, 64)
        self.limits = StepLimits(
            max_num_batched_tokens=max(sizes.rows, *sizes.prefill),
            max_num_seqs=max(batch for batch, _ in sizes.decode),
            max_model_len=longest,
        )
        self.size = self.limits.block_size
        self.device: CudaDevice = target.device(DTYPE, self.limits)
        self.device.prepare(self.shape)

    def share(self, name: str, seconds: float, moved: float, at_least: float | None = None) -> None:
        """Of the copy bandwidth."""
        assert self.report is not None
        note = f"{seconds * 1e6:,.1f} us, {moved / seconds / 1e12:.2f} TB/s"
        self.report.measure(
            name,
            100 * moved / seconds / self.ceilings.bandwidth,
            "% of copy",
            at_least=None if self.target.dry else at_least,
            note=note,
        )

    def elementwise(self) -> None:
        device, sizes, random = self.device, self.sizes, self.random
        rows, hidden, inner = sizes.rows, sizes.hidden, sizes.intermediate
        upload, seconds = device.upload, self.target.seconds
        x = upload(normal(random, (rows, hidden), DTYPE))
        residual = upload(normal(random, (rows, hidden), DTYPE))
        weight = upload(normal(random, (hidden,), DTYPE))
        gate_up = upload(normal(random, (rows, 2 * inner), DTYPE))
        line = rows * hidden * ITEM
        self.share("rms_norm", seconds(lambda: device.rms_norm(x, weight, 1e-5)), 2 * line)
        self.share(
            "add_rms_norm",
            seconds(lambda: device.add_rms_norm(x, residual, weight, 1e-5)),
            4 * line,
        )
        self.share("silu_mul", seconds(lambda: device.silu_mul(gate_up)), 3 * rows * inner * ITEM)

        num_heads, num_kv_heads, dim = sizes.heads
        width = (num_heads + 2 * num_kv_heads) * dim
        qkv = upload(normal(random, (rows, width), DTYPE))
        cos_sin = upload(np.ones((rows, dim), np.float32))
        blocks = -(-rows // self.size)
        cache = device.allocate_kv_cache(1, blocks, self.size, self.shape)
        tables = random.permutation(blocks).astype(np.int32)[None]
        ids = random.integers(0, rows, rows).astype(np.int32)
        staged = device.stage(
            make_batch(
                tables, [rows], [rows], self.size, token_ids=ids,
                logits_indices=ids[: self.limits.max_num_seqs],
            )
        )  # fmt: skip
        self.share("embedding", seconds(lambda: device.embedding(x, staged)), 2 * line)
        self.share(
            "rotary_cache",
            seconds(lambda: device.rotary_cache(qkv, cos_sin, cache[0], staged, self.shape)),
            rows * (2 * width * ITEM + dim * 4),
        )
        if not self.target.dry:
            # The dry run has measured it as its copy bandwidth.
            self.share("copy_blocks", *self.block_copies())

    def block_copies(self) -> tuple[float, int]:
        """Seconds, and bytes read and written, of a copy of one half of a cache to the other."""
        device, sizes = self.device, self.sizes
        blocks = min(sizes.turn_tokens, self._room()) // sizes.layers // self.size
        cache = self.cache(sizes.layers, blocks)
        half = blocks // 2
        order = self.random.permutation(half).astype(np.int32)
        pairs = np.stack([order, order + half], 1)
        batch = make_batch(np.zeros((1, 1), np.int32), [1], [1], self.size, block_copies=pairs)
        staged = device.stage(batch)
        seconds = self.target.seconds(lambda: device.copy_blocks(cache, staged))
        _, num_kv_heads, dim = sizes.heads
        block_bytes = 2 * num_kv_heads * self.size * dim * ITEM
        return seconds, 2 * half * sizes.layers * block_bytes

    def cache(self, layers: int, blocks: int) -> DeviceArray:
        return random_cache(self.device, layers, blocks, self.size, self.shape, self.random)

    def products(self) -> None:
        """cuBLAS as a decode step uses it: bound by memory until there are some hundred tokens."""
        assert self.report is not None
        device, sizes = self.device, self.sizes
        # Several weights in turn, so that none is in the L2 cache.
        count = 1 if self.target.dry else 4
        shape = (2 * sizes.intermediate, sizes.hidden)
        rows = normal(self.random, (min(shape[0], 1024), shape[1]), DTYPE)
        weights = [device.upload_matrix(np.resize(rows, shape)) for _ in range(count)]
        for tokens in (1, 16, 64, 256, sizes.rows) if not self.target.dry else (1, sizes.rows):
            x = device.upload(normal(self.random, (tokens, sizes.hidden), DTYPE))

            def work(x: DeviceArray = x) -> None:
                for weight in weights:
                    device.linear(x, weight)

            seconds = self.target.seconds(work) / count
            moved = ITEM * (shape[0] * shape[1] + tokens * (shape[0] + shape[1]))
            operations = 2 * tokens * shape[0] * shape[1]
            self.share(f"linear [{tokens}, {shape[1]}] x [{shape[0]}]", seconds, moved)
            rate = operations / seconds
            self.report.measure(
                f"linear [{tokens}, {shape[1]}] x [{shape[0]}]",
                100 * rate / self.ceilings.rate,
                "% of matrix",
                note=f"{rate / 1e12:,.1f} TFLOP/s",
            )

    def _room(self) -> int:
        """Tokens of keys and values that a third of the GPU's memory holds."""
        _, num_kv_heads, dim = self.sizes.heads
        _, total = self.device.runtime.memory_info()
        return total // 3 // (2 * num_kv_heads * dim * ITEM)

    def decode_attention(self) -> None:
        assert self.report is not None
        sizes, size = self.sizes, self.size
        cache: DeviceArray = None
        layers = 0
        turn_tokens = min(sizes.turn_tokens, self._room())
        # By memory that the cache of one layer needs, so that it is made twice at most.
        for batch, context in sorted(sizes.decode, key=lambda case: case[0] * case[1]):
            blocks = batch * -(-context // size)
            if blocks * size > turn_tokens:
                note = "left out: its cache is more than a third of this GPU's memory"
                self.report.add(
                    Row(f"decode attention, batch {batch}, context {context}", note=note)
                )
                continue
            wanted = sizes.layers if blocks * size * sizes.layers <= turn_tokens else 1
            if wanted != layers:
                cache = None  # the old one goes before the new one comes
                layers = wanted
                cache = self.cache(layers, turn_tokens // layers // size)
            target_share = DECODE_SHARE if batch >= 64 and context >= 4096 else None
            self._decode(cache, layers, batch, context, target_share)
        assert cache is not None
        batch, context = (64, 4096) if not self.target.dry else sizes.decode[0]
        if not self.target.dry:
            cache = None
            layers = sizes.layers
            cache = self.cache(layers, turn_tokens // layers // size)
        self._decode(cache, layers, batch, context, None, contiguous=True)

    def _decode(
        self,
        cache: DeviceArray,
        layers: int,
        batch: int,
        context: int,
        at_least: float | None,
        *,
        contiguous: bool = False,
    ) -> None:
        device, shape = self.device, self.shape
        tables = self._tables(cache, batch, context, contiguous=contiguous)
        staged = device.stage(make_batch(tables, [1] * batch, [context] * batch, self.size))
        q = self._new_tokens(cache, staged, batch)

        def work() -> None:
            for layer in range(layers):
                device.paged_attention(q, cache[layer], staged, shape)

        seconds = self.target.seconds(work) / layers
        moved = 2 * batch * context * shape.num_kv_heads * shape.head_dim * ITEM
        moved += 2 * batch * shape.num_heads * shape.head_dim * ITEM
        kind = ", blocks in order" if contiguous else ""
        self.share(f"decode attention, batch {batch}, context {context}{kind}", seconds, moved,
                   at_least)  # fmt: skip

    def _new_tokens(self, cache: DeviceArray, staged: StagedStep, count: int) -> DeviceArray:
        """Their keys and values into the cache; the queries."""
        shape = self.shape
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = normal(self.random, (count, width), DTYPE)
        return write_new_tokens(self.device, cache, staged, shape, qkv)

    def _tables(self, cache: DeviceArray, batch: int, context: int, *, contiguous: bool) -> Array:
        per_sequence = -(-context // self.size)
        blocks = cache.shape[2] - 1
        order = np.arange(blocks) if contiguous else self.random.permutation(blocks)
        return order[: batch * per_sequence].astype(np.int32).reshape(batch, per_sequence)

    def prefill_attention(self) -> None:
        assert self.report is not None
        device, shape, sizes = self.device, self.shape, self.sizes
        cache = self.cache(1, -(-max(sizes.prefill) // self.size))
        cases = [(tokens, False) for tokens in sizes.prefill]
        cases.append((sizes.prefill[-1], True))
        for tokens, contiguous in cases:
            tables = self._tables(cache, 1, tokens, contiguous=contiguous)
            staged = device.stage(make_batch(tables, [tokens], [tokens], self.size))
            q = self._new_tokens(cache, staged, tokens)
            seconds = self.target.seconds(
                lambda q=q, staged=staged: device.paged_attention(q, cache[0], staged, shape)
            )
            width = shape.num_heads * shape.head_dim
            rate = 4 * width * tokens * (tokens + 1) / 2 / seconds
            kind = ", blocks in order" if contiguous else ""
            held = tokens == 16384 and "H200" in device.runtime.name and not contiguous
            self.report.measure(
                f"prefill attention, {tokens} tokens{kind}",
                rate / 1e12,
                "TFLOP/s",
                at_least=PREFILL_RATE if held else None,
                note=f"{seconds * 1e6:,.1f} us, {100 * rate / self.ceilings.rate:.0f} % of the "
                "matrix rate",
            )

    def sampling(self) -> None:
        device, sizes = self.device, self.sizes
        for rows in (4,) if self.target.dry else (1, 64, 256):
            logits = device.upload(normal(self.random, (rows, sizes.vocab), "float32", 3))
            sampling = SamplingBatch.greedy(rows)
            self._sample(f"sample, greedy, batch {rows}", logits, sampling, 1)
            sampling.seeds[:] = np.arange(rows)
            sampling.temperature[:] = 0.8
            sampling.top_p[:] = 0.9
            sampling.top_k[:] = 50
            self._sample(f"sample, top-k and top-p, batch {rows}", logits, sampling, 1)

    def _sample(self, name: str, logits: DeviceArray, sampling: object, passes: int) -> None:
        def work() -> None:
            self.device.sample(logits, sampling).fetch()  # type: ignore[arg-type]

        self.share(name, self.target.seconds(work), passes * logits.nbytes)
