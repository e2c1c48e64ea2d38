"""The LLaMA forward pass, written once against the device interface. loader.py fills it."""

from __future__ import annotations

from dataclasses import dataclass

from cuengine.device.interface import Array, AttentionShape, Device, StagedBatch
from cuengine.model.config import ModelConfig


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer; q, k, v in one matrix and gate, up in another: one product each.

    qkv      [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    o        [hidden, num_heads * head_dim]
    gate_up  [2 * intermediate, hidden]
    down     [hidden, intermediate]
    """

    input_norm: Array
    qkv: Array
    o: Array
    post_norm: Array
    gate_up: Array
    down: Array
    qkv_bias: Array | None = None
    o_bias: Array | None = None
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


@dataclass(slots=True)
class LlamaWeights:
    """embedding, lm_head [vocab, hidden] (one array if tied), norm [hidden]; cos_sin: rope.py."""

    embedding: Array
    layers: list[LayerWeights]
    norm: Array
    lm_head: Array
    cos_sin: Array


class Llama:
    """LlamaForCausalLM (and MistralForCausalLM without a sliding window) on a device."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, device: Device) -> None:
        self.config = config
        self.weights = weights
        self.device = device
        self.attention_shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )

    def forward(self, staged: StagedBatch, kv_cache: Array) -> Array:
        """Hidden states after the last norm, of the rows whose logits are wanted."""
        device, eps, shape = self.device, self.config.rms_norm_eps, self.attention_shape
        residual = device.embedding(self.weights.embedding, staged)
        x = device.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for index, layer in enumerate(self.weights.layers):
            with device.range(f"layer {index}"):
                if index:
                    x = device.add_rms_norm(x, residual, layer.input_norm, eps)
                qkv = device.linear(x, layer.qkv, layer.qkv_bias)
                q = device.rotary_cache(qkv, self.weights.cos_sin, kv_cache[index], staged, shape)
                x = device.paged_attention(q, kv_cache[index], staged, shape)
                x = device.linear(x, layer.o, layer.o_bias)
                x = device.add_rms_norm(x, residual, layer.post_norm, eps)
                gate_up = device.linear(x, layer.gate_up, layer.gate_up_bias)
                x = device.linear(device.silu_mul(gate_up), layer.down, layer.down_bias)
        x = device.add_rms_norm(x, residual, self.weights.norm, eps)
        return device.take_rows(x, staged)

    def logits(self, hidden: Array) -> Array:
        """float32 [num_rows, vocab] for rows of `forward`'s result."""
        return self.device.logits(hidden, self.weights.lm_head)
