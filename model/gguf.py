"""GGUF files of architecture "llama", converted once to a model folder in the cache.

The folder has what a hub's has: config.json, model.safetensors, tokenizer.json,
tokenizer_config.json and generation_config.json. All later code sees only folders. Reading the file
format is gguf_file.py's business, weights are gguf_weights.py's, vocabularies gguf_tokenizer.py's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from cuengine.errors import ModelError
from cuengine.model.config import parse_model_config
from cuengine.model.gguf_blocks import dequantized
from cuengine.model.gguf_file import GgufFile
from cuengine.model.gguf_weights import ROPE_DIVISORS, say, write_weights
from cuengine.paths import cache_dir

logger = logging.getLogger(__name__)

# Part of a cached folder's name: raised whenever what is written changes.
FORMAT_VERSION = 3

# Keys of llama.* with the one value for which the forward pass is that of LLaMA.
_NEUTRAL = {
    "expert_count": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attention.causal": True,
}


def convert_gguf(path: Path, *, progress: bool = True) -> Path:
    """The folder with the converted model; converts only what the cache does not have yet.

    Keyed by the file's SHA-256. Two processes at once convert once; one that is killed leaves
    nothing that is taken for a model. `progress` shows a bar, or a line per phase where stderr is
    no terminal. Raises ModelError for a damaged file or one that is not supported, and where the
    disk is full.
    """
    folder = cache_dir() / "gguf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_file_hash(path, folder)[:32]}-v{FORMAT_VERSION}"
        if not target.is_dir():
            with _lock(folder / f"{target.name}.lock"):
                if not target.is_dir():
                    _convert(path, target, progress=progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"{folder}: no space left while converting {path.name}. Free some, or set "
                "CUENGINE_CACHE to a folder on another disk"
            ) from None
        where = error.filename or path
        raise ModelError(f"{where}: {error.strerror or error}, while converting {path}") from None
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that is given up when the process ends, however it ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("Waiting for another process that converts the same file")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _file_hash(path: Path, folder: Path) -> str:
    """SHA-256 of the file, remembered by path, size and time of change."""
    status = path.stat()
    full = str(path.resolve())
    known = {"path": full, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    name = hashlib.sha256(os.fsencode(full)).hexdigest()[:32]
    note = folder / f"{name}.sha256.json"
    try:
        remembered = json.loads(note.read_bytes())
        if {**remembered, "sha256": None} == {**known, "sha256": None}:
            return str(remembered["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # never seen, or half a note: hash it again
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Only saves time, so that a cache that cannot be written will do.
    with suppress(OSError):
        temporary = note.with_suffix(f".tmp-{os.getpid()}")
        temporary.write_text(json.dumps({**known, "sha256": digest}))
        temporary.replace(note)
    return digest


def _convert(path: Path, target: Path, *, progress: bool) -> None:
    """Convert into a temporary folder beside `target` and rename it. The caller holds its lock."""
    temporary = target.with_name(f"{target.name}.tmp")
    # Of a process that was killed.
    shutil.rmtree(temporary, ignore_errors=True)
    say(f"Reading {path.name} …", progress)
    gguf = GgufFile(path)
    _refuse_unsupported(gguf)
    hf_config = _hf_config(gguf)
    config = parse_model_config(hf_config, f"{path}, read as config.json")
    temporary.mkdir()
    try:
        _write_json(temporary / "config.json", hf_config)
        _write_json(temporary / "generation_config.json", _generation_config(gguf.metadata))
        if "tokenizer.ggml.model" in gguf.metadata:
            from cuengine.model.gguf_tokenizer import tokenizer_from_gguf

            tokenizer, tokenizer_config = tokenizer_from_gguf(gguf.metadata)
            _write_json(temporary / "tokenizer.json", tokenizer)
            _write_json(temporary / "tokenizer_config.json", tokenizer_config)
        write_weights(temporary / "model.safetensors", gguf, config, progress=progress)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


# Metadata ---------------------------------------------------------------------------------------


def _refuse_unsupported(gguf: GgufFile) -> None:
    metadata, path = gguf.metadata, gguf.path
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path}: a GGUF file of type {kind!r} is not supported, only models are")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{path}: one part of a split GGUF file, which is not supported. Join the parts with "
            "llama-gguf-split --merge"
        )
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{path}: GGUF architecture {architecture!r} is not supported. Supported: llama"
        )
    for key, neutral in _NEUTRAL.items():
        value = metadata.get(f"llama.{key}", neutral)
        if value != neutral:
            raise ModelError(f"{path}: llama.{key}={value!r} is not supported, only {neutral!r} is")
    _refuse_types_without_dequantizer(gguf)


def _refuse_types_without_dequantizer(gguf: GgufFile) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for tensor in {tensor.type_id: tensor for tensor in gguf.tensors.values()}.values():
        kind = GGMLQuantizationType(tensor.type_id)
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ModelError(
                f"{gguf.path}: tensor {tensor.name!r} has type {kind.name}, which the installed "
                "gguf package cannot dequantize. A newer one may: pip install -U gguf"
            ) from None


def _hf_config(gguf: GgufFile) -> dict[str, Any]:
    """config.json as transformers 5 writes it; parse_model_config checks the values."""
    metadata, tensors = gguf.metadata, gguf.tensors

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, list):
            # One value per layer, as other architectures have them; LLaMA's are all the same.
            if not value or any(item != value[0] for item in value):
                raise ModelError(f"{gguf.path}: llama.{key} differs from layer to layer")
            return value[0]
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{gguf.path}: tensor 'token_embd.weight' is missing")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ModelError(
                f"{gguf.path}: llama.{key}={get(key)!r} is not supported where the head size is "
                f"{head_dim}"
            )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_parameters": _rope_parameters(gguf),
        "sliding_window": get("attention.sliding_window") or None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(f"blk.0.attn_{x}.bias" in tensors for x in ("q", "k", "v", "output")),
        "mlp_bias": any(f"blk.0.ffn_{x}.bias" in tensors for x in ("gate", "up", "down")),
        "dtype": "float32",
        "cuengine_dequantized": True,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
    }


def _rope_parameters(gguf: GgufFile) -> dict[str, Any]:
    """Rope settings; llama3 scaling is carried by GGUF files as a tensor of divisors."""
    rope = {
        key.removeprefix("llama.rope."): value
        for key, value in gguf.metadata.items()
        if key.startswith("llama.rope.")
    }

    def number(*keys: str, default: float) -> float:
        key = next((key for key in keys if key in rope), keys[0])
        value = rope.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{gguf.path}: llama.rope.{key}={value!r} is not a number")
        return value

    parameters: dict[str, Any] = {"rope_theta": number("freq_base", default=10000.0)}
    factor = number("scaling.factor", "scale_linear", default=1.0)
    kind = rope.get("scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        parameters["rope_type"] = "default"
    elif kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": factor}
    else:
        raise ModelError(
            f"{gguf.path}: llama.rope.scaling.type={kind!r} is not supported. Supported: none, "
            "linear, yarn"
        )
    if kind == "yarn":
        # llama.cpp multiplies its factor with the attention scale of the paper.
        scale = number("scaling.attn_factor", "scaling.yarn_attn_factor", default=1.0)
        parameters |= {
            "original_max_position_embeddings": rope.get("scaling.original_context_length"),
            "beta_fast": rope.get("scaling.yarn_beta_fast"),
            "beta_slow": rope.get("scaling.yarn_beta_slow"),
            "attention_factor": scale * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        }
    if (tensor := gguf.tensors.get(ROPE_DIVISORS)) is not None:
        divisors = dequantized(gguf.rows(tensor), tensor.type_id).ravel()
        if (divisors != 1.0).any():
            parameters["frequency_divisors"] = divisors.tolist()
    return parameters


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end a reply: end of sequence, of turn and of message, where there are any."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
    }
