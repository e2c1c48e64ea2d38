"""Rotary embedding: the frequencies of each rope type and the table of cosines and sines.

Everything is computed once, when a model is loaded, in float64. Applying the table is the device's
business (`rotary_cache`); reading the settings is config.py's.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cuengine.model.config import ModelConfig, RopeConfig

Float64 = NDArray[np.float64]

_PIECE = 4096


def cos_sin_table(config: ModelConfig, max_len: int) -> NDArray[np.float32]:
    """float32 [max_len, head_dim]: cosines of each position's angles, then their sines.

    The attention scale of yarn is multiplied in, so that q·k carries its square.
    """
    table = np.empty((max_len, config.head_dim), np.float32)
    inverse, scale, half = frequencies(config), attention_scale(config.rope), config.head_dim // 2
    # In pieces: float64 angles of a long context would take more memory than the table.
    for start in range(0, max_len, _PIECE):
        piece = table[start : start + _PIECE]
        angles = np.outer(np.arange(start, start + len(piece), dtype=np.float64), inverse)
        np.multiply(np.cos(angles), scale, out=piece[:, :half], casting="same_kind")
        np.multiply(np.sin(angles), scale, out=piece[:, half:], casting="same_kind")
    return table


def frequencies(config: ModelConfig) -> Float64:
    """float64 [head_dim // 2], radians per position."""
    rope = config.rope
    match rope.rope_type:
        case "default":
            return _base_frequencies(config.head_dim, rope)
        case "linear":
            return _base_frequencies(config.head_dim, rope) / rope.factor
        case "dynamic":
            return _dynamic(config)
        case "llama3":
            return _llama3(config)
        case "yarn":
            return _yarn(config)


def attention_scale(rope: RopeConfig) -> float:
    """What yarn multiplies q and k with; 1 for every other type. arXiv 2309.00071, eq. 22.

    DeepSeek's two-sided form divides by the scale at `mscale_all_dim`.
    """
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _base_frequencies(head_dim: int, rope: RopeConfig, theta: float | None = None) -> Float64:
    """theta^(-2i / head_dim), over the divisors that a GGUF may carry instead of a rope type."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    result: Float64 = (rope.theta if theta is None else theta) ** -exponents
    if rope.frequency_divisors is not None:
        result = result / np.asarray(rope.frequency_divisors, np.float64)
    return result


def _dynamic(config: ModelConfig) -> Float64:
    """NTK-aware frequencies, fixed at the longest context they stretch to, as vLLM has them.

    The base grows with the sequence in the original; then no key could be cached. So the length is
    taken as original length * factor from the first token on.
    """
    rope, dim = config.rope, config.head_dim
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    stretch = rope.factor * (original * rope.factor) / original - (rope.factor - 1.0)
    return _base_frequencies(dim, rope, rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(config: ModelConfig) -> Float64:
    """Long wavelengths are divided by factor, short ones kept, those between blended.

    Meta's `apply_scaling` in llama-models/models/llama3/reference_impl/model.py.
    """
    rope = config.rope
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    base = _base_frequencies(config.head_dim, rope)
    turns = original * base / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return smooth * base + (1.0 - smooth) * base / rope.factor


def _yarn(config: ModelConfig) -> Float64:
    """Peng et al., "YaRN", arXiv 2309.00071, section 3.2: interpolate by parts.

    Dimensions that turn more than beta_fast times in the original context are kept, those with
    fewer than beta_slow turns are divided by factor, with a linear ramp between.
    """
    rope, dim = config.rope, config.head_dim
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    base = _base_frequencies(dim, rope)

    def dimension_with_turns(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with_turns(rope.beta_fast), dimension_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Where both ends meet there is no ramp, but a step.
    width = high - low or 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
    return interpolated * base / rope.factor + (1.0 - interpolated) * base
