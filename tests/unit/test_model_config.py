"""config.json in both dialects, and everything that is refused: by name, in one line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.errors import ModelError
from cuengine.model.config import ModelConfig, RopeConfig, parse_model_config, read_model_config

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
GONE = object()


def parse(**changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**SIZES, **changes}.items() if value is not GONE}
    return parse_model_config(values, "config.json")


def refusal(**changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        parse(**changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


def test_sizes_flags_and_token_ids_are_read_from_a_file(tmp_path: Path) -> None:
    values = {
        **SIZES,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "rope_theta": 500000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model_config(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope=RopeConfig(theta=500000.0),
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )


def test_what_older_configs_leave_out_has_the_defaults_of_transformers() -> None:
    config = parse(num_key_value_heads=GONE, max_position_embeddings=GONE)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (2048, 1e-6)
    assert config.rope == RopeConfig("default", 10000.0)
    assert config.tie_word_embeddings is config.attention_bias is config.mlp_bias is False
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("float32", None, ())


def test_null_means_left_out() -> None:
    config = parse(
        num_key_value_heads=None, head_dim=None, rope_scaling=None, quantization_config=None
    )
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            RopeConfig("linear", 1e6, factor=2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            RopeConfig("dynamic", factor=4.0),
        ),
        (
            {
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            RopeConfig("llama3", 500000.0, factor=8.0, original_max_position_embeddings=128),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "attention_factor": 1.5,
                }
            },
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5,
            },
            RopeConfig(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
            ),
        ),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_theta": 20000},
            {"rope_type": "default", "rope_theta": 20000},
            RopeConfig("default", 20000.0),
        ),
    ],
)
def test_both_dialects_of_rope_mean_the_same(
    old: dict[str, Any], new: dict[str, Any], expected: RopeConfig
) -> None:
    assert parse(**old).rope == expected
    assert parse(rope_parameters=new).rope == expected


def test_a_theta_beside_rope_parameters_counts_where_they_have_none() -> None:
    assert parse(rope_theta=5e5, rope_parameters={"rope_type": "default"}).rope.theta == 5e5


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        # max_position_embeddings may count the stretched context already.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            512,
        ),
    ],
)
def test_the_context_is_what_rope_stretches_the_trained_one_to(
    rope: dict[str, Any], expected: int
) -> None:
    assert parse(rope_parameters=rope).context_length == expected


@pytest.mark.parametrize(
    "window", [{"sliding_window": None}, {"sliding_window": 512}, {"sliding_window": 4096}]
)
def test_mistral_with_an_inactive_window_is_read(window: dict[str, Any]) -> None:
    assert parse(**MISTRAL, **window).architecture == "MistralForCausalLM"


def test_a_window_that_is_switched_off_is_no_window() -> None:
    assert parse(sliding_window=64, use_sliding_window=False).num_layers == 3


def test_mistral_configs_without_a_window_have_the_default_one() -> None:
    message = refusal(**MISTRAL, max_position_embeddings=32768)
    assert "sliding_window=4096 is not supported" in message


@pytest.mark.parametrize("window", [64, -1, True, "64"])
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "LlamaForCausalLM"])
def test_an_active_window_is_refused(architecture: str, window: Any) -> None:
    message = refusal(architectures=[architecture], sliding_window=window)
    assert f"sliding_window={window!r} is not supported" in message


@pytest.mark.parametrize("architectures", [["Qwen2ForCausalLM"], [], "GPT2LMHeadModel", [5], 7])
def test_another_architecture_is_refused_by_name(architectures: Any) -> None:
    message = refusal(architectures=architectures)
    name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    assert f"architecture {name!r} is not supported" in message
    assert "LlamaForCausalLM, and MistralForCausalLM without a sliding window" in message


def test_without_architectures_the_model_type_decides() -> None:
    assert parse(architectures=GONE, model_type="llama").architecture == "LlamaForCausalLM"
    assert "'qwen3'" in refusal(architectures=GONE, model_type="qwen3")
    assert "architecture None" in refusal(architectures=GONE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method 'awq'"),
        ({"quantization_config": True}, "quantized safetensors"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported. Supported: silu"),
        ({"torch_dtype": "float8_e4m3fn"}, "Supported: float32, float16, bfloat16"),
        ({"dtype": 16}, "dtype=16"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "['yarn'] is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "differ from layer to layer"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn' is not an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor=nan"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8}},
            "original_max_position_embeddings is missing",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "original_max_position_embeddings": 64,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor=4.0 is not above low_freq_factor=4.0",
        ),
        ({"rope_parameters": {"frequency_divisors": [1.0]}}, "frequency_divisors are not 8"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": 1e300}, "rope_theta=1e+300 is not a number above 0 and up to 1e+12"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "as yarn needs it"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"hidden_size": 0}, "hidden_size=0 is not a whole number from 1"),
        ({"hidden_size": -64}, "hidden_size=-64"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": GONE}, "hidden_size is missing"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648"),
        ({"num_hidden_layers": 10**9}, "from 1 to 4096"),
        ({"num_attention_heads": 2.5}, "num_attention_heads=2.5"),
        ({"num_attention_heads": [4]}, "num_attention_heads=[4]"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id=['</s>']"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_value(
    changes: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(**changes)


def folder_refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "list"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert expected in folder_refusal(tmp_path)


def test_a_missing_folder_a_file_and_a_missing_config_are_told_apart(tmp_path: Path) -> None:
    assert "does not exist" in folder_refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file" in folder_refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "config.json" in folder_refusal(tmp_path / "empty")


def test_a_folder_with_only_a_gguf_points_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert str(tmp_path / "model.gguf") in folder_refusal(tmp_path)


def test_a_lora_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    assert "LoRA (PEFT) adapter" in folder_refusal(tmp_path)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "pytorch_model.bin").touch()
    message = folder_refusal(tmp_path)
    assert "pytorch_model.bin" in message
    assert "Convert them to safetensors or GGUF" in message


ROPE_KEYS = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "frequency_divisors",
    "partial_rotary_factor",
]
KEYS = [
    *SIZES,
    "model_type",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "sliding_window",
    "use_sliding_window",
    "hidden_act",
    "quantization_config",
    "partial_rotary_factor",
    "original_max_position_embeddings",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.just(10**400),
    st.floats(),
    st.sampled_from(["", "llama", "silu", "yarn", "dynamic", "llama3", "bfloat16"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(), SCALARS))
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    st.dictionaries(st.sampled_from(["rope_scaling", "rope_parameters"]), ROPES, max_size=1),
)
def test_any_json_is_read_or_refused(values: dict[str, Any], ropes: dict[str, Any]) -> None:
    with suppress(ModelError):
        parse_model_config({**SIZES, **values, **ropes}, "config.json")
