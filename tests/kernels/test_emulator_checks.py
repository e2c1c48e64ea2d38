"""The emulator finds bugs that a GPU hides: planted in small kernels, then in the real ones."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuengine.device.attention_launch import prefill_launch
from cuengine.device.emulated.runtime import (
    FORWARD,
    NO_ACCESS,
    REVERSE,
    SHUFFLED,
    Array,
    Function,
    KernelFault,
    Memory,
    Module,
)
from cuengine.device.kernel_cache import OPTIONS
from cuengine.device.nvrtc import NvrtcError, find_nvrtc
from cuengine.paths import kernel_source_dir

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def build(
    source: str, memory: Memory, name: str = "k", path: Path = Path("k.cu"), architecture: int = 80
) -> Function:
    """name: a kernel, or an instance of a template."""
    try:
        nvrtc = find_nvrtc()
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")
    expressions = (name,) if "<" in name else ()
    compiled = nvrtc.compile(
        source, path, architecture=architecture, options=OPTIONS, expressions=expressions
    )
    module = Module.from_ptx(compiled.ptx.decode(), memory)
    return module.function(compiled.names.get(name, name))


def launch_small(
    source: str, *, threads: int = 128, shared_bytes: int = 0, order: int = FORWARD
) -> Array:
    """`k(float *out, const float *in)`, 128 elements each; what it wrote."""
    memory = Memory()
    out, _, args = arrays(memory)
    build(source, memory).launch(
        (1, 1, 1), (threads, 1, 1), args, shared_bytes=shared_bytes, order=order
    )
    return out


REVERSED = """extern "C" __global__ void k(float *out, const float *in) {
    __shared__ float s[128];
    s[threadIdx.x] = in[threadIdx.x];
    %s
    out[threadIdx.x] = s[127 - threadIdx.x];
}"""


def arrays(memory: Memory) -> tuple[Array, Array, list[int]]:
    out, given = np.zeros(128, np.float32), np.arange(128, dtype=np.float32)
    return out, given, [memory.add(out, "out"), memory.add(given, "in")]


@pytest.mark.parametrize("order", [FORWARD, REVERSE, SHUFFLED])
def test_threads_see_what_others_wrote_before_a_barrier(order: int) -> None:
    memory = Memory()
    out, given, args = arrays(memory)
    memory.poison(out)
    build(REVERSED % "__syncthreads();", memory).launch((1, 1, 1), (128, 1, 1), args, order=order)
    np.testing.assert_array_equal(out, given[::-1])


def test_a_missing_barrier_is_a_race_or_an_unwritten_read() -> None:
    memory = Memory()
    *_, args = arrays(memory)
    function = build(REVERSED % "", memory)
    with pytest.raises(KernelFault, match=r"k\.cu:5: (read of shared memory never|race)"):
        function.launch((1, 1, 1), (128, 1, 1), args)


def test_a_divergent_barrier_is_an_error_with_its_line() -> None:
    memory = Memory()
    *_, args = arrays(memory)
    source = """extern "C" __global__ void k(float *out, const float *in) {
        out[threadIdx.x] = in[threadIdx.x];
        if (threadIdx.x < 64)
            __syncthreads();
        out[threadIdx.x] += 1; }"""
    function = build(source, memory)
    with pytest.raises(KernelFault, match=r"k\.cu:4: barrier that not all"):
        function.launch((1, 1, 1), (128, 1, 1), args)


def test_memory_without_access_names_the_allocation() -> None:
    memory = Memory()
    _, given, args = arrays(memory)
    memory.poison(given[100:101], NO_ACCESS)
    function = build(REVERSED % "__syncthreads();", memory)
    with pytest.raises(KernelFault, match=r"thread \(100, 0, 0\).*byte 400 of in"):
        function.launch((1, 1, 1), (128, 1, 1), args)


def test_an_unwritten_output_is_an_error_where_it_is_read() -> None:
    memory = Memory()
    _, given, args = arrays(memory)
    memory.poison(given[7:8])
    function = build(REVERSED % "__syncthreads();", memory)
    with pytest.raises(KernelFault, match=r"memory never written.*byte 28 of in"):
        function.launch((1, 1, 1), (128, 1, 1), args)


SIGNATURE = 'extern "C" __global__ void k(float *out, const float *in)'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("*(float4 *)out = *(const float4 *)(in + 1);", "misaligned access.*byte 4 of in"),
        ("*(float2 *)(out + 1) = make_float2(in[0], in[1]);", "misaligned access.*byte 4 of out"),
        ("out[0] = in[128];", "outside every allocation.*byte 512 of in, which has 512"),
        ("out[-1] = 0;", r"outside every allocation"),
        ("out[threadIdx.x % 32] = __shfl_xor_sync(0xffff, in[threadIdx.x], 1);",
         "lane outside the mask"),
        ("out[threadIdx.x] = __shfl_down_sync(0xffff0fff, in[threadIdx.x], 1);",
         "lane outside the mask"),
        ("if (threadIdx.x % 32 != 5) out[threadIdx.x] = __shfl_xor_sync(~0u, in[threadIdx.x], 1);",
         "warp instruction that not all its lanes reach"),
        ("if (threadIdx.x == 37) __syncwarp();", "warp instruction that not all its lanes reach"),
        ("if (threadIdx.x >= 32) __syncthreads(); else out[0] = in[0];",
         "barrier that not all threads reach"),
        ("if (threadIdx.x % 2) { out[0] = in[0]; __syncthreads(); } else __syncthreads();",
         "barrier that not all threads reach"),
        ("__trap();", "trap"),
        ("extern __shared__ float d[]; d[threadIdx.x] = 0;",
         "outside the shared memory of the launch"),
        ("extern __shared__ float d[]; if (threadIdx.x < 4) out[threadIdx.x] = d[threadIdx.x];",
         "read of shared memory never written"),
        ("__shared__ volatile float s[128]; s[threadIdx.x] = in[threadIdx.x]; "
         "out[threadIdx.x] = s[threadIdx.x ^ 1];",
         "race: another thread wrote"),
        ("__shared__ volatile float s; s = in[threadIdx.x];", "race: another thread wrote"),
        ("__shared__ volatile float s[4]; if (threadIdx.x < 4) s[threadIdx.x] = 1; "
         "__syncthreads(); "
         "if (threadIdx.x == 99) out[0] = s[0]; if (threadIdx.x == 3) s[0] = 2;",
         "race: another thread"),
        ("__shared__ volatile float s; s = 0; __syncthreads();", "race: another thread wrote"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", [FORWARD, REVERSE])
def test_small_bugs(body: str, message: str, order: int) -> None:
    """Whatever the order of the warps."""
    with pytest.raises(KernelFault, match=f"k.cu:[12]: .*{message}"):
        launch_small(f"{SIGNATURE} {{\n{body} }}", shared_bytes=16, order=order)


SUMS = """extern "C" __global__ void k(float *out, const float *in) {
    __shared__ float s[32];
    float sum = 0;
    for (int turn = 0; turn < 4; turn++) {
        if (threadIdx.x < 32) s[threadIdx.x] = in[turn * 32 + threadIdx.x];
        __syncthreads();
        sum += s[(threadIdx.x + 1) % 32];
        BETWEEN
    }
    out[threadIdx.x] = sum;
}"""


def test_a_shared_buffer_that_is_filled_again_too_early_is_a_race() -> None:
    want = np.arange(128).reshape(4, 32).sum(0)
    out = launch_small(SUMS.replace("BETWEEN", "__syncthreads();"))
    np.testing.assert_array_equal(out, np.tile(np.roll(want, -1), 4))
    for order in (FORWARD, REVERSE, SHUFFLED):
        with pytest.raises(KernelFault, match=r"k\.cu:5: race: another thread read"):
            launch_small(SUMS.replace("BETWEEN", ""), order=order)


COPIES = """#include "include/ptx.cuh"
extern "C" __global__ void k(float *out, const float *in) {
    __shared__ __align__(16) float s[2][128];
    const int first = threadIdx.x * 4;
    if (first < 128) copy_async(shared_address(&s[0][first]), in + first, true);
    commit_copies();
    if (first < 128) copy_async(shared_address(&s[1][first]), in + first, true);
    commit_copies();
    %s
    out[threadIdx.x] = s[0][127 - threadIdx.x];
}"""


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        ("wait_copies<1>(); __syncthreads();", ""),
        ("wait_copies<2>(); __syncthreads();", "on its way there: wait for its group"),
        ("__syncthreads();", "on its way there: wait for its group"),
        ("__syncthreads(); wait_copies<1>();", "on its way|race|never written"),
        ("wait_copies<0>();", "race: another thread wrote|on its way|never written"),
    ],
)
def test_copies_must_be_waited_for_and_then_be_told_to_the_others(wait: str, message: str) -> None:
    memory = Memory()
    out, given, args = arrays(memory)
    function = build(COPIES % wait, memory, path=kernel_source_dir() / "k.cu")
    if not message:
        function.launch((1, 1, 1), (128, 1, 1), args)
        np.testing.assert_array_equal(out, given[::-1])
        return
    with pytest.raises(KernelFault, match=rf"k\.cu:\d+: .*({message})"):
        function.launch((1, 1, 1), (128, 1, 1), args)


def test_lanes_of_a_warp_need_syncwarp_between_them() -> None:
    source = (
        SIGNATURE
        + """ {
        __shared__ volatile float s[32];
        s[threadIdx.x] = in[threadIdx.x];
        %s
        out[threadIdx.x] = s[31 - threadIdx.x]; }"""
    )
    out = launch_small(source % "__syncwarp();", threads=32)
    np.testing.assert_array_equal(out[:32], np.arange(31, -1, -1))
    with pytest.raises(KernelFault, match=r"k\.cu:5: race: another thread wrote"):
        launch_small(source % "", threads=32)


# ---- bugs planted in the real kernels ----

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 16, 8
PREFILL, PLAIN, CACHE = (
    "paged_attention_prefill.cu",
    "include/attention_plain.cuh",
    "include/attention.cuh",
)


class Prefill:
    """Two sequences, of 48 (or `length`) and 12 tokens, whose last 9 and 12 are queries.

    What belongs to neither is no access: blocks, slots behind the ends, padding of the table. A
    table has a column more than its longest row, so that the next row is not the next entry.
    """

    def __init__(self, *, plain: bool, length: int = 48) -> None:
        self.plain, self.memory = plain, Memory()
        dtype: Any = np.float32 if plain else ml_dtypes.bfloat16
        random = np.random.default_rng(3)
        q = random.standard_normal((21, HEADS, DIM)).astype(dtype)
        kv = random.standard_normal((2, BLOCKS, KV_HEADS, BLOCK, DIM)).astype(dtype)
        self.out = np.zeros_like(q)
        tables = np.array([[6, 1, 3, -1], [5, -1, -1, -1]], np.int32)
        starts, lengths = np.array([0, 9, 21], np.int32), np.array([length, 12], np.int32)
        # Rows are queries with tensor cores, else queries times heads of a group.
        rows = [(0, 0), (0, 16), (1, 0), (1, 16)] if plain else [(0, 0), (1, 0)]
        tiles = np.array(rows, np.int32)
        named = {"out": self.out, "q": q, "kv": kv, "block_tables": tables, "starts": starts,
                 "seq_lens": lengths, "tiles": tiles}  # fmt: skip
        addresses = [self.memory.add(array, name) for name, array in named.items()]
        self.memory.poison(self.out)
        shadow = self.memory.shadow(kv)
        shadow[...] = NO_ACCESS
        for table, tokens in zip(tables, lengths, strict=True):
            for index, block in enumerate(table[table >= 0]):
                shadow[:, block, :, : tokens - index * BLOCK] = 0
        self.memory.shadow(tables)[tables < 0] = NO_ACCESS
        self.args = [*addresses, HEADS, KV_HEADS, BLOCKS, BLOCK, tables.shape[1], DIM**-0.5]
        self.grid = (KV_HEADS if plain else HEADS, len(tiles), 1)

    def run(self, folder: Path) -> None:
        """The kernel as it is in this folder. Raises KernelFault."""
        name = "paged_attention_prefill" + ("_plain<fp32" if self.plain else "<bf16") + f", {DIM}>"
        path = folder / PREFILL
        function = build(path.read_text(), self.memory, name, path)
        shape = prefill_launch(DIM, 4 if self.plain else 2, tensor_cores=not self.plain)
        function.launch(
            self.grid, (shape.threads, 1, 1), self.args, shared_bytes=shape.shared_bytes
        )
        self.memory.require_written(self.out)


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """A copy of cuda/ in which one place of a file reads otherwise."""

    def change(file: str, old: str, new: str) -> Path:
        folder = tmp_path / "cuda"
        shutil.copytree(kernel_source_dir(), folder)
        text = (folder / file).read_text()
        assert len(re.findall(old, text)) == 1, f"{file} has changed: plant the bug elsewhere"
        (folder / file).write_text(re.sub(old, new, text))
        return folder

    return change


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("length", [41, 48])
def test_without_a_bug_nothing_is_found(plain: bool, length: int) -> None:
    Prefill(plain=plain, length=length).run(kernel_source_dir())


@pytest.mark.parametrize(
    ("plain", "file", "old", "new", "length", "message"),
    [
        pytest.param(
            True, CACHE, r"key >> block_shift\]", "(key >> block_shift) + 1]",
            48, "not the kernel's.*of block_tables", id="next entry, in the next row at the end"),
        pytest.param(
            False, CACHE, r"key >> block_shift\]", "(key >> block_shift) + 1]",
            48, "not the kernel's.*of block_tables", id="the same with tensor cores"),
        pytest.param(
            True, PREFILL, r"static_cast<int64>\(seq\) \* max_blocks(?=[^}]*KeyRange)",
            "static_cast<int64>(seq + 1) * max_blocks", 48,
            "not the kernel's.*of (block_tables|kv)",
            id="the next sequence's row"),
        pytest.param(
            True, PREFILL, r"last_row / group \+ 1, 0", "last_row / group + 2, 0", 41,
            r"not the kernel's.*of kv", id="a slot behind the last token"),
        pytest.param(
            True, PREFILL, r"last_row / group \+ 1, 0", "last_row / group + 2, 0", 48,
            r"not the kernel's.*of block_tables", id="a key behind a table's last block"),
        pytest.param(
            False, PREFILL, r"context \+ last_query \+ 1", "context + last_query + 2",
            41, r"not the kernel's.*of kv", id="a slot behind the last token, tensor cores"),
        pytest.param(
            True, PLAIN, r"__syncthreads\(\);(?=\s+load_tile\(first_key, count, cache)", "", 48,
            "race: another thread", id="keys overwritten while others read them"),
        pytest.param(
            True, PLAIN, r"__syncthreads\(\);(?=\s+float scores)", "", 48,
            "race: another thread|never written", id="keys read before they are all there"),
        pytest.param(
            False, PREFILL, r"wait_copies<0>\(\);(?=\s+__syncthreads)", "", 48,
            "on its way there", id="no wait for the copies"),
        pytest.param(
            False, PREFILL, r"(?<=wait_copies<0>\(\);\n)\s+__syncthreads\(\);", "", 48,
            "race: another thread|on its way there", id="others' copies without a barrier"),
        pytest.param(
            True, PLAIN, r"row >= num_rows\) continue", "row + 1 >= num_rows) continue", 48,
            "out: 64 of 1344 elements were never written", id="the last row is not written"),
    ],
)  # fmt: skip
def test_bugs_planted_in_prefill_are_found(
    plant: Callable[[str, str, str], Path],
    plain: bool, file: str, old: str, new: str, length: int, message: str,
) -> None:  # fmt: skip
    folder = plant(file, old, new)
    with pytest.raises(KernelFault, match=message):
        Prefill(plain=plain, length=length).run(folder)


# ---- and it computes right: a GEMM as tensor cores want it ----

GEMM = """#include "include/ptx.cuh"
// c [m, n] = a [m, k] b [n, k]^T: blocks of 64 x 32, two stages of 32 of k; rows of 80 bytes.
template <typename T>
__global__ void gemm(float *c, const T *a, const T *b, int n, int k) {
    __shared__ __align__(16) unsigned char stages[2][96 * 80];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T *rows_a = a + blockIdx.y * 64 * k, *rows_b = b + blockIdx.x * 32 * k;
    auto load = [&](int tile) {
        const uint32 stage = shared_address(stages[tile % 2]);
        for (int i = threadIdx.x; i < 96 * 4; i += 128) {
            const int row = i / 4, chunk = i % 4;
            const T *from = row < 64 ? rows_a + row * k : rows_b + (row - 64) * k;
            copy_async(stage + row * 80 + chunk * 16, from + tile * 32 + chunk * 8, true);
        }
        commit_copies();
    };
    float sums[4][4] = {};
    load(0);
    for (int tile = 0; tile < k / 32; tile++) {
        if (tile + 1 < k / 32) load(tile + 1);
        else commit_copies();
        wait_copies<1>();
        __syncthreads();
        const uint32 stage = shared_address(stages[tile % 2]);
        for (int step = 0; step < 2; step++) {
            uint32 x[4], y[2][4];
            const int offset = step * 32 + lane / 16 * 16;
            load_matrices(x, stage + (warp * 16 + lane % 16) * 80 + offset);
            for (int half = 0; half < 2; half++) {
                load_matrices(y[half], stage + (64 + half * 16 + lane % 16) * 80 + offset);
                multiply_add<T>(sums[2 * half], x, y[half][0], y[half][2]);
                multiply_add<T>(sums[2 * half + 1], x, y[half][1], y[half][3]);
            }
        }
        __syncthreads();
    }
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 4; i++) {
            const int row = blockIdx.y * 64 + warp * 16 + lane / 4 + i / 2 * 8;
            c[row * n + blockIdx.x * 32 + j * 8 + lane % 4 * 2 + i % 2] = sums[j][i];
        }
}"""


@pytest.mark.parametrize(("short", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_a_two_stage_tensor_core_gemm_agrees_with_float64(short: str, dtype: Any) -> None:
    m, n, k = 128, 64, 160
    random = np.random.default_rng(7)
    a, b = (random.standard_normal((rows, k)).astype(dtype) for rows in (m, n))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    # Products are exact in float32; k sums of at most k * max |a| |b| are rounded to 2**-24 each.
    bound = k * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T)
    memory = Memory()
    function = build(GEMM, memory, f"gemm<{short}>", kernel_source_dir() / "gemm.cu")
    c = np.zeros((m, n), np.float32)
    args = [memory.add(c, "c"), memory.add(a, "a"), memory.add(b, "b"), n, k]
    for order in (FORWARD, REVERSE, SHUFFLED):
        memory.poison(c)
        function.launch((n // 32, m // 64, 1), (128, 1, 1), args, order=order)
        memory.require_written(c)
        assert (np.abs(c - exact) <= bound).all()
