"""Which kernels there are: source files, and the template instances that a model needs of each.

A program is one source compiled once; a dtype and a head size give a model's programs. How they are
compiled is in kernel_cache.py, how they are launched in the CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Our names of dtypes, and the kernels' own."""

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)

TENSOR_CORE_ARCHITECTURE = 80
"""From here on mma.sync m16n8k16 and cp.async exist, for 16-bit dtypes."""


@dataclass(frozen=True, slots=True)
class Program:
    """One compilation.

    expressions    template instances
    plain_kernels  kernels without a template, whose symbols are their names
    """

    name: str
    source: str
    expressions: tuple[str, ...] = ()
    plain_kernels: tuple[str, ...] = ()


def uses_tensor_cores(dtype: str, architecture: int) -> bool:
    """Whether attention runs on tensor cores there, or in the plain version."""
    return dtype != "float32" and architecture >= TENSOR_CORE_ARCHITECTURE


def attention_suffix(dtype: str, architecture: int) -> str:
    return "" if uses_tensor_cores(dtype, architecture) else "_plain"


def programs(dtype: str, head_dim: int, architecture: int) -> tuple[Program, ...]:
    """What a model of this dtype and head size needs on this architecture, and nothing else."""
    t = DTYPES[dtype]
    suffix = attention_suffix(dtype, architecture)

    def by_dtype(source: str, *kernels: str, plain: tuple[str, ...] = ()) -> Program:
        instances = tuple(f"{kernel}<{t}>" for kernel in kernels)
        return Program(f"{source}_{t}", f"{source}.cu", instances, plain)

    def by_head(source: str, *kernels: str) -> Program:
        return Program(
            f"{source}_{t}_{head_dim}",
            f"{source}.cu",
            tuple(f"{kernel}<{t}, {head_dim}>" for kernel in kernels),
        )

    return (
        by_dtype("norm", "rms_norm", "add_rms_norm"),
        by_dtype("activation", "silu_mul"),
        by_dtype("embedding", "embedding", "take_rows", "broadcast_row", plain=("gather_tokens",)),
        by_head("rotary_cache", "rotary_cache"),
        by_head(
            "paged_attention_decode",
            f"paged_attention_decode{suffix}",
            "paged_attention_reduce",
        ),
        by_head("paged_attention_prefill", f"paged_attention_prefill{suffix}"),
        Program("block_copy", "block_copy.cu", plain_kernels=("copy_blocks", "swap_blocks")),
        # Logits are float32 in every dtype.
        Program(
            "sampling",
            "sampling.cu",
            plain_kernels=("apply_constraints", "sample_tokens", "report_logprobs"),
        ),
    )
