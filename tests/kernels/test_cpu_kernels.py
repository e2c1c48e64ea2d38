"""The CPU device's kernels, in NumPy and in Numba, against float64 formulas over ragged shapes.

Tolerance: 2e-5 of the largest expected value, some hundred roundings of float32. Cache slots that
hold no token are NaN: a result without NaN has not used them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuengine.batch import Batch
from cuengine.device.container import available_memory, cpu_quota
from cuengine.device.cpu import CpuDevice
from cuengine.device.interface import AttentionShape

TOLERANCE = 2e-5


@pytest.fixture(params=["numpy", "numba"], scope="module")
def device(request: pytest.FixtureRequest) -> CpuDevice:
    if request.param == "numba":
        pytest.importorskip("numba")
    return CpuDevice(use_numba=request.param == "numba")


def close(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    return bool(np.abs(actual - expected).max() <= TOLERANCE * max(1, np.abs(expected).max()))


@dataclass
class Case:
    """Sequences in a shuffled cache; keys and values also as they are, [length, kv_heads, dim]."""

    batch: Batch
    cache: NDArray[Any]
    keys: list[NDArray[Any]]
    values: list[NDArray[Any]]


def make_batch(tables: NDArray[Any], lengths: list[int], counts: list[int], size: int) -> Batch:
    positions, slots = [], []
    for table, length, count in zip(tables, lengths, counts, strict=True):
        for position in range(length - count, length):
            positions.append(position)
            slots.append(int(table[position // size]) * size + position % size)
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int64),
        block_tables=tables,
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        logits_indices=np.zeros(0, np.int32),
        block_copies=np.zeros((0, 2), np.int32),
    )


def make_case(
    lengths: list[int], counts: list[int], kv_heads: int, dim: int, size: int, seed: int = 0
) -> Case:
    generator = np.random.default_rng(seed)
    blocks = [-(-length // size) for length in lengths]
    order = generator.permutation(sum(blocks) + 3)
    tables = np.full((len(lengths), max(blocks)), -1, np.int32)
    cache = np.full((2, len(order), kv_heads, size, dim), np.nan, np.float32)
    both, used = [], 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        pair = generator.normal(size=(2, length, kv_heads, dim)).astype(np.float32)
        for position in range(length):
            cache[:, tables[row, position // size], :, position % size] = pair[:, position]
        both.append(pair)
    batch = make_batch(tables, lengths, counts, size)
    return Case(batch, cache, [pair[0] for pair in both], [pair[1] for pair in both])


def attention(q: NDArray[Any], case: Case, shape: AttentionShape) -> NDArray[Any]:
    group = shape.num_heads // shape.num_kv_heads
    queries = q.astype(np.float64).reshape(len(q), shape.num_heads, shape.head_dim)
    out = np.empty_like(queries)
    starts = case.batch.query_start_loc
    for row, length in enumerate(case.batch.seq_lens):
        for token in range(starts[row], starts[row + 1]):
            seen = length - (starts[row + 1] - token) + 1
            for head in range(shape.num_heads):
                keys = case.keys[row][:seen, head // group].astype(np.float64)
                scores = keys @ queries[token, head] * shape.scale
                weights = np.exp(scores - scores.max())
                values = case.values[row][:seen, head // group]
                out[token, head] = weights @ values / weights.sum()
    return out.reshape(q.shape)


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "dim", "size"),
    [
        (4, 4, 16, 16),
        (9, 3, 64, 16),
        (8, 2, 32, 8),
        (8, 1, 128, 32),
        (3, 1, 256, 16),
        (6, 2, 24, 8),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1], [1]),
        ([16, 17, 15, 1], [1, 1, 1, 1]),
        ([40, 33, 1, 5], [7, 33, 1, 1]),
        ([256, 257, 600], [1, 1, 1]),
        ([300, 700], [44, 1]),
    ],
)
def test_attention_agrees_with_float64(
    device: CpuDevice,
    lengths: list[int],
    counts: list[int],
    num_heads: int,
    kv_heads: int,
    dim: int,
    size: int,
) -> None:
    shape = AttentionShape(num_heads, kv_heads, dim, dim**-0.5)
    case = make_case(lengths, counts, kv_heads, dim, size)
    q = np.random.default_rng(1).normal(size=(sum(counts), num_heads * dim)).astype(np.float32)
    out = device.paged_attention(q, case.cache, device.stage(case.batch), shape)
    assert close(out, attention(q, case, shape))


def test_attention_takes_scores_far_apart(device: CpuDevice) -> None:
    shape = AttentionShape(4, 2, 32, 1.0)
    case = make_case([300, 20], [1, 20], 2, 32, 16)
    q = np.random.default_rng(1).normal(size=(21, 128)).astype(np.float32) * 20
    out = device.paged_attention(q, case.cache, device.stage(case.batch), shape)
    assert np.abs(out - attention(q, case, shape)).max() < 1e-3


def test_attention_of_a_row_is_the_same_to_the_bit_alone_and_in_any_chunk() -> None:
    pytest.importorskip("numba")
    device = CpuDevice(use_numba=True)
    shape = AttentionShape(9, 3, 64, 0.125)
    length = 530
    q = np.random.default_rng(1).normal(size=(length, 9 * 64)).astype(np.float32)
    whole = make_case([length], [length], 3, 64, 16)
    expected = device.paged_attention(q, whole.cache, whole.batch, shape).copy()
    for first, last in ((529, 530), (512, 530), (200, 210), (17, 18), (255, 257)):
        tables = whole.batch.block_tables
        chunk = make_batch(tables, [last], [last - first], 16)
        out = device.paged_attention(q[first:last], whole.cache, chunk, shape)
        assert np.array_equal(out, expected[first:last])


@pytest.mark.parametrize(("num_heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 128)])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rotation_and_cache_write_agree_with_float64(
    device: CpuDevice, tokens: int, num_heads: int, kv_heads: int, dim: int
) -> None:
    generator = np.random.default_rng(0)
    shape = AttentionShape(num_heads, kv_heads, dim, 1.0)
    size = 16
    blocks = -(-(tokens + 9) // size)
    tables = generator.permutation(blocks + 2)[None, :blocks].astype(np.int32)
    batch = make_batch(tables, [tokens + 9], [tokens], size)
    angles = np.outer(np.arange(tokens + 9), 0.5 ** np.arange(dim // 2))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    qkv = generator.normal(size=(tokens, (num_heads + 2 * kv_heads) * dim)).astype(np.float32)
    cache = np.full((2, blocks + 2, kv_heads, size, dim), np.nan, np.float32)

    q = device.rotary_cache(qkv, cos_sin, cache, device.stage(batch), shape)

    heads = qkv.astype(np.float64).reshape(tokens, -1, dim)
    pairs = heads[..., : dim // 2] + 1j * heads[..., dim // 2 :]
    turned = pairs * np.exp(1j * angles[9:, None])
    rotated = np.concatenate([turned.real, turned.imag], axis=-1)
    assert close(q, rotated[:, :num_heads].reshape(tokens, -1))
    flat = cache.transpose(0, 1, 3, 2, 4).reshape(2, -1, kv_heads, dim)
    assert close(flat[0, batch.slot_mapping], rotated[:, num_heads : num_heads + kv_heads])
    assert np.array_equal(
        flat[1, batch.slot_mapping], qkv.reshape(tokens, -1, dim)[:, num_heads + kv_heads :]
    )
    written = np.zeros(flat.shape[1], bool)
    written[batch.slot_mapping] = True
    assert np.isnan(flat[:, ~written]).all()


@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (300, 576)])
def test_norms_agree_with_float64(device: CpuDevice, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    x, residual = generator.normal(size=(2, *shape)).astype(np.float32) * 3
    weight = generator.normal(size=shape[1]).astype(np.float32)
    before = x.copy()

    def norm(values: NDArray[Any]) -> NDArray[Any]:
        wide = values.astype(np.float64)
        return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight

    assert close(device.rms_norm(x, weight, 1e-5), norm(x))
    total = x.astype(np.float64) + residual
    assert close(device.add_rms_norm(x, residual, weight, 1e-5), norm(total))
    assert close(residual, total)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("shape", [(1, 33), (5, 1536), (300, 1536)])
def test_silu_agrees_with_float64_for_any_size_of_gate(
    device: CpuDevice, shape: tuple[int, int]
) -> None:
    rows, width = shape
    generator = np.random.default_rng(0)
    gate_up = generator.normal(size=(rows, 2 * width)).astype(np.float32)
    gate_up[:, :width] *= 10.0 ** generator.integers(-3, 4, (rows, width))
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:]
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    difference = np.abs(device.silu_mul(gate_up) - expected)
    assert (difference <= 1e-6 * np.abs(expected) + 1e-30).all()


@pytest.mark.parametrize(("rows", "out", "depth"), [(1, 70, 33), (13, 576, 64), (48, 200, 576)])
def test_products_and_embedding_agree_with_float64(
    device: CpuDevice, rows: int, out: int, depth: int
) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, depth)).astype(np.float32)
    weight = generator.normal(size=(out, depth)).astype(np.float32)
    bias = generator.normal(size=out).astype(np.float32)
    matrix = device.upload_matrix(weight)
    expected = x.astype(np.float64) @ weight.T
    assert close(device.linear(x, matrix), expected)
    assert close(device.linear(x, matrix, bias), expected + bias)
    batch = make_batch(np.zeros((1, 8), np.int32), [rows], [rows], 16)
    batch.token_ids = generator.integers(0, out, rows).astype(np.int32)
    assert np.array_equal(device.embedding(matrix, batch), weight[batch.token_ids])


def test_blocks_are_copied_in_all_layers(device: CpuDevice) -> None:
    shape = AttentionShape(4, 2, 16, 0.25)
    cache = device.allocate_kv_cache(3, 6, 8, shape)
    cache[:] = np.random.default_rng(0).normal(size=cache.shape)
    before = cache.copy()
    batch = make_batch(np.zeros((1, 1), np.int32), [1], [1], 8)
    batch.block_copies = np.array([[0, 4], [2, 5]], np.int32)
    device.copy_blocks(cache, batch)
    assert np.array_equal(cache[:, :, [4, 5]], before[:, :, [0, 2]])
    assert np.array_equal(cache[:, :, :4], before[:, :, :4])


def test_the_numba_exponential_is_as_exact_as_it_says() -> None:
    numba = pytest.importorskip("numba")
    CpuDevice(use_numba=True)
    from cuengine.device.simd import exp

    @numba.njit
    def apply(values: NDArray[Any], out: NDArray[Any]) -> None:
        for i in range(len(values)):
            out[i] = exp(values[i])

    for dtype, low, high, error in (
        (np.float32, -87, 87.9, 1.3e-7),
        (np.float64, -708, 708, 3e-16),
    ):
        values = np.linspace(low, high, 200_001).astype(dtype)
        out = np.empty_like(values)
        apply(values, out)
        expected = np.exp(values.astype(np.longdouble))
        assert np.abs(out / expected - 1).max() < error
        apply(np.array([-np.inf, low * 1.1, 0], dtype), out)
        assert out[:3].tolist() == [0, 0, 1]


def memory_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_is_what_the_kernel_says_without_a_cgroup(tmp_path: Path) -> None:
    assert available_memory(memory_files(tmp_path, {})) == 8000 * 1024


def test_free_memory_respects_the_tightest_group_of_version_2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "1\n",
        "sys/fs/cgroup/outer/inner/memory.stat": "",
        "sys/fs/cgroup/outer/memory.max": "5000000\n",
        "sys/fs/cgroup/outer/memory.current": "4000000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 3000000\ninactive_file 500000\n",
    }
    assert available_memory(memory_files(tmp_path, files)) == 1_500_000


def test_free_memory_respects_a_limit_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\n",
    }
    assert available_memory(memory_files(tmp_path, files)) == 1_001_000


@pytest.mark.parametrize(
    ("name", "used", "kilobytes", "left"),
    [
        ("Max address space", "VmSize", 100, 500_000),
        ("Max data size", "VmData", 100, 500_000),
        ("Max data size", "VmData", 10_000, 0),
        ("Max data size", "VmSize", 10_000, 8000 * 1024),  # of another kind
    ],
)
def test_free_memory_respects_the_limits_of_the_process(
    tmp_path: Path, name: str, used: str, kilobytes: int, left: int
) -> None:
    files = {
        "proc/self/limits": f"{'Max cpu time':<25} unlimited  unlimited  seconds\n"
        f"{name:<25} {500_000 + 100 * 1024}  unlimited  bytes\n",
        "proc/self/status": f"Name:\tpython\n{used}:\t{kilobytes:>8} kB\n",
    }
    assert available_memory(memory_files(tmp_path, files)) == left


def test_without_proc_free_memory_is_what_the_system_says(tmp_path: Path) -> None:
    free = available_memory(tmp_path)
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("name", "text", "expected"), [("cpu.max", "150000 100000", 2), ("cpu.max", "max 100000", None)]
)
def test_cpu_quota_is_rounded_up(
    tmp_path: Path, name: str, text: str, expected: int | None
) -> None:
    files = {"proc/self/cgroup": "0::/box\n", f"sys/fs/cgroup/box/{name}": text}
    assert cpu_quota(memory_files(tmp_path, files)) == expected


def test_a_share_of_the_cpus_limits_the_threads_of_whoever_calls(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    # In a process of its own: Numba reads its settings once. The server's engine has a thread.
    code = """
import threading
from unittest import mock
from cuengine.device import cpu
with mock.patch.object(cpu, "cpu_quota", return_value=1):
    device = cpu.CpuDevice(use_numba=True)
    device.rms_norm(cpu.np.ones((1, 8), "f4"), cpu.np.ones(8, "f4"), 1e-5)
import numba
seen = []
thread = threading.Thread(target=lambda: seen.append(numba.get_num_threads()))
thread.start()
thread.join()
print(seen, numba.get_num_threads())
"""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_NUM_THREADS"}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True
    )
    assert output.returncode == 0, output.stderr
    assert output.stdout.strip() == "[1] 1"


def test_kernels_are_as_exact_on_three_threads() -> None:
    pytest.importorskip("numba")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "numba", __file__],
        env={**os.environ, "NUMBA_NUM_THREADS": "3", "PYTEST_ADDOPTS": ""},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_weights_that_were_packed_are_multiplied_where_numba_turns_out_not_to_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llvmlite")

    def fail() -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr("cuengine.device.cpu._numba_operations", fail)
    device = CpuDevice(use_numba=True)
    generator = np.random.default_rng(0)
    weight, x = generator.normal(size=(37, 20)), generator.normal(size=(5, 20))
    packed = device.upload_matrix(weight)
    out = device.linear(x.astype(np.float32), packed)
    np.testing.assert_allclose(out, x @ weight.T, rtol=1e-5, atol=1e-5)
    assert "Numba needs NumPy 2.3 or less" in caplog.text
    assert device.kernels == "NumPy"


def test_the_budget_of_the_kv_cache_is_half_of_free_memory_up_to_4_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CpuDevice()
    for free, expected in ((2 * 2**30, 2**30), (100 * 2**30, 4 * 2**30)):
        monkeypatch.setattr(device, "free_memory", lambda free=free: free)
        assert device.kv_cache_budget(0.9) == expected
