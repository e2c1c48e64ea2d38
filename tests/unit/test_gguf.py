"""GGUF to model folder: the tiny models written as llama.cpp's converter would, and read back."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cuengine.device.cpu import CpuDevice
from cuengine.errors import ModelError
from cuengine.model import gguf as gguf_module
from cuengine.model import gguf_weights
from cuengine.model.config import RopeConfig, read_model_config
from cuengine.model.gguf import convert_gguf
from cuengine.model.loader import load_weights
from cuengine.model.rope import frequencies
from cuengine.model.safetensors_file import Checkpoint
from cuengine.quantized import QuantizedMatrix

Tensors = dict[str, NDArray[Any]]
Type = GGMLQuantizationType

METADATA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
# GGUF's names of what a checkpoint calls so, written down by hand.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, Any] = METADATA,
    types: Mapping[str, Type] | None = None,
    **others: Any,
) -> Path:
    """A GGUF with these llama.* values; `others` are keys by their full name, with _ for a dot."""
    writer = GGUFWriter(path, others.pop("architecture", "llama"))
    values = {f"llama.{key}": value for key, value in metadata.items()}
    values |= {key.replace("__", "."): value for key, value in others.items()}
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to q and k: halves of a head become neighbouring pairs."""
    half = len(weights) // num_heads // 2
    rows = [
        weights[head * 2 * half + pair + part * half]
        for head in range(num_heads)
        for pair in range(half)
        for part in range(2)
    ]
    return np.stack(rows)


def as_gguf(checkpoint: Tensors, num_heads: int, num_kv_heads: int) -> Tensors:
    """A checkpoint's tensors with GGUF's names, q and k permuted."""
    result = {}
    for name, tensor in checkpoint.items():
        stem, suffix = name.rsplit(".", 1)
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else ""
        renamed = NAMES[stem.replace(f".{layer}.", ".{}.") if layer else stem].format(layer)
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(renamed.rpartition(".")[2])
        result[f"{renamed}.{suffix}"] = permute(tensor, heads) if heads else tensor
    return result


def tiny_gguf(path: Path, folder: Path, **metadata: Any) -> Path:
    """A tiny golden model as GGUF in float32, float16 or bfloat16, as its checkpoint is."""
    config = json.loads((folder / "config.json").read_text())
    checkpoint: Tensors = {}
    for file in folder.glob("*.safetensors"):
        checkpoint |= load_file(file)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors, types = as_gguf(checkpoint, heads, kv_heads), {}
    for name, tensor in tensors.items():
        if tensor.dtype.name == "bfloat16":
            tensors[name], types[name] = tensor.view(np.uint8), Type.BF16
    return write_gguf(
        path,
        tensors,
        {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "rope.dimension_count": config["head_dim"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": config["rope_parameters"]["rope_theta"],
            **metadata,
        },
        types,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
    )


def small_tensors() -> Tensors:
    """A one-layer model whose rows are long enough for blocks of 256."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (32, 256),
        "output_norm.weight": (256,),
        "blk.0.attn_norm.weight": (256,),
        "blk.0.attn_q.weight": (256, 256),
        "blk.0.attn_k.weight": (128, 256),
        "blk.0.attn_v.weight": (128, 256),
        "blk.0.attn_output.weight": (256, 256),
        "blk.0.ffn_norm.weight": (256,),
        "blk.0.ffn_gate.weight": (512, 256),
        "blk.0.ffn_up.weight": (512, 256),
        "blk.0.ffn_down.weight": (256, 512),
    }
    return {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def converted(path: Path) -> Tensors:
    """The tensors that a file becomes, those in 4 or 8 bits dequantized."""
    stored = load_file(convert_gguf(path, progress=False) / "model.safetensors")
    result = {}
    for name, tensor in stored.items():
        stem = name.removesuffix(".codes")
        if stem != name:
            scales, offsets = stored[f"{stem}.scales"], stored[f"{stem}.offsets"]
            columns = 512 if "down_proj" in name else 256
            with np.errstate(all="ignore"):
                result[stem] = QuantizedMatrix(tensor, scales, offsets, columns).dequantize()
        elif not name.endswith((".scales", ".offsets")):
            result[name] = tensor
    return result


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, progress=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["bias", "gqa_default", "mqa_headdim", "mha_untied"])
def test_a_tiny_model_comes_back_as_its_checkpoint(
    tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Biases, tied and untied heads, explicit head_dim, three dtypes; q and k permuted back."""
    folder = convert_gguf(tiny_gguf(tmp_path / "x.gguf", tiny_model(name)), progress=False)
    got = load_file(folder / "model.safetensors")
    expected: Tensors = {}
    for file in tiny_model(name).glob("*.safetensors"):
        expected |= load_file(file)
    assert set(got) == set(expected)
    for key, tensor in expected.items():
        assert got[key].dtype == (tensor.dtype if tensor.ndim == 2 else np.float32)
        np.testing.assert_array_equal(got[key], tensor.astype(got[key].dtype), err_msg=key)

    config, source = read_model_config(folder), read_model_config(tiny_model(name))
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_position_embeddings",
        "rope",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "bos_token_id",
        "eos_token_ids",
    ):
        assert getattr(config, key) == getattr(source, key), key
    assert config.rms_norm_eps == pytest.approx(source.rms_norm_eps)
    assert config.dtype == "float32"


def test_the_converted_model_has_every_matrix_as_a_device_can_use_it_in_place(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = convert_gguf(tiny_gguf(tmp_path / "x.gguf", tiny_model("bias")), progress=False)
    device = CpuDevice()
    monkeypatch.setattr(device, "upload_matrix", device.upload)
    weights = load_weights(
        folder, read_model_config(folder), device, max_model_len=16, progress=False
    )
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.gate_up, layer.o, layer.down, layer.qkv_bias):
            assert not matrix.flags.owndata
    assert weights.layers[0].qkv.ctypes.data % 64 == 0


def test_biases_that_the_file_leaves_out_are_zero(tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["blk.0.attn_q.bias"] = np.arange(256, dtype=np.float32)
    got = load_file(convert_gguf(write_gguf(tmp_path / "x.gguf", tensors)) / "model.safetensors")
    attention = "model.layers.0.self_attn"
    bias = got[f"{attention}.q_proj.bias"]
    np.testing.assert_array_equal(permute(bias, 4), tensors["blk.0.attn_q.bias"])
    for name in ("k_proj", "v_proj", "o_proj"):
        assert not got[f"{attention}.{name}.bias"].any()


# Tensor types -----------------------------------------------------------------------------------


def dequantizable() -> list[Type]:
    result = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        result.append(kind)
    return result


def test_the_types_of_the_format_are_among_those_tried() -> None:
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS"
    names += " IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
    assert set(names.split()) <= {kind.name for kind in dequantizable()}


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_every_type_that_can_be_dequantized_is(tmp_path: Path, kind: Type) -> None:
    """Blocks of random bytes, dequantized as a whole by the gguf package."""
    tensors, expected, types = small_tensors(), {}, {}
    random = np.random.default_rng(kind.value)
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            shape = (tensor.shape[0], tensor.shape[1] // block_items * block_bytes)
            tensors[name] = random.integers(0, 256, shape, np.uint8)
            types[name] = kind
            with np.errstate(all="ignore"):
                expected[name] = dequantize(tensors[name], kind)
        else:
            expected[name] = tensor
    path = write_gguf(tmp_path / "x.gguf", tensors, METADATA, types)
    for name, tensor in as_gguf(converted(path), 4, 2).items():
        kept = kind in (Type.F16, Type.BF16) and tensor.ndim == 2
        assert tensor.dtype.name == ({1: "float16", 30: "bfloat16"}[kind] if kept else "float32")
        got, wanted = tensor.astype(np.float32), expected[name]
        # An infinite scale may give other numbers that are none.
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
        np.testing.assert_array_equal(got[finite], wanted[finite], err_msg=name)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Type.F16, 0.0),
        (Type.BF16, 0.0),
        (Type.Q4_0, 1 / 8),
        (Type.Q4_1, 1 / 15),
        (Type.Q5_0, 1 / 16),
        (Type.Q5_1, 1 / 31),
        (Type.Q8_0, 1 / 127),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_quantized_weights_are_near_what_was_quantized(
    tmp_path: Path, kind: Type, step: float
) -> None:
    """Within the type's step, taken of the largest weight in the matrix (its range for Q*_1)."""
    original, tensors, types = small_tensors(), small_tensors(), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name], types[name] = quantize(tensor, kind), kind
    path = write_gguf(tmp_path / "x.gguf", tensors, METADATA, types)
    got = as_gguf(converted(path), 4, 2)
    for name, tensor in original.items():
        bound = np.abs(tensor).max() * (2 * step + 2**-7)
        np.testing.assert_allclose(got[name], tensor, rtol=0, atol=bound, err_msg=name)


def quantized_model(kinds: Mapping[str, Type]) -> tuple[Tensors, Tensors, dict[str, Type]]:
    """A small model's tensors as in a file, their numbers, and their types: by default Q4_0."""
    tensors, numbers, types = small_tensors(), {}, {}
    for name, tensor in tensors.items():
        kind = kinds.get(name.split(".")[-2], Type.Q4_0) if tensor.ndim == 2 else Type.F32
        if kind in (Type.Q4_K, Type.Q6_K):  # the package has no quantizer for these
            items, size = GGML_QUANT_SIZES[kind]
            blocks = np.random.default_rng(kind).integers(0, 120, (tensor.size // items, size))
            tensors[name] = blocks.astype(np.uint8).reshape(len(tensor), -1)
        elif kind == Type.F32:
            tensors[name] = tensor
        else:
            tensors[name] = quantize(tensor, kind)
        types[name], numbers[name] = kind, dequantize(tensors[name], kind)
    return tensors, numbers, types


def stored_forms(folder: Path) -> dict[str, tuple[str, int]]:
    """For each matrix its dtype, or U8, and bytes of it (or of its codes) in a row."""
    forms = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = name.removesuffix(".codes").removesuffix(".weight").rpartition(".")[2]
        if tensor.ndim == 2 and not name.endswith((".scales", ".offsets")):
            forms[short] = (tensor.dtype.name, tensor.nbytes // len(tensor))
    return forms


@pytest.mark.parametrize(
    ("kinds", "qkv", "group"),
    [
        ({}, ("uint8", 128), 32),
        ({"attn_v": Type.Q8_0}, ("uint8", 256), 32),
        ({"attn_q": Type.Q4_K, "attn_k": Type.Q4_K, "attn_v": Type.Q6_K}, ("uint8", 256), 16),
        ({"attn_q": Type.F16}, ("float32", 1024), None),
        ({"attn_q": Type.F16, "attn_k": Type.BF16, "attn_v": Type.F32}, ("float32", 1024), None),
        (dict.fromkeys(("attn_q", "attn_k", "attn_v"), Type.F16), ("float16", 512), None),
    ],
    ids=["alike", "8_bits", "k_quants", "a_float", "floats", "one_float"],
)
def test_what_is_fused_is_stored_alike_whatever_its_types(
    tmp_path: Path, kinds: dict[str, Type], qkv: tuple[str, int], group: int | None
) -> None:
    tensors, numbers, types = quantized_model(kinds)
    path = write_gguf(tmp_path / "x.gguf", tensors, METADATA, types)
    folder = convert_gguf(path, progress=False)
    forms = stored_forms(folder)
    assert [forms[name] for name in ("q_proj", "k_proj", "v_proj")] == [qkv] * 3
    # What is fused with none of them stays as it is.
    assert (forms["o_proj"], forms["down_proj"]) == (("uint8", 128), ("uint8", 256))
    got = converted(path)
    for name, tensor in as_gguf(got, 4, 2).items():
        np.testing.assert_array_equal(tensor.astype(np.float32), numbers[name], err_msg=name)
    stored = load_file(folder / "model.safetensors")
    scales = {t.shape[1] for name, t in stored.items() if name.endswith("k_proj.weight.scales")}
    assert scales == ({256 // group} if group else set())


def test_fields_of_what_is_fused_lie_back_to_back_and_aligned(tmp_path: Path) -> None:
    tensors, _, types = quantized_model({"attn_v": Type.Q8_0})
    path = write_gguf(tmp_path / "x.gguf", tensors, METADATA, types)
    checkpoint = Checkpoint(convert_gguf(path, progress=False))
    checked = 0
    for stem in ("self_attn.{q,k,v}_proj", "mlp.{gate,up}_proj", "mlp.{down}_proj"):
        before, _, rest = stem.partition("{")
        names, _, after = rest.partition("}")
        for field, size in (("codes", 1), ("scales", 4), ("offsets", 4)):
            end = None
            for name in names.split(","):
                key = f"model.layers.0.{before}{name}{after}.weight.{field}"
                _, entry = checkpoint.tensors[key]
                assert entry.dtype == ("U8" if size == 1 else "F32")
                assert entry.start % size == 0
                assert end in (None, entry.start)
                end, checked = entry.end, checked + 1
    assert checked == 18


def test_an_odd_number_of_items_of_two_bytes_leaves_all_others_aligned(tmp_path: Path) -> None:
    head = dict.fromkeys(("attention.key_length", "attention.value_length"), 2)
    sizes = {"embedding_length": 5, "feed_forward_length": 3, "attention.head_count": 1}
    metadata = {**METADATA, **head, **sizes, "attention.head_count_kv": 1}
    metadata["rope.dimension_count"] = 2
    tensors, types = {}, {}
    for name, tensor in small_tensors().items():
        rows = {"token_embd": 7, "attn_output": 5, "ffn_down": 5, "ffn_gate": 3, "ffn_up": 3}
        columns = {"attn_output": 2, "ffn_down": 3}
        short = name.split(".")[-2]
        shape = (rows.get(short, 2), columns.get(short, 5)) if tensor.ndim == 2 else (5,)
        tensors[name] = np.ones(shape, np.float32)
        if "token_embd" in name or "ffn" in name:
            tensors[name] = tensors[name].astype(np.float16)
            types[name] = Type.F16
    path = write_gguf(tmp_path / "x.gguf", tensors, metadata, types)
    checkpoint = Checkpoint(convert_gguf(path, progress=False))
    assert {entry.dtype for _, entry in checkpoint.tensors.values()} == {"F16", "F32"}
    for name in checkpoint.tensors:
        assert checkpoint.view(name).flags.aligned, name


def test_a_large_matrix_is_converted_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the matrix, nor do its numbers change."""
    monkeypatch.setattr(gguf_weights, "_CHUNK_NUMBERS", 2**16)
    tensors, numbers, types = quantized_model({})
    rows = np.tile(tensors["token_embd.weight"], (512, 1))
    tensors["token_embd.weight"] = rows
    path = write_gguf(tmp_path / "x.gguf", tensors, METADATA, types)
    convert_gguf(write_gguf(tmp_path / "y.gguf", small_tensors()))  # imports what it needs
    tracemalloc.start()
    try:
        convert_gguf(path, progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Of codes alone there are 2 MB, of numbers in float32 16.
    assert peak < 1_000_000
    got = converted(path)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(got, np.tile(numbers["token_embd.weight"], (512, 1)))


def test_a_type_without_a_dequantizer_is_refused_by_name(tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["token_embd.weight"] = np.zeros((32, 256), np.int32)
    message = refusal(write_gguf(tmp_path / "x.gguf", tensors))
    assert "'token_embd.weight' has type I32" in message


# Rope -------------------------------------------------------------------------------------------


def converted_rope(tmp_path: Path, tensors: Tensors | None = None, **rope: Any) -> RopeConfig:
    metadata = {**METADATA, **{f"rope.{key.replace('__', '.')}": v for key, v in rope.items()}}
    path = write_gguf(tmp_path / "x.gguf", {**small_tensors(), **(tensors or {})}, metadata)
    return read_model_config(convert_gguf(path, progress=False)).rope


def test_linear_scaling_is_read_under_both_of_its_names(tmp_path: Path) -> None:
    expected = RopeConfig("linear", 10000.0, factor=4.0)
    assert converted_rope(tmp_path, scaling__type="linear", scaling__factor=4.0) == expected
    assert converted_rope(tmp_path, scale_linear=4.0) == expected
    assert converted_rope(tmp_path, scaling__type="none", scaling__factor=4.0) == RopeConfig()
    assert converted_rope(tmp_path, scaling__type="linear", scaling__factor=1.0) == RopeConfig()


def test_yarn_is_read_with_its_original_length_and_scale(tmp_path: Path) -> None:
    yarn = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 32}
    rope = converted_rope(tmp_path, **yarn, scaling__yarn_beta_fast=16.0)
    assert (rope.rope_type, rope.factor, rope.beta_fast) == ("yarn", 4.0, 16.0)
    assert rope.original_max_position_embeddings == 32
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    rope = converted_rope(tmp_path, **yarn, scaling__attn_factor=0.5)
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_other_scaling_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", small_tensors(), {**METADATA, "rope.scaling.type": kind})
    assert f"llama.rope.scaling.type={kind!r} is not supported" in refusal(path)


def test_llama3_scaling_comes_back_from_its_divisors(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp leaves llama3's parameters out and writes each frequency's divisor as a tensor."""
    source = read_model_config(tiny_model("llama3_rope"))
    rope = source.rope
    original = rope.original_max_position_embeddings
    assert original is not None
    divisors = []
    for i in range(source.head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * i / source.head_dim)
        if wavelength < original / rope.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > original / rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            smooth = original / wavelength - rope.low_freq_factor
            smooth /= rope.high_freq_factor - rope.low_freq_factor
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    tensors = {**small_tensors(), "rope_freqs.weight": np.array(divisors, np.float32)}
    # Heads of 16, as the tiny model has them.
    metadata = {**METADATA, "attention.head_count": 16, "attention.head_count_kv": 8}
    metadata["rope.freq_base"] = rope.theta
    path = write_gguf(tmp_path / "x.gguf", tensors, metadata)
    config = read_model_config(convert_gguf(path, progress=False))
    assert config.head_dim == source.head_dim
    np.testing.assert_allclose(frequencies(config), frequencies(source), rtol=1e-6)


def test_divisors_of_one_and_of_the_wrong_number(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(32, np.float32)}
    assert converted_rope(tmp_path, ones) == RopeConfig()
    tensors = {**small_tensors(), "rope_freqs.weight": np.full(31, 2.0, np.float32)}
    message = refusal(write_gguf(tmp_path / "y.gguf", tensors))
    assert "frequency_divisors are not 32 numbers" in message
    assert str(tmp_path / "y.gguf") in message


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "others", "expected"),
    [
        ({}, {"architecture": "qwen2"}, "architecture 'qwen2' is not supported. Supported: llama"),
        ({}, {"general__type": "adapter"}, "type 'adapter' is not supported"),
        ({}, {"split__count": 3}, "one part of a split GGUF file"),
        ({"expert_count": 8}, {}, "llama.expert_count=8 is not supported"),
        ({"logit_scale": 0.5}, {}, "llama.logit_scale=0.5 is not supported"),
        ({"attention.sliding_window": 64}, {}, "sliding_window=64 is not supported"),
        ({"rope.dimension_count": 32}, {}, "llama.rope.dimension_count=32 is not supported"),
        ({"attention.value_length": 32}, {}, "llama.attention.value_length=32"),
        ({"attention.head_count_kv": [2, 1]}, {}, "differs from layer to layer"),
        ({"attention.head_count_kv": 3}, {}, "not a multiple of num_key_value_heads=3"),
        ({"attention.head_count": 0}, {}, "num_attention_heads=0"),
        ({"embedding_length": "256"}, {}, "hidden_size='256'"),
        ({"rope.freq_base": "x"}, {}, "llama.rope.freq_base='x' is not a number"),
        ({"block_count": 2}, {}, "'blk.1.attn_norm.weight' is missing"),
        ({"feed_forward_length": 256}, {}, "'blk.0.ffn_gate.weight' has shape [512, 256]"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_value(
    tmp_path: Path, cache: Path, metadata: dict[str, Any], others: Any, expected: str
) -> None:
    path = write_gguf(tmp_path / "x.gguf", small_tensors(), {**METADATA, **metadata}, **others)
    assert expected in refusal(path)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_missing_and_foreign_tensors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = small_tensors()
    del tensors["token_embd.weight"]
    assert "'token_embd.weight' is missing" in refusal(write_gguf(tmp_path / "x.gguf", tensors))
    tensors = {**small_tensors(), "blk.0.ffn_gate_inp.weight": np.zeros(256, np.float32)}
    message = refusal(write_gguf(tmp_path / "y.gguf", tensors))
    assert "such as 'blk.0.ffn_gate_inp.weight'" in message


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf")
    assert "Is a directory" in refusal(tmp_path)


# The cache --------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", small_tensors())


def folders(cache: Path) -> list[Path]:
    return [entry for entry in cache.iterdir() if entry.is_dir()]


def test_a_file_is_converted_and_hashed_once(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = convert_gguf(small, progress=False)
    assert hashlib.sha256(small.read_bytes()).hexdigest()[:32] in folder.name
    monkeypatch.delattr(hashlib, "file_digest")
    monkeypatch.delattr(gguf_module, "GgufFile")
    assert convert_gguf(small, progress=False) == folder
    assert folders(cache) == [folder]


def test_where_stderr_is_no_terminal_each_phase_is_one_line_and_nothing_is_drawn(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", tiny_model("bias"))
    folder = convert_gguf(path)
    lines = capsys.readouterr().err
    assert "\r" not in lines
    assert [line.split()[:2] for line in lines.splitlines()] == [
        ["Reading", "x.gguf"],
        ["Converting", "x.gguf:"],
    ]
    device = CpuDevice()
    load_weights(folder, read_model_config(folder), device, max_model_len=16, progress=True)
    convert_gguf(path)
    assert capsys.readouterr().err == ""


def test_a_copy_shares_the_folder_and_a_changed_file_does_not(small: Path, tmp_path: Path) -> None:
    folder = convert_gguf(small, progress=False)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(small.read_bytes())
    assert convert_gguf(copy, progress=False) == folder
    status = copy.stat()
    tensors = small_tensors()
    tensors["output_norm.weight"][0] += 1
    write_gguf(copy, tensors)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert copy.stat().st_size == status.st_size
    assert convert_gguf(copy, progress=False) != folder


def test_a_newer_converter_does_not_use_what_an_older_one_wrote(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = convert_gguf(small, progress=False)
    monkeypatch.setattr(gguf_module, "FORMAT_VERSION", gguf_module.FORMAT_VERSION + 1)
    assert convert_gguf(small, progress=False) != old


def test_the_log_says_how_large_the_weights_become(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tensors, types = small_tensors(), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name], types[name] = quantize(tensor, Type.Q8_0), Type.Q8_0
    convert_gguf(write_gguf(tmp_path / "x.gguf", tensors, METADATA, types), progress=False)
    # 598,016 weights in matrices, at 1.25 bytes, and 768 in vectors, at 4.
    assert "Converting x.gguf: 1 MB of weights" in caplog.text


def test_progress_is_shown_when_asked_for(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_gguf(small, progress=True)
    assert "Converting small.gguf" in capsys.readouterr().err


def test_a_full_disk_is_foreseen(small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = gguf_module.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(gguf_module.shutil, "disk_usage", lambda path: usage)
    assert "0.00 GB are free. Set CUENGINE_CACHE" in refusal(small)
    assert not folders(cache)


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_module.os, "fsync", full)
    assert "no space left while converting small.gguf" in refusal(small)
    assert not folders(cache)


KILLED = """
import os, signal, sys
from pathlib import Path
from cuengine.model import gguf
gguf.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
gguf.convert_gguf(Path(sys.argv[1]), progress=False)
"""


def test_a_conversion_that_is_killed_leaves_nothing_that_is_used(small: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(small)], check=False)
    assert done.returncode == -signal.SIGKILL
    (half,) = folders(cache)
    folder = convert_gguf(small, progress=False)
    assert folder != half
    assert folders(cache) == [folder]
    assert (folder / "model.safetensors").stat().st_size > 598_784 * 4


TWICE = """
import logging, sys
from pathlib import Path
from cuengine.model import gguf
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
print(gguf.convert_gguf(Path(sys.argv[1]), progress=False))
"""


def test_two_processes_at_once_convert_once(small: Path, cache: Path) -> None:
    command = [sys.executable, "-c", TWICE, str(small)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sum(line.startswith("Converting") for lines in outputs for line in lines) == 1
    assert len(folders(cache)) == 1


def test_a_cache_that_cannot_be_made_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "file"))
    assert "Not a directory" in refusal(small)
