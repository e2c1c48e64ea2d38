"""The operations a model is written against, and the only way the engine touches arrays.

One implementation per kind of machine (cpu.py). Arrays are the device's own: callers pass them on
and never look inside. Shapes use num_tokens = tokens of the step, hidden, and the head counts of
`AttentionShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from cuengine.batch import Batch, SamplerOutput, SamplingBatch

Array = Any
"""An array in the device's memory (numpy.ndarray on `cpu`, cupy.ndarray on `cuda`)."""

StagedBatch = Any
"""A Batch as the device keeps it for one step; made by `Device.stage`, given to the operations."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Head counts and sizes of a model's attention; scale is what q·k is multiplied with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class Device(Protocol):
    """Weights are [out_features, in_features], as checkpoints have them, when uploaded.

    Results may live in buffers that the next call of the same operation reuses.
    """

    name: str
    dtype: str
    """Name of the dtype of weights and activations: "float32" on `cpu`."""

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def upload(self, array: NDArray[Any]) -> Array:
        """The array in device memory, floats in the device's dtype. May be the argument itself."""
        ...

    def upload_matrix(self, array: NDArray[Any]) -> Array:
        """A weight [out, in] for `linear` or `embedding`, laid out as this device multiplies it."""
        ...

    def download(self, array: Array) -> NDArray[Any]: ...

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Array:
        """[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; K then V.

        `kv_cache[i]` is what the operations of layer i are given.
        """
        ...

    def stage(self, batch: Batch) -> StagedBatch:
        """Bring the index arrays of a step to the device, once per step."""
        ...

    def embedding(self, weight: Array, staged: StagedBatch) -> Array:
        """[num_tokens, hidden]: rows of weight [vocab, hidden] for the step's token ids."""
        ...

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x [num_tokens, in] @ weight.T + bias -> [num_tokens, out], accumulated in float32.

        weight: from `upload_matrix`, as `embedding`'s.
        """
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x²) + eps) * weight over the last axis; x is left as it is."""
        ...

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> Array:
        """residual += x in place; returns rms_norm(residual)."""
        ...

    def silu_mul(self, gate_up: Array) -> Array:
        """gate_up [num_tokens, 2 * n] -> silu(gate_up[:, :n]) * gate_up[:, n:]."""
        ...

    def rotary_cache(
        self,
        qkv: Array,
        cos_sin: Array,
        kv_layer: Array,
        staged: StagedBatch,
        shape: AttentionShape,
    ) -> Array:
        """Rotate q and k by their positions and write k and v into their slots of the cache.

        Returns the rotated q [num_tokens, num_heads * head_dim].
        qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; cos_sin float32
        [max_len, head_dim] with the cosines in the first half. Pairs are (i, i + head_dim / 2), as
        transformers' `rotate_half` has them.
        """
        ...

    def paged_attention(
        self, q: Array, kv_layer: Array, staged: StagedBatch, shape: AttentionShape
    ) -> Array:
        """Causal attention of each query over its sequence's cached tokens, itself included.

        Prefill chunks and decodes are mixed. Returns [num_tokens, num_heads * head_dim].
        """
        ...

    def take_rows(self, x: Array, staged: StagedBatch) -> Array:
        """x at `logits_indices`: [num_rows, hidden]."""
        ...

    def copy_blocks(self, kv_cache: Array, staged: StagedBatch) -> None:
        """Copy whole blocks within the cache, in all layers, as `Batch.block_copies` says."""
        ...

    def sample(self, logits: Array, sampling: SamplingBatch) -> SamplerOutput:
        """Tokens and log-probabilities for logits [num_rows, vocab] (which may be overwritten)."""
        ...
