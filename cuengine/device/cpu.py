"""The `cpu` device: NumPy arrays in float32, kernels in Numba, or in NumPy where there is none.

What the operations compute is in packed.py, numba_kernels.py and numba_sampler.py, or else in
numpy_kernels.py and sampler.py; this module owns memory and threads.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch, Float32, Int32, SamplerOutput, SamplingBatch
from cuengine.device import numpy_kernels, sampler
from cuengine.device.interface import AttentionShape

logger = logging.getLogger(__name__)

FREE_MEMORY_SHARE = 0.5
"""Part of the free memory that the KV cache may take where nothing else is said."""

MAX_DEFAULT_CACHE = 4 * 2**30
"""Bytes; more than a default on a shared machine should claim."""


class Kernels(Protocol):
    """What numpy_kernels.py and numba_kernels.py have in common; results go to `out`."""

    def rms_norm(self, x: Float32, weight: Float32, eps: float, out: Float32) -> None: ...

    def add_rms_norm(
        self, x: Float32, residual: Float32, weight: Float32, eps: float, out: Float32
    ) -> None: ...

    def silu_mul(self, gate_up: Float32, out: Float32) -> None: ...

    def rotary_cache(
        self,
        qkv: Float32,
        cos_sin: Float32,
        kv_layer: Float32,
        batch: Batch,
        shape: AttentionShape,
        out: Float32,
    ) -> None: ...

    def paged_attention(
        self, q: Float32, kv_layer: Float32, batch: Batch, shape: AttentionShape, out: Float32
    ) -> None: ...


class _Results:
    """Arrays for results, used again by the next call of the same operation.

    Allocated anew each time, results of some megabytes would be mapped and unmapped, or leave holes
    that let the process grow.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, int], Float32] = {}

    def take(self, operation: str, num_rows: int, width: int) -> Float32:
        """float32 [num_rows, width], with whatever was in it."""
        array = self._arrays.get((operation, width))
        if array is None or len(array) < num_rows:
            # Powers of two: batches that grow row by row allocate seldom.
            array = np.empty((1 << (num_rows - 1).bit_length(), width), np.float32)
            self._arrays[operation, width] = array
        return array[:num_rows]


class CpuDevice:
    """Implements `Device`. Arrays are C-contiguous float32 numpy.ndarrays; a step is its Batch.

    Every call returns with its work done; `overlaps` may be set all the same, to test the engine.

    use_numba: None takes it where it is installed.
    """

    name = "cpu"
    dtype = "float32"
    overlaps = False
    measures_memory = False
    compute_rate = 100e9
    swap_rate = 5e9

    def __init__(self, *, use_numba: bool | None = None) -> None:
        self._packed: ModuleType | None = None
        self._arena: Any = None
        self._kernels: Kernels = numpy_kernels
        self._draw_rows: sampler.DrawRows = sampler.draw_rows
        self._last_tokens: Int32 = np.empty(0, np.int32)
        self._results = _Results()
        self._no_range = nullcontext()
        if use_numba is None:
            if importlib.util.find_spec("numba") is None:
                return
            try:
                self._load_numba()
            except ImportError as error:
                logger.warning("Numba is installed but cannot be imported: %s", error)
        elif use_numba:
            self._load_numba()

    def _load_numba(self) -> None:
        # Importing Numba takes a third of a second; compiling, where its cache is cold, far more.
        from cuengine.device import numba_setup

        with numba_setup.kernels_defined_here():
            from cuengine.device import numba_kernels, numba_sampler, packed
        numba_setup.start_threads(cpu_quota())
        self._packed = packed
        self._arena = packed.Arena()
        self._kernels = numba_kernels
        self._draw_rows = numba_sampler.draw_rows

    @property
    def kernels(self) -> str:
        """Which kernels are in use: "Numba" or "NumPy"."""
        return "NumPy" if self._packed is None else "Numba"

    def free_memory(self) -> int:
        return available_memory()

    def kv_cache_budget(self, gpu_memory_utilization: float) -> int:
        return min(int(self.free_memory() * FREE_MEMORY_SHARE), MAX_DEFAULT_CACHE)

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
            return np.ascontiguousarray(array)
        return np.ascontiguousarray(array, dtype=np.float32)

    def upload_matrix(self, array: NDArray[Any]) -> Any:
        weight = self.upload(array)
        return weight if self._packed is None else self._packed.pack(weight, self._arena)

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def prepare(self, shape: AttentionShape, *, progress: bool = False) -> None:
        return

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Float32:
        # Zero pages of the kernel's: memory is taken as blocks are first written.
        return np.zeros(
            (num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim), np.float32
        )

    def allocate_host_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Float32:
        return self.allocate_kv_cache(num_layers, num_blocks, block_size, shape)

    def range(self, name: str) -> AbstractContextManager[None]:
        return self._no_range

    def stage(self, batch: Batch) -> Batch:
        sources = batch.token_sources
        if sources is None:
            return batch
        token_ids = batch.token_ids.copy()
        token_ids[sources >= 0] = self._last_tokens[sources[sources >= 0]]
        return replace(batch, token_ids=token_ids, token_sources=None)

    def replay(self, staged: Batch, body: Callable[[], Float32]) -> Float32:
        return body()

    def embedding(self, weight: Any, staged: Batch) -> Float32:
        ids = staged.token_ids
        rows: Float32 = weight[ids] if self._packed is None else weight.rows(ids)
        return rows

    def linear(self, x: Float32, weight: Any, bias: Float32 | None = None) -> Float32:
        if self._packed is None:
            out = self._results.take("linear", len(x), len(weight))
            np.matmul(x, weight.T, out=out)
        else:
            out = self._results.take("linear", len(x), weight.out_features)
            self._packed.linear(x, weight, out)
        if bias is not None:
            out += bias
        return out

    def logits(self, hidden: Float32, weight: Any) -> Float32:
        return self.linear(hidden, weight)

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        out = self._results.take("norm", *x.shape)
        self._kernels.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Float32, residual: Float32, weight: Float32, eps: float) -> Float32:
        out = self._results.take("norm", *x.shape)
        self._kernels.add_rms_norm(x, residual, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Float32) -> Float32:
        out = self._results.take("silu", len(gate_up), gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return out

    def rotary_cache(
        self,
        qkv: Float32,
        cos_sin: Float32,
        kv_layer: Float32,
        staged: Batch,
        shape: AttentionShape,
    ) -> Float32:
        out = self._results.take("rotary", len(qkv), shape.num_heads * shape.head_dim)
        self._kernels.rotary_cache(qkv, cos_sin, kv_layer, staged, shape, out)
        return out

    def paged_attention(
        self, q: Float32, kv_layer: Float32, staged: Batch, shape: AttentionShape
    ) -> Float32:
        out = self._results.take("attention", *q.shape)
        self._kernels.paged_attention(q, kv_layer, staged, shape, out)
        return out

    def take_rows(self, x: Float32, staged: Batch) -> Float32:
        return x[staged.logits_indices]

    def copy_blocks(self, kv_cache: Float32, staged: Batch) -> None:
        if len(staged.block_copies):
            source, target = staged.block_copies.T
            kv_cache[:, :, target] = kv_cache[:, :, source]

    def swap_out(self, kv_cache: Float32, host_cache: Float32, staged: Batch) -> None:
        if staged.swap_outs is not None:
            source, target = staged.swap_outs.T
            host_cache[:, :, target] = kv_cache[:, :, source]

    def swap_in(self, kv_cache: Float32, host_cache: Float32, staged: Batch) -> None:
        if staged.swap_ins is not None:
            source, target = staged.swap_ins.T
            kv_cache[:, :, target] = host_cache[:, :, source]

    def sample(
        self, logits: Float32, sampling: SamplingBatch, *, first_row: int = 0
    ) -> SamplerOutput:
        output = sampler.sample(logits, sampling, self._draw_rows)
        earlier = self._last_tokens[:first_row]
        self._last_tokens = np.concatenate([earlier, output.token_ids])
        return output


def available_memory(root: Path = Path("/")) -> int:
    """Bytes free by the kernel's own estimate, or what is left of a cgroup's limit if less.

    Page cache counts as free in both. Both cgroup versions are read, each from this process's group
    up to the top.
    """
    free = _meminfo(root / "proc/meminfo")
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroups(root, "memory"):
            try:
                limit = (folder / limit_name).read_text().strip()
                usage = (folder / usage_name).read_text().strip()
                stat = (folder / "memory.stat").read_text().split()
            except OSError:
                continue
            if limit != "max":
                cache = int(stat[stat.index(cache_name) + 1]) if cache_name in stat else 0
                free = min(free, max(0, int(limit) - int(usage) + cache))
    return free


def cpu_quota(root: Path = Path("/")) -> int | None:
    """CPUs that a cgroup's limit lets this process use, rounded up; None: no limit.

    More threads than that would be stopped together, each time that the quota is used up.
    """
    quotas = []
    for folder in _cgroups(root, "cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            continue
        if quota not in ("max", "-1"):
            quotas.append(-(-int(quota) // int(period)))
    return min(quotas, default=None)


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no MemAvailable line; Linux 3.14 or later is needed")


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of the cgroups, of either version, that limit this process, innermost first."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        relative = Path(path.lstrip("/"))
        folders += [base / folder for folder in (relative, *relative.parents)]
    return folders
