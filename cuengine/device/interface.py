"""The operations a model is written against, and the only way the engine touches arrays.

One implementation per kind of machine (cpu.py). Arrays are the device's own: callers pass them on
and never look inside. Shapes use num_tokens = tokens of the step, hidden, and the head counts of
`AttentionShape`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from cuengine.batch import Batch, PendingOutput, SamplingBatch
from cuengine.quantized import QuantizedMatrix

Array = Any
"""An array in the device's memory (numpy.ndarray on `cpu`, cupy.ndarray on `cuda`)."""

StagedBatch = Any
"""A Batch as the device keeps it for one step; made by `Device.stage`, given to the operations."""


LOGITS_ROWS = 256
"""Rows that `Device.logits` and `Device.sample` are given at once, at most: float32 [256, 128k] is
128 MB, and a chunk of a prompt whose log-probabilities are wanted can have thousands of rows."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Head counts and sizes of a model's attention; scale is what q·k is multiplied with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step, and the longest sequence, that a device has to be ready for.

    num_draft_tokens  of a sequence in one step, guessed by speculative decoding
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int = 4096
    block_size: int = 16
    num_draft_tokens: int = 0

    @property
    def max_drawn(self) -> int:
        """Tokens that a step draws: one for each sample, and one after each guess."""
        drafts = min(self.max_num_batched_tokens, self.max_num_seqs * (1 + self.num_draft_tokens))
        return max(self.max_num_seqs, drafts)

    @property
    def max_tokens(self) -> int:
        """In a step, with the padding of a decode step."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def max_rows(self) -> int:
        """Rows of logits: every token's, and one for each sample that is drawn."""
        return self.max_tokens + self.max_num_seqs


class Device(Protocol):
    """Weights are [out_features, in_features], as checkpoints have them, when uploaded.

    Results may live in buffers that the next call of the same operation reuses. Work is done in the
    order of the calls, whether or not a call waits for it.

    dtype         name of the dtype of weights and activations: "float32" on `cpu`
    overlaps      calls return before their work is done, so that the engine schedules and builds
                  the next step meanwhile
    measures_memory  the largest step has to be run once before `kv_cache_budget` is asked
    keeps_quantized  `upload_matrix` takes a QuantizedMatrix, too, and computes with its bits
    compute_rate  floating-point operations a second in long prompts, about
    weight_tokens  tokens in a step whose arithmetic takes as long as reading the weights, about; it
                  decides how many tokens are worth guessing
    swap_rate     bytes a second between KV cache and host cache, about; with compute_rate it
                  decides whether swapping pays
    """

    name: str
    dtype: str
    overlaps: bool
    measures_memory: bool
    keeps_quantized: bool
    compute_rate: float
    weight_tokens: int
    swap_rate: float

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def kv_cache_budget(self, gpu_memory_utilization: float) -> int:
        """Bytes that the KV cache should get where nobody says how many.

        Asked once all else has been allocated. gpu_memory_utilization: the part of a GPU's memory
        that may be taken in all, weights and activations included; no matter on `cpu`.
        """
        ...

    def upload(self, array: NDArray[Any]) -> Array:
        """The array in device memory, in its own dtype (float32 on `cpu`). May be the argument."""
        ...

    def upload_matrix(self, weight: NDArray[Any] | QuantizedMatrix) -> Array:
        """A weight [out, in] for `linear` or `embedding`, laid out as this device multiplies it.

        Of the result callers may know `nbytes`: what a product reads of it.
        """
        ...

    def download(self, array: Array) -> NDArray[Any]: ...

    def prepare(self, shape: AttentionShape, *, progress: bool = False) -> None:
        """Get ready all that this model's operations need, compiled where it has to be.

        progress: show a bar where that takes a while. Raises ModelError for a model that this
        device has no kernels for.
        """
        ...

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Array:
        """[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]; K then V.

        `kv_cache[i]` is what the operations of layer i are given.
        """
        ...

    def allocate_host_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Array:
        """The same for blocks that are swapped out, in the host's memory (pinned on `cuda`)."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark a phase for a profiler (NVTX on `cuda`); costs next to nothing where none looks."""
        ...

    def stage(self, batch: Batch) -> StagedBatch:
        """Bring the index arrays of a step to the device, once per step.

        The batch may go while the device still needs it. Tokens that `token_sources` names are
        those that the calls of `sample` since the last `stage` chose.
        """
        ...

    def replay(self, staged: StagedBatch, body: Callable[[], Array]) -> Array:
        """body(), or the same launches captured in an earlier step of this shape (a CUDA graph).

        body calls nothing but operations on `staged` and arrays that are the same in every step.
        """
        ...

    def embedding(self, weight: Array, staged: StagedBatch) -> Array:
        """[num_tokens, hidden]: rows of weight [vocab, hidden] for the step's token ids."""
        ...

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x [num_tokens, in] @ weight.T + bias -> [num_tokens, out], accumulated in float32.

        weight: from `upload_matrix`, as `embedding`'s.
        """
        ...

    def logits(self, hidden: Array, weight: Array) -> Array:
        """hidden [num_rows, hidden] @ weight.T -> float32 [num_rows, vocab], in every dtype."""
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

    def swap_out(self, kv_cache: Array, host_cache: Array, staged: StagedBatch) -> None:
        """Copy whole blocks, in all layers, to the host cache, as `Batch.swap_outs` says."""
        ...

    def swap_in(self, kv_cache: Array, host_cache: Array, staged: StagedBatch) -> None:
        """Copy whole blocks, in all layers, from the host cache, as `Batch.swap_ins` says."""
        ...

    def sample(
        self, logits: Array, sampling: SamplingBatch, *, first_row: int = 0
    ) -> PendingOutput:
        """Tokens and log-probabilities for logits [num_rows, vocab] (which may be overwritten).

        A step with many rows samples them in several calls, in order; first_row is where these rows
        begin among the step's, which is how the next step's `token_sources` count.
        """
        ...
