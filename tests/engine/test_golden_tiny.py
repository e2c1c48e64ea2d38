"""The tiny models against transformers in float32, however their 96 tokens are cut into steps.

No scheduler here: batches are built by hand. The real model is in test_smollm2.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cuengine.batch import Batch
from cuengine.device.select import select_device
from cuengine.model.config import ModelConfig, read_model_config
from cuengine.model.llama import Llama
from cuengine.model.loader import load_weights
from cuengine.model.rope import attention_scale, frequencies

NAMES = (
    "bias",
    "gqa_default",
    "linear_rope",
    "llama3_rope",
    "mha_untied",
    "mqa_headdim",
    "yarn_rope",
)
NUM_TOKENS, BLOCK_SIZE = 96, 16
CHUNKS = {"whole": NUM_TOKENS, "in chunks of 7": 7, "token by token": 1}

Float64 = NDArray[np.float64]


def load(folder: Path) -> Llama:
    config, device = read_model_config(folder), select_device("cpu", "auto")
    weights = load_weights(folder, config, device, max_model_len=NUM_TOKENS, progress=False)
    return Llama(config, weights, device)


def run(model: Llama, token_ids: NDArray[np.int32], chunk: int) -> Float64:
    """Log-probabilities [96, vocab], from steps of `chunk` tokens over scattered blocks."""
    device = model.device
    blocks = np.array([5, 0, 7, 2, 6, 3], np.int32)
    kv_cache = device.allocate_kv_cache(
        model.config.num_layers, 8, BLOCK_SIZE, model.attention_shape
    )
    rows = []
    for start in range(0, NUM_TOKENS, chunk):
        positions = np.arange(start, min(start + chunk, NUM_TOKENS), dtype=np.int32)
        slots = blocks[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        batch = Batch(
            token_ids=token_ids[positions],
            positions=positions,
            slot_mapping=slots + positions % BLOCK_SIZE,
            block_tables=blocks[None],
            query_start_loc=np.array([0, len(positions)], np.int32),
            seq_lens=positions[-1:] + 1,
            logits_indices=np.arange(len(positions), dtype=np.int32),
            block_copies=np.zeros((0, 2), np.int32),
        )
        logits = model.logits(model.forward(device.stage(batch), kv_cache))
        rows.append(device.download(logits).astype(np.float64))
    return log_softmax(np.concatenate(rows))


def log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def table(config: ModelConfig, inverse: Float64) -> NDArray[np.float32]:
    angles = np.arange(NUM_TOKENS)[:, None] * inverse
    scaled = np.concatenate([np.cos(angles), np.sin(angles)], 1) * attention_scale(config.rope)
    return scaled.astype(np.float32)


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_transformers(
    tiny_model: Callable[[str], Path], name: str, chunk: int
) -> None:
    """At all 96 positions, weights of every dtype taken up to float32.

    The 16-bit references come from modules that were cast to 16 bits and back as a whole. That
    rounds the rotary frequencies too, which transformers keeps as a buffer, although they are no
    weights: loading a 16-bit checkpoint computes them anew in float32. So for these the model is
    given the rounded ones here; the next test has the model's own.
    """
    model = load(tiny_model(name))
    if model.config.dtype != "float32":
        dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[model.config.dtype]
        rounded = frequencies(model.config).astype(np.float32).astype(dtype).astype(np.float64)
        model.weights = replace(
            model.weights, cos_sin=model.device.upload(table(model.config, rounded))
        )
    reference = np.load(tiny_model(name) / "reference.npz")
    expected = log_softmax(reference["logits"].astype(np.float64))
    assert np.abs(run(model, reference["input_ids"], chunk) - expected).max() <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_the_formulas_in_float64(
    tiny_model: Callable[[str], Path], name: str
) -> None:
    model = load(tiny_model(name))
    token_ids = np.load(tiny_model(name) / "reference.npz")["input_ids"]
    expected = log_softmax(forward(tiny_model(name), model.config, token_ids))
    assert np.abs(run(model, token_ids, 32) - expected).max() <= 1e-4


def forward(folder: Path, config: ModelConfig, token_ids: NDArray[np.int32]) -> Float64:
    """LLaMA over one whole sequence, written down plainly: logits [96, vocab]."""
    tensors: dict[str, Float64] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: x.astype(np.float64) for name, x in load_file(path).items()}
    angles = np.arange(NUM_TOKENS)[:, None] * frequencies(config)
    cos, sin = np.cos(angles), np.sin(angles)
    past = np.tril(np.ones((NUM_TOKENS, NUM_TOKENS), bool))
    scale = attention_scale(config.rope) ** 2 / math.sqrt(config.head_dim)

    def norm(x: Float64, name: str) -> Float64:
        mean_square = (x * x).mean(-1, keepdims=True)
        result: Float64 = x / np.sqrt(mean_square + config.rms_norm_eps) * tensors[f"{name}.weight"]
        return result

    def linear(x: Float64, name: str) -> Float64:
        result: Float64 = x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)
        return result

    def heads(x: Float64, count: int) -> Float64:
        return x.reshape(NUM_TOKENS, count, config.head_dim).swapaxes(0, 1)

    def rotate(x: Float64) -> Float64:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = tensors["model.embed_tokens.weight"][token_ids]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        q = rotate(heads(linear(normed, f"{layer}.self_attn.q_proj"), config.num_heads))
        k = rotate(heads(linear(normed, f"{layer}.self_attn.k_proj"), config.num_kv_heads))
        v = heads(linear(normed, f"{layer}.self_attn.v_proj"), config.num_kv_heads)
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        scores: NDArray[Any] = np.where(past, q @ k.swapaxes(1, 2) * scale, -np.inf)
        mixed = np.exp(log_softmax(scores)) @ v
        x = x + linear(mixed.swapaxes(0, 1).reshape(NUM_TOKENS, -1), f"{layer}.self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, f"{layer}.mlp.gate_proj")
        up = linear(normed, f"{layer}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(norm(x, "model.norm"), head)
