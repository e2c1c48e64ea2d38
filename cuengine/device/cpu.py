"""The `cpu` device: NumPy arrays in float32; products by packed.py, or by NumPy's BLAS.

What the operations compute is in numpy_kernels.py and numba_kernels.py; this module owns memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch, Float32, SamplerOutput, SamplingBatch
from cuengine.device import numpy_kernels, sampler
from cuengine.device.interface import AttentionShape

try:
    from cuengine.device import packed
except ImportError:  # no Numba
    packed = None  # type: ignore[assignment]


class CpuDevice:
    """Implements `Device`. Arrays are C-contiguous float32 numpy.ndarrays; a step is its Batch."""

    name = "cpu"
    dtype = "float32"

    def free_memory(self) -> int:
        return available_memory()

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
            return np.ascontiguousarray(array)
        return np.ascontiguousarray(array, dtype=np.float32)

    def upload_matrix(self, array: NDArray[Any]) -> Any:
        weight = self.upload(array)
        return weight if packed is None else packed.pack(weight)

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Float32:
        # Zero pages of the kernel's: memory is taken as blocks are first written.
        return np.zeros(
            (num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim), np.float32
        )

    def stage(self, batch: Batch) -> Batch:
        return batch

    def embedding(self, weight: Any, staged: Batch) -> Float32:
        ids = staged.token_ids
        rows: Float32 = weight[ids] if packed is None else weight.rows(ids)
        return rows

    def linear(self, x: Float32, weight: Any, bias: Float32 | None = None) -> Float32:
        out: Float32 = x @ weight.T if packed is None else packed.linear(x, weight)
        if bias is not None:
            out += bias
        return out

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        out = np.empty_like(x)
        numpy_kernels.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Float32, residual: Float32, weight: Float32, eps: float) -> Float32:
        out = np.empty_like(x)
        numpy_kernels.add_rms_norm(x, residual, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Float32) -> Float32:
        out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        numpy_kernels.silu_mul(gate_up, out)
        return out

    def rotary_cache(
        self,
        qkv: Float32,
        cos_sin: Float32,
        kv_layer: Float32,
        staged: Batch,
        shape: AttentionShape,
    ) -> Float32:
        out = np.empty((len(qkv), shape.num_heads * shape.head_dim), np.float32)
        numpy_kernels.rotary_cache(qkv, cos_sin, kv_layer, staged, shape, out)
        return out

    def paged_attention(
        self, q: Float32, kv_layer: Float32, staged: Batch, shape: AttentionShape
    ) -> Float32:
        out = np.empty_like(q)
        numpy_kernels.paged_attention(q, kv_layer, staged, shape, out)
        return out

    def take_rows(self, x: Float32, staged: Batch) -> Float32:
        return x[staged.logits_indices]

    def copy_blocks(self, kv_cache: Float32, staged: Batch) -> None:
        if len(staged.block_copies):
            source, target = staged.block_copies.T
            kv_cache[:, :, target] = kv_cache[:, :, source]

    def sample(self, logits: Float32, sampling: SamplingBatch) -> SamplerOutput:
        return sampler.sample(logits, sampling)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes free by the kernel's own estimate, or what is left of a cgroup's limit if less.

    Page cache counts as free in both. Both cgroup versions are read, each from this process's group
    up to the top.
    """
    free = _meminfo(root / "proc/meminfo")
    for limit, usage, cache in _cgroups(root):
        free = min(free, max(0, limit - usage + cache))
    return free


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no MemAvailable line; Linux 3.14 or later is needed")


def _cgroups(root: Path) -> list[tuple[int, int, int]]:
    """(limit, usage, inactive page cache) of each memory cgroup that this process is in."""
    found = []
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            try:
                limit = (base / folder / names[0]).read_text().strip()
                usage = (base / folder / names[1]).read_text().strip()
                stat = (base / folder / "memory.stat").read_text().split()
            except OSError:
                continue
            if limit != "max":
                cache = int(stat[stat.index(names[2]) + 1]) if names[2] in stat else 0
                found.append((int(limit), int(usage), cache))
    return found
