"""The emulated runtime refuses what a GPU would do wrong without a word, and orders work as one."""

from __future__ import annotations

import gc
import shutil
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cuengine.device.cuda.kernels import ARGUMENTS, Kernel
from cuengine.device.emulated.host import AccessError, EmulatedRuntime, HostedArray
from cuengine.device.emulated.ptx import parse
from cuengine.device.emulated.runtime import KernelFault
from cuengine.device.kernel_cache import Kernels, get_kernels
from cuengine.device.kernel_variants import attention_suffix, programs
from cuengine.device.nvrtc import NvrtcError
from cuengine.errors import DeviceMemoryError

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

INT, FLOAT = np.dtype(np.int32), np.dtype(np.float32)
WIDTH = 8


def compiled(name: str) -> Kernels:
    (program,) = (p for p in programs("float32", 16, 80) if p.name == name)
    try:
        return get_kernels(program, 80)
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")


def take_rows(runtime: EmulatedRuntime) -> Kernel:
    kernels = compiled("embedding_fp32")
    module = runtime.load_module(kernels.cubin, kernels.ptx)
    function = module.function(kernels.names["take_rows<fp32>"])
    return Kernel(function, ARGUMENTS["take_rows"], "take_rows")


def on_device(runtime: EmulatedRuntime, values: np.ndarray) -> HostedArray:
    array = runtime.empty(values.shape, values.dtype)
    pinned = runtime.pinned(values.shape, values.dtype)
    pinned[...] = values
    runtime.copy_in(array, pinned)
    return array


def on_host(runtime: EmulatedRuntime, array: HostedArray) -> np.ndarray:
    pinned = runtime.pinned(array.shape, array.dtype)
    runtime.copy_out(pinned, array)
    runtime.synchronize()
    return pinned.copy()


class Rows:
    """A launch of take_rows, ready to be repeated: y[r] = x[indices[r]]."""

    def __init__(self, runtime: EmulatedRuntime) -> None:
        self.runtime = runtime
        self.values = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
        self.x = on_device(runtime, self.values)
        self.indices = on_device(runtime, np.array([2, 0], np.int32))
        self.y = runtime.empty((2, WIDTH), FLOAT)
        self.kernel = take_rows(runtime)

    def launch(self) -> None:
        address = self.runtime.address
        self.kernel(
            (1, 2, 1), (32, 1, 1), address(self.y), address(self.x), address(self.indices), WIDTH
        )


def test_a_kernel_reads_and_writes_device_arrays() -> None:
    runtime = EmulatedRuntime()
    rows = Rows(runtime)
    rows.launch()
    np.testing.assert_array_equal(on_host(runtime, rows.y), rows.values[[2, 0]])


def test_the_host_sees_device_memory_through_copies_alone() -> None:
    runtime = EmulatedRuntime()
    array = on_device(runtime, np.ones(4, np.float32))
    with pytest.raises(TypeError, match="copy_out"):
        np.asarray(array)
    with pytest.raises(TypeError):
        array + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="plain slice"):
        array[::2]
    with pytest.raises(TypeError):
        runtime.copy_in(np.ones(4, np.float32), array)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        runtime.copy_out(array, runtime.pinned((4,), FLOAT))  # type: ignore[arg-type]


def test_a_copy_from_host_memory_that_is_not_pinned_is_refused() -> None:
    runtime = EmulatedRuntime()
    with pytest.raises(AccessError, match="not pinned"):
        runtime.copy_in(runtime.empty((4,), FLOAT), np.ones(4, np.float32))


def test_what_was_never_written_is_read_by_no_copy_no_product_and_no_kernel() -> None:
    runtime = EmulatedRuntime()
    rows = Rows(runtime)
    with pytest.raises(AccessError, match="never written"):
        on_host(runtime, rows.y)
    fresh = runtime.empty((3, WIDTH), FLOAT)
    with pytest.raises(AccessError, match=r"gemm, weight, .*never written"):
        runtime.gemm(runtime.empty((3, 3), FLOAT), rows.x, fresh)
    with pytest.raises(AccessError, match=r"gemm, out, .*never written"):
        runtime.gemm(runtime.empty((3, 3), FLOAT), rows.x, rows.x, accumulate=True)
    rows.x = fresh
    with pytest.raises(KernelFault, match="never written"):
        rows.launch()


def test_what_was_discarded_counts_as_never_written() -> None:
    runtime = EmulatedRuntime()
    rows = Rows(runtime)
    rows.launch()
    runtime.discard(rows.y[:1])
    np.testing.assert_array_equal(on_host(runtime, rows.y[1:]), rows.values[:1])
    with pytest.raises(AccessError, match="never written"):
        on_host(runtime, rows.y)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_gemm_rounds_once_to_the_dtype_of_its_result(dtype: type) -> None:
    runtime, random = EmulatedRuntime(), np.random.default_rng(4)
    x, weight, bias = (
        random.standard_normal(shape).astype(dtype) for shape in ((3, 40), (5, 40), (3, 5))
    )
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    for out_dtype in {np.dtype(dtype), FLOAT}:
        out = runtime.empty((3, 5), out_dtype)
        runtime.gemm(out, on_device(runtime, x), on_device(runtime, weight))
        # Sums of 40 products in float32, then half a unit of the last place of values below 32.
        last = max(2.0**-18, 16 * float(ml_dtypes.finfo(out_dtype).eps))
        assert np.abs(on_host(runtime, out).astype(np.float64) - exact).max() <= last
    out = on_device(runtime, bias)
    runtime.gemm(out, on_device(runtime, x), on_device(runtime, weight), accumulate=True)
    last = max(2.0**-18, 16 * float(ml_dtypes.finfo(dtype).eps))
    result = on_host(runtime, out).astype(np.float64)
    assert np.abs(result - exact - bias.astype(np.float64)).max() <= last


class Captured:
    """take_rows and a product of its result, in a graph: y = x[indices], product = y @ x.T."""

    def __init__(self, runtime: EmulatedRuntime) -> None:
        self.rows = Rows(runtime)
        self.product = runtime.empty((2, 3), FLOAT)
        runtime.begin_capture()
        self.rows.launch()
        runtime.gemm(self.product, self.rows.y, self.rows.x)
        self.graph = runtime.end_capture()


def test_a_capture_runs_nothing_and_a_graph_takes_what_is_at_its_addresses_now() -> None:
    runtime = EmulatedRuntime()
    captured = Captured(runtime)
    rows, product = captured.rows, captured.product
    with pytest.raises(AccessError, match="never written"):
        on_host(runtime, rows.y)
    for indices in ([2, 0], [1, 1]):
        pinned = runtime.pinned((2,), INT)
        pinned[:] = indices
        runtime.copy_in(rows.indices, pinned)
        captured.graph.launch()
        expected = rows.values[indices]
        np.testing.assert_array_equal(on_host(runtime, rows.y), expected)
        np.testing.assert_array_equal(on_host(runtime, product), expected @ rows.values.T)


@pytest.mark.parametrize("freed", ["y", "x"])
def test_a_graph_whose_memory_was_freed_is_an_error(freed: str) -> None:
    runtime = EmulatedRuntime()
    captured = Captured(runtime)
    setattr(captured.rows, freed, None)
    gc.collect()
    with pytest.raises(KernelFault, match="outside every allocation"):
        captured.graph.launch()


def test_memory_allocated_during_a_capture_is_an_error() -> None:
    runtime = EmulatedRuntime()
    runtime.begin_capture()
    with pytest.raises(RuntimeError, match="allocated during a capture"):
        runtime.empty((4,), FLOAT)
    with pytest.raises(RuntimeError, match="during a capture"):
        runtime.synchronize()


def test_device_memory_runs_out_and_comes_back_with_the_last_view() -> None:
    runtime = EmulatedRuntime(memory_bytes=1000)
    array = runtime.empty((200,), FLOAT)
    view = array[10:20]
    with pytest.raises(DeviceMemoryError, match=r"400 bytes .* 200 of 1000 are free"):
        runtime.empty((100,), FLOAT)
    del array
    gc.collect()
    assert runtime.memory_info() == (200, 1000)
    del view
    gc.collect()
    assert runtime.memory_info() == (1000, 1000)


def test_launches_that_a_driver_would_refuse_are_refused() -> None:
    runtime = EmulatedRuntime()
    kernels = compiled("embedding_fp32")
    function = runtime.load_module(kernels.cubin, kernels.ptx).function("gather_tokens", 50_000)
    params = struct.pack("@PPPi", 0, 0, 0, 0)
    for grid, block, shared in (
        ((0, 1, 1), (32, 1, 1), 0),
        ((1, 65536, 1), (32, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 1, 1), 50_001),
    ):
        with pytest.raises(ValueError, match="gather_tokens: "):
            function.launch(grid, block, params, shared)
    with pytest.raises(ValueError, match="28 bytes of arguments"):
        function.launch((1, 1, 1), (32, 1, 1), params + b"0")
    function.launch((1, 1, 1), (32, 1, 1), params, 50_000)


def test_delayed_work_runs_when_it_is_waited_for_and_no_earlier() -> None:
    runtime = EmulatedRuntime(delayed=True)
    array = runtime.empty((1,), INT)
    pinned, back = runtime.pinned((1,), INT), runtime.pinned((1,), INT)
    pinned[0] = 1
    runtime.copy_in(array, pinned)
    copied = runtime.event()
    copied.record()
    runtime.copy_out(back, array)
    pinned[0], back[0] = 2, 0  # too early: the copy has not been made
    copied.wait()
    assert back[0] == 0
    pinned[0] = 3
    runtime.synchronize()
    assert back[0] == 2


def test_an_event_gives_the_time_between_two_points(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=iter((1.0, 1.25)).__next__)
    monkeypatch.setattr("cuengine.device.emulated.host.time", clock)
    runtime = EmulatedRuntime()
    first, second = runtime.event(timing=True), runtime.event(timing=True)
    first.record()
    second.record()
    second.wait()
    assert second.elapsed_ms(first) == 250


LENGTHS, TABLE = [5, 9], [[3, -1, -1], [1, 0, -1]]
"""Two sequences in blocks of 4 + 4 slots: blocks 2 and 4, and the last slots, are nobody's."""


class Guarded:
    """A cache of 5 blocks of 8 slots, of which `row` reads and `copy` copies."""

    def __init__(self) -> None:
        self.runtime = EmulatedRuntime()
        self.cache = self.runtime.empty((1, 2, 5, 1, 8, WIDTH), FLOAT)
        self.tables = on_device(self.runtime, np.array(TABLE, np.int32))
        self.kernel = take_rows(self.runtime)
        self.out = self.runtime.empty((1, WIDTH), FLOAT)

    def guard(self, new: list[int]) -> None:
        self.runtime.guard(
            self.cache,
            self.tables,
            np.array(TABLE, np.int32),
            np.array(LENGTHS, np.int32),
            np.array(new, np.int64),
        )

    def move(self, slot: int, *, write: bool) -> None:
        """One slot of K to `out`, or a row of numbers into it."""
        index = on_device(self.runtime, np.array([slot if not write else 0], np.int32))
        source = on_device(self.runtime, np.ones((1, WIDTH), np.float32)) if write else self.cache
        address = self.runtime.address
        target = address(self.out)
        if write:
            target = address(self.cache) + slot * WIDTH * 4
        self.kernel((1, 1, 1), (32, 1, 1), target, address(source), address(index), WIDTH)


OWNED = [24, 25, 26, 27, 28, 8, 9, 10, 11, 12, 13, 14, 15, 0]


def test_slots_of_the_batch_can_be_written_and_then_read() -> None:
    cache = Guarded()
    cache.guard(OWNED)
    for slot in OWNED:
        cache.move(slot, write=True)
        cache.move(slot, write=False)


def test_a_slot_that_the_step_writes_is_not_read_before_even_where_it_was_written_once() -> None:
    cache = Guarded()
    cache.guard(OWNED)
    cache.move(24, write=True)
    cache.guard([24])
    with pytest.raises(KernelFault, match="never written"):
        cache.move(24, write=False)


def test_a_slot_written_in_an_earlier_step_can_be_read() -> None:
    cache = Guarded()
    cache.guard(OWNED)
    cache.move(25, write=True)
    cache.guard([24])
    cache.move(25, write=False)


@pytest.mark.parametrize("slot", [29, 1, 16, 39], ids=["end", "end of 2nd", "block", "scratch"])
@pytest.mark.parametrize("write", [True, False])
def test_slots_behind_a_sequence_and_blocks_of_nobody_are_no_access(slot: int, write: bool) -> None:
    cache = Guarded()
    cache.guard(OWNED)
    with pytest.raises(KernelFault, match="not the kernel's"):
        cache.move(slot, write=write)


def test_entries_of_the_table_behind_a_sequences_last_block_are_no_access() -> None:
    cache = Guarded()
    cache.guard(OWNED)
    with pytest.raises(AccessError, match="not to be touched"):
        on_host(cache.runtime, cache.tables)
    np.testing.assert_array_equal(on_host(cache.runtime, cache.tables[1][:2]), [1, 0])


def test_copies_open_whole_blocks_until_the_next_guard_and_carry_what_was_written() -> None:
    cache = Guarded()
    cache.guard(OWNED)
    cache.move(24, write=True)
    cache.runtime.unguard(cache.cache, np.array([3], np.int32), np.array([1], np.int32))
    cache.move(31, write=False)
    cache.move(15, write=True)
    cache.guard([])
    with pytest.raises(KernelFault, match="not the kernel's"):
        cache.move(31, write=False)
    cache.move(8, write=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arguments_are_packed_as_each_kernel_has_its_parameters(dtype: str) -> None:
    checked = set()
    for program in programs(dtype, 16, 80):
        try:
            kernels = get_kernels(program, 80)
        except NvrtcError:
            pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")
        ptx = parse(kernels.ptx.read_text())
        symbols = {name.partition("<")[0]: symbol for name, symbol in kernels.names.items()}
        symbols |= {name: name for name in program.plain_kernels}
        assert set(symbols.values()) == set(ptx.kernels)
        for kernel, symbol in symbols.items():
            name = kernel.removesuffix(attention_suffix(dtype, 80))
            offset, places = 0, []
            for letter in ARGUMENTS[name]:
                size = struct.calcsize(letter)
                offset = -(-offset // size) * size
                places.append((offset, size))
                offset += size
            assert places == [(param.offset, param.size) for param in ptx.kernels[symbol].params], (
                name
            )
            assert offset == struct.calcsize(f"@{ARGUMENTS[name]}")
            checked.add(name)
    assert checked == set(ARGUMENTS)
