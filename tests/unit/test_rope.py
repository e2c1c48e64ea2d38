"""Rotary frequencies against formulas written out here in float64, one position at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cuengine.model.config import ModelConfig, RopeConfig
from cuengine.model.rope import attention_scale, cos_sin_table, frequencies


def model(rope: RopeConfig, head_dim: int = 16, max_position_embeddings: int = 512) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        dtype="float32",
    )


def plain(theta: float, dim: int) -> list[float]:
    return [1.0 / theta ** (2 * i / dim) for i in range(dim // 2)]


def test_default_frequencies_fall_from_one_towards_one_over_theta() -> None:
    got = frequencies(model(RopeConfig(theta=500000.0), head_dim=32))
    np.testing.assert_allclose(got, plain(500000.0, 32), rtol=1e-14)


def test_linear_scaling_slows_every_dimension_by_its_factor() -> None:
    got = frequencies(model(RopeConfig("linear", 10000.0, factor=4.0)))
    np.testing.assert_allclose(got, [f / 4 for f in plain(10000.0, 16)], rtol=1e-14)


@pytest.mark.parametrize("original", [None, 256])
def test_dynamic_scaling_is_fixed_at_its_longest_context(original: int | None) -> None:
    """The formula of the NTK-aware base at a sequence of max_position_embeddings * factor."""
    rope = RopeConfig("dynamic", 10000.0, factor=4.0, original_max_position_embeddings=original)
    trained = original or 512
    longest = trained * 4
    base = 10000.0 * ((4.0 * longest / trained) - (4.0 - 1.0)) ** (16 / (16 - 2))
    np.testing.assert_allclose(frequencies(model(rope)), plain(base, 16), rtol=1e-13)


def test_dynamic_scaling_by_one_changes_nothing() -> None:
    got = frequencies(model(RopeConfig("dynamic", 10000.0, factor=1.0)))
    np.testing.assert_allclose(got, plain(10000.0, 16), rtol=1e-14)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    rope = RopeConfig(
        "llama3",
        500000.0,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    expected, kinds = [], set()
    for frequency in plain(500000.0, 128):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            kinds.add("kept")
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            kinds.add("divided")
            expected.append(frequency / 8.0)
        else:
            kinds.add("blended")
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    assert kinds == {"kept", "divided", "blended"}
    np.testing.assert_allclose(frequencies(model(rope, head_dim=128)), expected, rtol=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
def test_yarn_interpolates_by_the_turns_of_a_dimension(truncate: bool, theta: float) -> None:
    rope = RopeConfig(
        "yarn",
        theta,
        factor=8.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=truncate,
    )
    dim = 64

    def where(turns: float) -> float:
        return dim / 2 * math.log(4096 / (2 * math.pi * turns)) / math.log(theta)

    first, last = where(32.0), where(1.0)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    expected = []
    for i, frequency in enumerate(plain(theta, dim)):
        ramp = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append(frequency * (1 - ramp) + frequency / 8.0 * ramp)
    np.testing.assert_allclose(frequencies(model(rope, head_dim=dim)), expected, rtol=1e-12)


def test_yarn_without_an_original_length_takes_the_models_own() -> None:
    given = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=512)
    np.testing.assert_array_equal(
        frequencies(model(RopeConfig("yarn", factor=4.0))), frequencies(model(given))
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.1 * math.log(40.0) + 1.0),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.707, "mscale_all_dim": 1.0},
            (0.0707 * math.log(40.0) + 1.0) / (0.1 * math.log(40.0) + 1.0),
        ),
        ({"mscale": 0.707}, 0.1 * math.log(40.0) + 1.0),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scales_attention(settings: dict[str, Any], expected: float) -> None:
    rope = RopeConfig("yarn", **{"factor": 40.0, **settings})
    assert attention_scale(rope) == pytest.approx(expected, rel=1e-14)


def test_only_yarn_scales_attention() -> None:
    assert attention_scale(RopeConfig("linear", factor=8.0, attention_factor=3.0)) == 1.0


def test_divisors_divide_the_base_frequencies() -> None:
    divisors = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)
    got = frequencies(model(RopeConfig(frequency_divisors=divisors)))
    expected = [f / d for f, d in zip(plain(10000.0, 16), divisors, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_the_table_has_cosines_first_and_carries_the_attention_scale() -> None:
    config = model(RopeConfig("yarn", factor=16.0, attention_factor=1.5))
    table = cos_sin_table(config, 5000)
    assert table.dtype == np.float32
    assert table.shape == (5000, 16)
    for position in (0, 1, 4095, 4096, 4999):
        for i, frequency in enumerate(frequencies(config)):
            assert table[position, i] == np.float32(1.5 * math.cos(position * frequency))
            assert table[position, 8 + i] == np.float32(1.5 * math.sin(position * frequency))


@pytest.mark.parametrize(
    ("rope", "settings"),
    [
        (RopeConfig(theta=500000.0), {}),
        (RopeConfig("linear", factor=4.0), {"factor": 4.0}),
        (
            RopeConfig("llama3", factor=8.0, original_max_position_embeddings=64),
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=128),
            {"factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            RopeConfig(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                mscale=0.7,
                mscale_all_dim=1.0,
                truncate=False,
            ),
            {
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "truncate": False,
            },
        ),
    ],
)
def test_frequencies_are_those_of_transformers(rope: RopeConfig, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip(
        "transformers", minversion="5.0", reason="needs transformers 5"
    )
    config = transformers.LlamaConfig(
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": rope.rope_type, "rope_theta": rope.theta, **settings},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(frequencies(model(rope)), rotary.inv_freq.numpy(), rtol=1e-6)
    assert attention_scale(rope) == pytest.approx(rotary.attention_scaling, rel=1e-6)
