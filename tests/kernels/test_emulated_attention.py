"""Tensor-core attention, as NVRTC compiles it, against float64 on the emulator."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from cuengine.device.attention_launch import prefill_launch
from cuengine.device.emulated.runtime import (
    FORWARD,
    NO_ACCESS,
    REVERSE,
    SHUFFLED,
    KernelFault,
    Memory,
    Module,
)
from cuengine.device.kernel_cache import get_kernels
from cuengine.device.kernel_variants import programs
from cuengine.device.nvrtc import NvrtcError

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 8
COUNT, LENGTH = 21, 53
"""Queries of the chunk, and tokens in the cache with it: four blocks, the last not full."""


def prefill(order: int, table: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel gives and what float64 gives; blocks and slots of nobody are no access."""
    program = next(
        p for p in programs("bfloat16", DIM, 80) if p.source == "paged_attention_prefill.cu"
    )
    try:
        kernels = get_kernels(program, 80)
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")
    random = np.random.default_rng(3)
    q = random.standard_normal((COUNT, HEADS, DIM)).astype(ml_dtypes.bfloat16)
    kv = random.standard_normal((2, BLOCKS, KV_HEADS, BLOCK, DIM)).astype(ml_dtypes.bfloat16)
    out = np.zeros_like(q)
    tables = np.array([table], np.int32)
    starts, lengths = np.array([0, COUNT], np.int32), np.array([LENGTH], np.int32)
    tiles = np.array([[0, 0]], np.int32)
    memory = Memory()
    arrays = {"out": out, "q": q, "kv": kv, "block_tables": tables, "starts": starts,
              "seq_lens": lengths, "tiles": tiles}  # fmt: skip
    args = [memory.add(array, name) for name, array in arrays.items()]
    memory.poison(out)
    owned = [6, 1, 3, 5]
    for part in range(2):
        for block in set(range(BLOCKS)) - set(owned):
            memory.poison(kv[part, block], NO_ACCESS)
        for head in range(KV_HEADS):
            memory.poison(kv[part, owned[3], head, LENGTH - 3 * BLOCK :], NO_ACCESS)
    module = Module.from_ptx(kernels.ptx.read_text(), memory)
    function = module.function(next(iter(kernels.names.values())))
    shape = prefill_launch(DIM, 2, tensor_cores=True)
    scale = DIM**-0.5
    function.launch(
        (HEADS, 1, 1), (128, 1, 1),
        [*args, HEADS, KV_HEADS, BLOCKS, BLOCK, len(table), scale],
        shared_bytes=shape.shared_bytes, order=order,
    )  # fmt: skip
    expected = np.zeros(q.shape)
    for head in range(HEADS):
        k, v = (
            kv[part, owned, head // 2].reshape(-1, DIM)[:LENGTH].astype(np.float64)
            for part in range(2)
        )
        scores = q[:, head].astype(np.float64) @ k.T * scale
        visible = np.arange(LENGTH) <= np.arange(LENGTH - COUNT, LENGTH)[:, None]
        weights = np.where(visible, np.exp(scores), 0)
        expected[:, head] = weights / weights.sum(1, keepdims=True) @ v
    return out.astype(np.float64), expected


@pytest.mark.parametrize("order", [FORWARD, REVERSE, SHUFFLED])
def test_prefill_agrees_with_float64_whatever_the_order_of_warps(order: int) -> None:
    out, expected = prefill(order, [6, 1, 3, 5])
    # Weights and outputs are each rounded to bf16 (2**-9 of values up to about 4).
    np.testing.assert_allclose(out, expected, atol=2**-6, rtol=2**-7)


def test_a_block_of_nobody_in_the_table_is_an_error_with_its_line() -> None:
    with pytest.raises(KernelFault, match=r"ptx\.cuh:\d+: .*not the kernel's.*of kv"):
        prefill(FORWARD, [6, 1, 2, 5])
