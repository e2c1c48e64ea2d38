"""Names and shapes of the tensors in a LLaMA checkpoint, in the groups that are fused on loading.

The loader checks and fuses by these; the GGUF conversion writes each group so that what is to be
fused lies in one piece of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuengine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


def layer_groups(config: ModelConfig, index: int) -> dict[str, list[Part]]:
    """The fields of `LayerWeights` and what each is stacked from, along the first axis."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{index}."

    def parts(suffix: str, sizes: dict[str, int], *columns: int) -> list[Part]:
        return [Part(f"{prefix}{name}.{suffix}", (rows, *columns)) for name, rows in sizes.items()]

    attention = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    groups = {
        "input_norm": parts("weight", {"input_layernorm": hidden}),
        "qkv": parts("weight", attention, hidden),
        "o": parts("weight", {"self_attn.o_proj": hidden}, q),
        "post_norm": parts("weight", {"post_attention_layernorm": hidden}),
        "gate_up": parts("weight", gate_up, hidden),
        "down": parts("weight", {"mlp.down_proj": hidden}, inner),
    }
    if config.attention_bias:
        groups["qkv_bias"] = parts("bias", attention)
        groups["o_bias"] = parts("bias", {"self_attn.o_proj": hidden})
    if config.mlp_bias:
        groups["gate_up_bias"] = parts("bias", gate_up)
        groups["down_bias"] = parts("bias", {"mlp.down_proj": hidden})
    return groups


def outer_parts(config: ModelConfig) -> dict[str, Part]:
    """The fields of `LlamaWeights` outside its layers; no lm_head where it is the embedding."""
    vocab, hidden = config.vocab_size, config.hidden_size
    parts = {
        "embedding": Part("model.embed_tokens.weight", (vocab, hidden)),
        "norm": Part("model.norm.weight", (hidden,)),
    }
    if not config.tie_word_embeddings:
        parts["lm_head"] = Part("lm_head.weight", (vocab, hidden))
    return parts


def all_groups(config: ModelConfig) -> list[list[Part]]:
    """Every tensor of the checkpoint, in groups that are fused and alike in a converted GGUF."""
    layers = (layer_groups(config, index).values() for index in range(config.num_layers))
    return [
        *([part] for part in outer_parts(config).values()),
        *(parts for groups in layers for parts in groups),
    ]


def all_parts(config: ModelConfig) -> list[Part]:
    """Every tensor of the checkpoint."""
    return [part for parts in all_groups(config) for part in parts]
