"""What a LLaMA-family model is: sizes, rope, special tokens; read from config.json or GGUF.

The GGUF conversion (gguf.py) writes a config.json too, so there is one reader. Defaults for missing
keys are those of transformers' LlamaConfig and MistralConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from cuengine.errors import ModelError
from cuengine.model.json_file import read_json_object

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DTYPES = ("float32", "float16", "bfloat16")

_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096
_MAX_NUMBER = 1e12
# What transformers assumes where a Mistral config has no `sliding_window`.
_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; fields that a type has no use for keep their defaults. See rope.py.

    frequency_divisors  head_dim / 2 numbers that divide the base frequencies: how GGUF files carry
                        llama3 scaling, whose parameters they leave out
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model.

    dtype        the checkpoint's: "float32", "float16" or "bfloat16"
    dequantized  the weights were quantized in the file that the checkpoint was made from
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    dequantized: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    @property
    def context_length(self) -> int:
        """Positions the model can serve: what its rope stretches those it was trained on to.

        `max_position_embeddings` counts the trained ones by convention with these types, but some
        models count all of them, which then is the least that is served.
        """
        rope = self.rope
        if rope.rope_type in ("default", "llama3"):
            return self.max_position_embeddings
        trained = rope.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(trained * rope.factor))


def read_model_config(folder: Path) -> ModelConfig:
    """Read config.json in either dialect: `rope_theta` + `rope_scaling`, or `rope_parameters`.

    Raises ModelError, naming what is wrong or not supported, and what is.
    """
    _refuse_other_folders(folder)
    path = folder / "config.json"
    return parse_model_config(read_json_object(path), str(path))


def parse_model_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """What `read_model_config` does, for a config at hand; `where` begins every error."""
    fields = _Fields(values, where)
    architecture = _architecture(fields)
    is_mistral = architecture == "MistralForCausalLM"
    _refuse_unsupported(fields)

    hidden = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", 8 if is_mistral else num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if not fields.has("head_dim") and hidden % num_heads:
        raise fields.error(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}, and there "
            "is no head_dim"
        )
    head_dim = fields.size("head_dim", hidden // num_heads)
    if head_dim % 2:
        raise fields.error(f"head_dim={head_dim} is odd; rotary embedding needs pairs")
    max_positions = fields.size("max_position_embeddings", 131072 if is_mistral else 2048)
    _refuse_sliding_window(fields, max_positions, _MISTRAL_WINDOW if is_mistral else None)

    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=_rope(fields, head_dim),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=not is_mistral and fields.flag("attention_bias", False),
        mlp_bias=not is_mistral and fields.flag("mlp_bias", False),
        dtype=_dtype(fields),
        dequantized=fields.flag("cuengine_dequantized", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _refuse_other_folders(folder: Path) -> None:
    """Say what a folder is if it is not a model in safetensors, before looking inside."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{folder}: {what}; a model folder is needed")
    has_weights = any(folder.glob("*.safetensors.index.json")) or any(
        not path.name.startswith("adapter_") for path in folder.glob("*.safetensors")
    )
    if not has_weights and (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder}: a LoRA (PEFT) adapter, which is not supported. Merge it into its base "
            "model and save that as safetensors"
        )
    if not has_weights and (pickles := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))):
        raise ModelError(
            f"{folder}: only pickled PyTorch weights ({pickles[0].name}), which are not supported. "
            "Convert them to safetensors or GGUF"
        )
    if not (folder / "config.json").exists() and (ggufs := sorted(folder.glob("*.gguf"))):
        raise ModelError(f"{folder}: has no config.json; give the GGUF file itself: {ggufs[0]}")


def _is_positive(value: Any) -> bool:
    """Whether this is a number above 0 that is neither infinite nor absurd."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= _MAX_NUMBER


class _Fields:
    """Typed look-ups in a parsed config, with errors that name the file, the key and the value."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, message: str) -> ModelError:
        # A hostile value can be long.
        return ModelError(f"{self.where}: {message[:400]}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None, *, maximum: int = _MAX_SIZE) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        # Some writers put whole numbers down as floats.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise self.error(f"{key}={value!r} is not a whole number from 1 to {maximum}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """A number of at least `minimum`, more than 0 where that is 0, and of a sane size."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if not _is_positive(value) or value < minimum:
            least = f"from {minimum:g}" if minimum else "above 0"
            raise self.error(f"{key}={value!r} is not a number {least} and up to {_MAX_NUMBER:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key}={value!r} is neither true nor false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self.error(f"{key}={value!r} is not a token id or a list of them")
        return tuple(ids)

    def section(self, key: str) -> _Fields:
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.error(f"{key}={value!r} is not an object")
        return _Fields(value, f"{self.where}: {key}")


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if names is None:
        model_type = fields.values.get("model_type")
        by_type = {"llama": ARCHITECTURES[0], "mistral": ARCHITECTURES[1]}
        names = [by_type.get(model_type, model_type) if isinstance(model_type, str) else None]
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        raise fields.error(
            f"architecture {name!r} is not supported. Supported: LlamaForCausalLM, and "
            "MistralForCausalLM without a sliding window"
        )
    return cast(str, name)


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.has("quantization_config"):
        settings = fields.values["quantization_config"]
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise fields.error(
            f"quantized safetensors (quant_method {method!r}) are not supported. Supported: "
            "float32, float16 and bfloat16 safetensors, and quantized GGUF files"
        )
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act={activation!r} is not supported. Supported: silu")


def _refuse_sliding_window(fields: _Fields, max_positions: int, default: int | None) -> None:
    window = fields.values.get("sliding_window", default)
    if window is None or fields.values.get("use_sliding_window") is False:
        return
    # A window that covers the whole context hides nothing.
    if isinstance(window, int) and not isinstance(window, bool) and window >= max_positions:
        return
    raise fields.error(
        f"sliding_window={window!r} is not supported; only models that attend to their whole "
        f"context are (sliding_window null, or at least max_position_embeddings={max_positions})"
    )


def _dtype(fields: _Fields) -> str:
    value = fields.values.get("dtype", fields.values.get("torch_dtype"))
    if value is None:
        return "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise fields.error(f"dtype={value!r} is not supported. Supported: {', '.join(DTYPES)}")
    return cast(str, name)


def _rope(fields: _Fields, head_dim: int) -> RopeConfig:
    if fields.has("rope_parameters"):
        rope = fields.section("rope_parameters")
        theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    else:
        theta = fields.number("rope_theta", 10000.0)
        if not fields.has("rope_scaling"):
            rope = _Fields({}, fields.where)
        else:
            rope = fields.section("rope_scaling")
    for place in (fields, rope):
        if place.values.get("partial_rotary_factor", 1) not in (1, None):
            raise place.error("partial_rotary_factor is not supported; all of head_dim is rotated")

    if any(isinstance(value, dict) for value in rope.values.values()):
        raise rope.error("rope settings that differ from layer to layer are not supported")
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type not in get_args(RopeType):
        raise rope.error(
            f"rope type {rope_type!r} is not supported. Supported: {', '.join(get_args(RopeType))}"
        )
    original = None
    for place in (fields, rope):
        if place.has("original_max_position_embeddings"):
            original = place.size("original_max_position_embeddings")
    divisors = _frequency_divisors(rope, head_dim)
    if rope_type == "default":
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    if rope_type == "dynamic" and head_dim < 4:
        raise rope.error(f"dynamic rope needs a head_dim of at least 4, not {head_dim}")
    if rope_type == "yarn" and theta <= 1:
        raise rope.error(f"rope_theta={theta!r} is not above 1, as yarn needs it")
    is_llama3 = rope_type == "llama3"
    if is_llama3 and original is None:
        raise rope.error("original_max_position_embeddings is missing")
    low = rope.number("low_freq_factor", None if is_llama3 else 1.0)
    high = rope.number("high_freq_factor", None if is_llama3 else 4.0)
    if is_llama3 and high <= low:
        raise rope.error(f"high_freq_factor={high!r} is not above low_freq_factor={low!r}")
    return RopeConfig(
        rope_type=cast(RopeType, rope_type),
        theta=theta,
        factor=rope.number("factor", minimum=1.0),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        frequency_divisors=divisors,
    )


def _frequency_divisors(rope: _Fields, head_dim: int) -> tuple[float, ...] | None:
    values = rope.values.get("frequency_divisors")
    if values is None:
        return None
    is_right = (
        isinstance(values, list)
        and len(values) == head_dim // 2
        and all(_is_positive(value) for value in values)
    )
    if not is_right:
        raise rope.error(f"frequency_divisors are not {head_dim // 2} numbers above 0")
    return tuple(float(value) for value in values)
