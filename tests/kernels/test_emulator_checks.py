"""The emulator computes right, and finds bugs that a GPU hides."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

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
from cuengine.device.nvrtc import NvrtcError, find_nvrtc

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def build(source: str, memory: Memory, name: str = "k") -> Function:
    try:
        nvrtc = find_nvrtc()
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")
    compiled = nvrtc.compile(
        source, Path("k.cu"), architecture=80, options=("--generate-line-info",)
    )
    return Module.from_ptx(compiled.ptx.decode(), memory).function(name)


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


def test_a_misaligned_vector_load_is_an_error() -> None:
    memory = Memory()
    *_, args = arrays(memory)
    source = """extern "C" __global__ void k(float4 *out, const float *in) {
        out[0] = *(const float4 *)(in + 1); }"""
    with pytest.raises(KernelFault, match="misaligned"):
        build(source, memory).launch((1, 1, 1), (1, 1, 1), args)


def test_a_lane_outside_its_shuffle_mask_is_an_error() -> None:
    memory = Memory()
    *_, args = arrays(memory)
    source = """extern "C" __global__ void k(float *out, const float *in) {
        out[threadIdx.x] = __shfl_xor_sync(0xffff, in[threadIdx.x], 1); }"""
    with pytest.raises(KernelFault, match="mask"):
        build(source, memory).launch((1, 1, 1), (32, 1, 1), args)
