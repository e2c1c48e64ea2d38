"""The model's kernels, compiled, loaded and ready to be called with their arguments.

Which kernels there are is in kernel_variants.py, how they are compiled and cached in
kernel_cache.py. Grids and what the arguments mean stand at the head of each file under cuda/.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from tqdm import tqdm

from cuengine.device.attention_launch import decode_launch, prefill_launch
from cuengine.device.cuda.runtime import Dim, Function, Runtime
from cuengine.device.kernel_cache import Kernels, get_kernels
from cuengine.device.kernel_variants import attention_suffix, programs, uses_tensor_cores

ARGUMENTS = {
    "rms_norm": "PPPif",
    "add_rms_norm": "PPPPif",
    "silu_mul": "PPi",
    "embedding": "PPPi",
    "take_rows": "PPPi",
    "broadcast_row": "PPi",
    "gather_tokens": "PPPi",
    "rotary_cache": "PPPPPPiiii",
    "paged_attention_decode": "PPPPPPPPiiiiiiif",
    "paged_attention_reduce": "PPPPiiii",
    "paged_attention_prefill": "PPPPPPPiiiiif",
    "copy_blocks": "PPii",
    "swap_blocks": "PPPiii",
    "apply_constraints": "PPPiPPPPiPPPPPPP",
    "sample_tokens": "PPPiPPPPPPPP",
    "report_logprobs": "PPPPPiPPi",
}
"""Parameters of each kernel as `struct` has them: P a pointer, i an int, f a float."""

GEMM = "cublas gemm"
"""What a matrix product is called among kernels: which one it takes is cuBLAS's choice."""

Watcher = Callable[[str], None]
"""Told the name of a kernel, or GEMM, just before it is launched."""


class Kernel:
    """A kernel that takes its arguments one by one: pointers as integers, then numbers.

    name  as in cuda/*.cu
    """

    __slots__ = ("_function", "_launch", "_pack", "name")

    def __init__(self, function: Function, arguments: str, name: str) -> None:
        self._function = function
        self._launch = function.launch
        self._pack = struct.Struct(f"@{arguments}").pack
        self.name = name

    def watch(self, watcher: Watcher | None) -> None:
        """From now on the watcher is told of launches; None: nobody, and nothing is asked."""
        launch = self._function.launch
        self._launch = launch if watcher is None else announced(self.name, launch, watcher)

    def __call__(
        self, grid: Dim, block: Dim, *arguments: int | float, shared_bytes: int = 0
    ) -> None:
        self._launch(grid, block, self._pack(*arguments), shared_bytes)


def announced(name: str, launch: Callable[..., None], watcher: Watcher) -> Callable[..., None]:
    """`launch`, of which the watcher is told."""

    def announce_and_launch(*arguments: Any, **keywords: Any) -> None:
        watcher(name)
        launch(*arguments, **keywords)

    return announce_and_launch


@dataclass(frozen=True, slots=True)
class KernelSet:
    """All kernels of a model; attention in the version for its dtype and this GPU."""

    rms_norm: Kernel
    add_rms_norm: Kernel
    silu_mul: Kernel
    embedding: Kernel
    take_rows: Kernel
    broadcast_row: Kernel
    gather_tokens: Kernel
    rotary_cache: Kernel
    paged_attention_decode: Kernel
    paged_attention_reduce: Kernel
    paged_attention_prefill: Kernel
    copy_blocks: Kernel
    swap_blocks: Kernel
    apply_constraints: Kernel
    sample_tokens: Kernel
    report_logprobs: Kernel

    def watch(self, watcher: Watcher | None) -> None:
        """As `Kernel.watch`, of all of them."""
        for field in fields(self):
            getattr(self, field.name).watch(watcher)


def load_kernels(
    runtime: Runtime, dtype: str, itemsize: int, head_dim: int, *, progress: bool
) -> KernelSet:
    """Compiles what is not in the cache, several programs at once, with a progress bar if asked.

    Raises NvrtcError where a program is missing and cannot be made.
    """
    architecture = runtime.architecture
    wanted = programs(dtype, head_dim, architecture)

    def get(index: int) -> Kernels:
        return get_kernels(wanted[index], architecture)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(
            tqdm(
                pool.map(get, range(len(wanted))),
                total=len(wanted),
                desc="Compiling kernels",
                unit="program",
                disable=not progress,
                delay=1.0,
                leave=False,
            )
        )
    tensor_cores = uses_tensor_cores(dtype, architecture)
    shared_bytes = {
        "paged_attention_decode": decode_launch(
            head_dim, itemsize, tensor_cores=tensor_cores
        ).shared_bytes,
        "paged_attention_prefill": prefill_launch(
            head_dim, itemsize, tensor_cores=tensor_cores
        ).shared_bytes,
    }
    suffix = attention_suffix(dtype, architecture)
    found = {}
    for program, kernels in zip(wanted, compiled, strict=True):
        module = runtime.load_module(kernels.cubin, kernels.ptx)
        symbols = {expression.partition("<")[0]: s for expression, s in kernels.names.items()}
        symbols |= {name: name for name in program.plain_kernels}
        for instance, symbol in symbols.items():
            name = instance.removesuffix(suffix)
            function = module.function(symbol, shared_bytes.get(name, 0))
            found[name] = Kernel(function, ARGUMENTS[name], instance)
    return KernelSet(**{field.name: found[field.name] for field in fields(KernelSet)})
