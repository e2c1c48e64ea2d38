"""The CuPy runtime on a CuPy for the host (fake_cupy.py), with real kernels run by the emulator and
products by the cuBLAS stand-in; what it says where a GPU, a driver or a wheel is missing; and that
no file of the product asks CuPy for more than fake_cupy.py has.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Gpu, make_cupy
from numpy.typing import NDArray

from cuengine import LLM, SamplingParams
from cuengine.device import select
from cuengine.device.cuda import cupy_runtime, find
from cuengine.device.cuda.cublas import WORKSPACE_BYTES
from cuengine.device.cuda.cupy_runtime import CupyModule, CupyRuntime
from cuengine.device.cuda.find import usable_gpu
from cuengine.device.cuda.runtime import Runtime
from cuengine.device.kernel_cache import Kernels, get_kernels
from cuengine.device.kernel_variants import programs
from cuengine.device.nvrtc import NvrtcError
from cuengine.errors import ConfigError, DeviceMemoryError

FLOAT = np.dtype(np.float32)


@pytest.fixture(scope="session")
def cublas_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = tmp_path_factory.mktemp("cublas") / "libcublas_stub.so"
    source = Path(__file__).with_name("cublas_stub.c")
    command = ["gcc", "-std=c11", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run([*command, "-lm"], check=True)
    return library


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def make_runtime(
    gpu: Gpu, cublas_stub: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], CupyRuntime]:
    """On the fake, products captured like all else."""

    def make() -> CupyRuntime:
        monkeypatch.setitem(sys.modules, "cupy", make_cupy(gpu))
        monkeypatch.setattr(cupy_runtime, "usable_gpu", lambda: (True, "found a fake"))
        monkeypatch.setattr(cupy_runtime, "find_cublas", lambda major: cublas_stub)
        runtime = CupyRuntime()
        multiply = runtime.cublas.linear

        def linear(*addresses: int, **shape: Any) -> None:
            gpu.calls.append("gemm")
            gpu.run(lambda: multiply(*addresses, **shape))

        monkeypatch.setattr(runtime.cublas, "linear", linear)
        return runtime

    return make


@pytest.fixture
def runtime(make_runtime: Callable[[], CupyRuntime]) -> CupyRuntime:
    return make_runtime()


def send(runtime: Runtime, array: NDArray[Any]) -> Any:
    staged = runtime.pinned(array.shape, array.dtype)
    staged[...] = array
    target = runtime.empty(array.shape, array.dtype)
    runtime.copy_in(target, staged)
    return target


def fetch(runtime: Runtime, array: Any) -> NDArray[Any]:
    target = runtime.pinned(array.shape, array.dtype)
    runtime.copy_out(target, array)
    runtime.synchronize()
    return target


def norm_kernels() -> Kernels:
    program = next(p for p in programs("float32", 32, 80) if p.source == "norm.cu")
    try:
        return get_kernels(program, 80)
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")


class Norm:
    """y = rms_norm(x) of rows of 8, as its device would launch it."""

    def __init__(self, runtime: CupyRuntime) -> None:
        kernels = norm_kernels()
        self.runtime = runtime
        module = runtime.load_module(kernels.cubin, kernels.ptx)
        self.function = module.function(kernels.names["rms_norm<fp32>"])
        self.weight = send(runtime, np.arange(1, 9, dtype=np.float32))

    def __call__(self, y: Any, x: Any) -> None:
        pointers = (self.runtime.address(array) for array in (y, x, self.weight))
        arguments = struct.pack("@PPPif", *pointers, 8, 1e-5)
        self.function.launch((len(x), 1, 1), (32, 1, 1), arguments)

    @staticmethod
    def expected(x: NDArray[Any]) -> NDArray[Any]:
        wide = x.astype(np.float64)
        scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
        result: NDArray[Any] = wide * scale * np.arange(1, 9)
        return result


def rows(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_it_has_all_that_a_runtime_must_have(runtime: CupyRuntime) -> None:
    wanted = {name for name in vars(Runtime) if not name.startswith("_")}
    assert not [
        name for name in wanted | set(Runtime.__annotations__) if not hasattr(runtime, name)
    ]
    assert (runtime.name, runtime.architecture, runtime.multiprocessors) == ("Fake GPU", 80, 4)


def test_a_kernel_reads_and_writes_what_was_copied(runtime: CupyRuntime) -> None:
    norm, x = Norm(runtime), rows(1, 3, 8)
    y = runtime.empty((3, 8), FLOAT)
    norm(y, send(runtime, x))
    np.testing.assert_allclose(fetch(runtime, y), Norm.expected(x), rtol=1e-5, atol=1e-6)


def test_views_share_memory_and_launch_nothing(gpu: Gpu, runtime: CupyRuntime) -> None:
    array = send(runtime, np.arange(24, dtype=np.int32).reshape(2, 3, 4))
    before = list(gpu.calls)
    part = array[1][1:].reshape(-1).view(np.dtype(np.uint8))[4:8].view(np.dtype(np.int32))
    assert gpu.calls == before
    assert fetch(runtime, part).tolist() == [17]
    assert runtime.address(part) == runtime.address(array) + 17 * 4


def test_bfloat16_goes_there_and_back(runtime: CupyRuntime) -> None:
    x = rows(2, 4, 5).astype(ml_dtypes.bfloat16)
    assert np.array_equal(fetch(runtime, send(runtime, x)), x)


def test_pinned_memory_is_exactly_as_large_as_asked_for_and_kernels_reach_it(
    gpu: Gpu, runtime: CupyRuntime
) -> None:
    x = runtime.pinned((5, 8), FLOAT)
    x[:] = rows(3, 5, 8)
    assert gpu.memory.describe(runtime.address(x)) == "byte 0 of pinned memory, which has 160"
    y = runtime.empty((5, 8), FLOAT)
    Norm(runtime)(y, x)
    np.testing.assert_allclose(fetch(runtime, y), Norm.expected(x), rtol=1e-5, atol=1e-6)


def test_empty_arrays_are_no_special_case(runtime: CupyRuntime) -> None:
    assert runtime.empty((0, 8), FLOAT).shape == (0, 8)
    assert runtime.pinned((0,), FLOAT).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_gemm_gives_float32_or_the_dtype_of_its_factors(runtime: CupyRuntime, dtype: Any) -> None:
    x, weight = rows(4, 3, 16).astype(dtype), rows(5, 7, 16).astype(dtype)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    sources = send(runtime, x), send(runtime, weight)
    for out_dtype, tolerance in ((np.float32, 1e-5), (dtype, 2**-6)):
        out = runtime.empty((3, 7), np.dtype(out_dtype))
        runtime.gemm(out, *sources)
        once = fetch(runtime, out).astype(np.float64)
        runtime.gemm(out, *sources, accumulate=True)
        twice = fetch(runtime, out).astype(np.float64)
        np.testing.assert_allclose(once, expected, atol=tolerance * 4)
        np.testing.assert_allclose(twice, once + expected, atol=tolerance * 8)


def test_a_graph_runs_what_was_captured_on_what_is_there_when_it_is_launched(
    gpu: Gpu, runtime: CupyRuntime
) -> None:
    norm = Norm(runtime)
    source, weight = runtime.pinned((2, 8), FLOAT), send(runtime, rows(6, 3, 8))
    x, y = runtime.empty((2, 8), FLOAT), runtime.empty((2, 8), FLOAT)
    out = send(runtime, np.zeros((2, 3), np.float32))
    runtime.begin_capture()
    runtime.copy_in(x, source)
    norm(y, x)
    runtime.gemm(out, y, weight)
    graph = runtime.end_capture()
    assert not fetch(runtime, out).any()  # captured, and not run
    for seed in (7, 8):
        source[:] = rows(seed, 2, 8)
        gpu.calls.clear()
        graph.launch()
        assert gpu.calls == ["graphLaunch"]
        expected = Norm.expected(source) @ rows(6, 3, 8).T
        np.testing.assert_allclose(fetch(runtime, out), expected, rtol=1e-4, atol=1e-4)


def test_memory_asked_for_while_capturing_is_an_error_and_works_again_afterwards(
    runtime: CupyRuntime,
) -> None:
    runtime.begin_capture()
    with pytest.raises(RuntimeError, match="captured"):
        runtime.empty((4,), FLOAT)
    runtime.end_capture()
    assert runtime.empty((4,), FLOAT).nbytes == 16


def test_memory_comes_back_with_the_last_view(gpu: Gpu, runtime: CupyRuntime) -> None:
    assert runtime.memory_info() == (gpu.total - WORKSPACE_BYTES, gpu.total)
    view = runtime.empty((4, 1000), FLOAT)[1]
    gc.collect()
    assert runtime.memory_info()[0] == gpu.total - WORKSPACE_BYTES - 16000
    del view
    gc.collect()
    assert runtime.memory_info()[0] == gpu.total - WORKSPACE_BYTES


def test_too_little_device_memory_says_what_was_wanted_and_what_there_is(
    runtime: CupyRuntime,
) -> None:
    with pytest.raises(DeviceMemoryError, match=r"2,048 MiB.*asked for; 992 MiB of 1,024 MiB"):
        runtime.empty((2**29,), FLOAT)


def test_a_thread_that_has_no_context_gets_one(gpu: Gpu, runtime: CupyRuntime) -> None:
    norm, x = Norm(runtime), rows(9, 2, 8)
    source, y = send(runtime, x), runtime.empty((2, 8), FLOAT)
    gpu.has_context = False  # CUDA's is the thread's own
    thread = threading.Thread(target=norm, args=(y, source))
    thread.start()
    thread.join()
    np.testing.assert_allclose(fetch(runtime, y), Norm.expected(x), rtol=1e-5, atol=1e-6)


def test_a_launch_that_the_driver_refuses_is_an_error(runtime: CupyRuntime) -> None:
    norm = Norm(runtime)
    with pytest.raises(RuntimeError, match="CUDA_ERROR 1"):
        norm.function.launch((0, 1, 1), (32, 1, 1), b"")


def test_large_shared_memory_is_asked_for_before_it_is_used(gpu: Gpu, runtime: CupyRuntime) -> None:
    kernels = norm_kernels()
    module: CupyModule = runtime.load_module(kernels.cubin, kernels.ptx)
    module.function(kernels.names["rms_norm<fp32>"], 60_000)
    assert list(gpu.shared_limits.values()) == [60_000]
    module.function(kernels.names["add_rms_norm<fp32>"])
    assert list(gpu.shared_limits.values()) == [60_000]


def test_a_cubin_that_the_driver_does_not_load_is_named(
    runtime: CupyRuntime, tmp_path: Path
) -> None:
    path = tmp_path / "norm.cubin"
    path.write_text("nothing")
    with pytest.raises(ConfigError, match=r"norm\.cubin.*does not load"):
        runtime.load_module(path, path)


def test_events_measure_and_ranges_nest(gpu: Gpu, runtime: CupyRuntime) -> None:
    start, end = runtime.event(timing=True), runtime.event(timing=True)
    runtime.event().wait()
    start.record()
    with runtime.range("step"), runtime.range("layer 0"):
        runtime.synchronize()
    end.record()
    end.wait()
    # The stand-in's clock counts calls: synchronize, and end's own record.
    assert end.elapsed_ms(start) == 2
    assert gpu.ranges == ["step", "layer 0", "pop", "pop"]


def test_the_cublas_handle_goes_with_the_runtime(
    make_runtime: Callable[[], CupyRuntime], cublas_stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ctypes.CDLL(str(cublas_stub))
    library.stub_log.restype = ctypes.c_char_p
    runtime = make_runtime()
    monkeypatch.undo()  # which holds on to it
    before = library.stub_log().count(b"destroy")
    del runtime
    gc.collect()
    assert library.stub_log().count(b"destroy") == before + 1


def test_the_engine_makes_the_tokens_of_the_cpu_and_replays_graphs(
    gpu: Gpu,
    make_runtime: Callable[[], CupyRuntime],
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm_kernels()  # or skip
    monkeypatch.setattr(cupy_runtime, "CupyRuntime", make_runtime)
    monkeypatch.setattr(select, "usable_gpu", lambda: (True, "found a fake"), raising=False)
    prompts: Any = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 5, 19)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)

    def tokens(device: str) -> list[list[int]]:
        llm = LLM(
            str(tiny_model("gqa_default")), device=device, dtype="float32",
            skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
            max_num_batched_tokens=16, num_blocks=20,
        )  # fmt: skip
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    assert tokens("cuda") == tokens("cpu")
    assert "graphLaunch" in gpu.calls


# What is missing


class Driver:
    """libcuda with one GPU."""

    def __init__(
        self, *, init: int = 0, count: int = 1, capability: tuple[int, int] = (9, 0),
        version: int = 13000,
    ) -> None:  # fmt: skip
        self.init, self.count, self.capability, self.version = init, count, capability, version

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.capability[attribute - 75]
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine(driver=..., cupy=13): what usable_gpu finds."""

    def setup(driver: Driver | None, cupy: int | None) -> None:
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr(find.ctypes, "CDLL", load)
        monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: cupy)
        monkeypatch.setattr(find, "cupy_cuda_major", lambda: cupy)

    return setup


def test_a_gpu_with_driver_and_cupy_can_be_used(machine: Callable[..., None]) -> None:
    machine(driver=Driver(), cupy=13)
    assert usable_gpu() == (True, "found NVIDIA H200")
    machine(driver=Driver(version=13000), cupy=12)
    assert usable_gpu()[0]


@pytest.mark.parametrize(
    ("driver", "cupy", "says"),
    [
        (None, 13, r"no NVIDIA driver \(libcuda\.so\.1\).*--gpus all"),
        (Driver(init=100), 13, r"no usable GPU \(error 100\).*nvidia-smi"),
        (Driver(count=0), 13, "finds no GPU.*CUDA_VISIBLE_DEVICES"),
        (Driver(capability=(6, 1)), 13, r"H200 has compute capability 6\.1.*needs 7\.0"),
        (Driver(), None, r"CuPy is not installed: pip install '\.\[cuda13\]'"),
        (Driver(version=12040), 13, r"for CUDA 12, and the CuPy.*CUDA 13.*580 or newer.*cuda12"),
    ],
    ids=["driver", "broken", "none", "old GPU", "cupy", "old driver"],
)
def test_what_is_missing_is_said_with_what_to_do(
    machine: Callable[..., None], driver: Driver | None, cupy: int | None, says: str
) -> None:
    machine(driver=driver, cupy=cupy)
    with pytest.raises(ConfigError, match=says):
        CupyRuntime()


def test_a_cupy_that_does_not_import_says_what_to_install(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(driver=Driver(), cupy=13)
    monkeypatch.setattr(cupy_runtime, "usable_gpu", lambda: (True, ""))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"CuPy cannot be imported.*'\.\[cuda12\]'"):
        CupyRuntime()


# What CuPy is asked for


def chains(tree: ast.AST) -> Iterator[str]:
    """Attribute chains on whatever is called cupy or _cupy, as `cuda.runtime`."""
    for found in ast.walk(tree):
        names: list[str] = []
        node = found
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id == "cupy":
            yield ".".join(names)
        elif "_cupy" in names:
            yield ".".join(names[names.index("_cupy") + 1 :])


def test_cupy_is_asked_for_nothing_that_compiles_a_kernel() -> None:
    allowed = {"", "ndarray", "RawModule", "cuda"}
    allowed |= {
        f"cuda.{name}"
        for name in (
            *("Event", "Memory", "MemoryPointer", "PinnedMemory", "PinnedMemoryPointer", "Stream"),
            *("driver", "get_elapsed_time", "nvtx", "runtime"),
        )
    }
    source = Path(cupy_runtime.__file__).read_text()
    used = set(chains(ast.parse(source)))
    assert "cuda.Memory" in used
    assert not used - allowed
