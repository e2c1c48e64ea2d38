"""What sampling parameters accept, and how they say no."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cuengine.batch import SamplingBatch
from cuengine.device.sampler import sample
from cuengine.errors import RequestError
from cuengine.sampling_params import BeamSearchParams, SamplingParams


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 128], [0, 129, 1.0, "1", True, None]),
        ("temperature", [0, 0.0, 1, 2.5, 100], [-0.1, 101, math.nan, math.inf, "1", None, True]),
        ("top_p", [1, 1e-6], [0, 1.1, -1, math.nan]),
        ("top_k", [-1, 0, 1, 50_000], [-2, 1.5, None]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
        ("seed", [None, 0, -(2**63), 2**64 - 1], [2**64, 0.5, "x"]),
        ("max_tokens", [None, 1, 10**6], [0, -1, 1.5]),
        ("min_tokens", [0, 16], [-1, 0.5]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [1e-6, 0.01, 1, 2, 1e6], [0, -1, 1e-300, 9e-7, 2e6, math.inf]),
        ("logprobs", [None, 0, 100], [-1, 101, 0.5]),
        ("prompt_logprobs", [None, 0, 100], [-1, 101, 0.5]),
        ("stop", [[], ["a", "b"], "a"], [[""], "", [1]]),
        ("stop_token_ids", [[], [0, 5]], [[-1], ["a"], [1.5]]),
        ("logit_bias", [{}, {0: -100, 7: 100}], [{-1: 1}, {0: 101}, {0: math.nan}, {"0": 1}]),
    ],
)
def test_each_parameter_accepts_its_range_and_names_itself_otherwise(
    name: str, good: list[object], bad: list[object]
):
    for value in good:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert caught.value.param == name
        assert name in str(caught.value)


def test_best_of_may_not_be_less_than_n():
    assert SamplingParams(n=2, best_of=3).num_samples == 3
    assert SamplingParams(n=2).num_samples == 2
    with pytest.raises(RequestError, match="best_of=2 is not an integer from 3 to 128"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("beam_width", [3, 128], [0, 129, 2.0, "4", True, None]),
        ("max_tokens", [None, 1, 10**6], [0, -1, 1.5]),
        ("n", [None, 1, 3], [0, 4, 1.5, True]),
        ("length_penalty", [-10, 0, 0.5, 10], [-10.1, 11, math.nan, math.inf, "1", None]),
        ("early_stopping", [True, False, "never"], ["always", 1, 0, None]),
        ("temperature", [0, 0.0], [0.1, 1, -1, math.nan, None]),
        ("logprobs", [None, 0, 100], [-1, 101, 0.5]),
    ],
)
def test_beam_search_accepts_its_ranges_and_names_the_parameter_otherwise(
    name: str, good: list[object], bad: list[object]
):
    common = {"beam_width": 3, "max_tokens": 8}
    for value in good:
        BeamSearchParams(**(common | {name: value}))  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(RequestError) as caught:
            BeamSearchParams(**(common | {name: value}))  # type: ignore[arg-type]
        assert caught.value.param == name
        assert name in str(caught.value)


def test_a_beam_search_returns_all_beams_unless_told_otherwise():
    assert BeamSearchParams(4, 8).num_results == 4
    assert BeamSearchParams(4, 8, n=2).num_results == 2


def test_min_tokens_may_not_exceed_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=50, max_tokens=None)
    with pytest.raises(RequestError, match="min_tokens=6 is more than max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_one_stop_string_may_be_given_without_a_list():
    assert SamplingParams(stop="END").stop == ["END"]


def test_request_errors_are_value_errors():
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


EXTREMES = (
    *(0, 5e-324, 1e-300, 1e-45, 1e-39, 1e-30, 1e-7, 1e-6, 1e-5, 1 - 1e-12, 1, 2, 100, 1e6),
    *(3.5e38, 1e300, 10**400, -1e-300, -2, -100, -1e300),
)


@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias"),
    ],
)
def test_no_number_that_is_taken_vanishes_or_overflows_where_samplers_compute(name: str):
    """They do in float32; each value is drawn with, alone."""
    taken = 0
    for value in EXTREMES:
        try:
            given = {3: value} if name == "logit_bias" else value
            params = SamplingParams(**{name: given})  # type: ignore[arg-type]
        except RequestError:
            continue
        taken += 1
        one = SamplingBatch.greedy(1)
        one.temperature[:], one.top_p[:] = params.temperature, params.top_p
        one.min_p[:] = params.min_p
        one.repetition_penalty = np.array([params.repetition_penalty], np.float32)
        one.presence_penalty = np.array([params.presence_penalty], np.float32)
        one.frequency_penalty = np.array([params.frequency_penalty], np.float32)
        one.bias_rows, one.bias_ids = np.zeros((2, 1), np.int32)
        one.bias_values = np.array([params.logit_bias.get(3, 0)], np.float32)
        one.prompt_ids = one.output_ids = np.array([0, 1, 1], np.int32)
        one.prompt_offsets = one.output_offsets = np.array([0, 3], np.int32)
        logits = np.array([[80, -80, 1e-3, 5, -1e4, 0]], np.float32)
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            assert 0 <= sample(logits, one).token_ids[0] < 6
        assert np.isfinite(logits).all()
        changed = {"temperature": one.temperature, "repetition_penalty": one.repetition_penalty}
        if name in changed and getattr(params, name) != 0:
            assert np.finfo(np.float32).tiny < changed[name][0]
    assert taken >= 4


def test_temperatures_too_low_to_divide_by_are_greedy():
    assert SamplingParams(temperature=1e-300).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_ranges_are_said_in_plain_numbers():
    with pytest.raises(RequestError, match=r"1e-300 is not a number from 0\.000001 to 1000000$"):
        SamplingParams(repetition_penalty=1e-300)
    with pytest.raises(RequestError, match=r"top_p=0 is not a number above 0 and at most 1$"):
        SamplingParams(top_p=0)
