"""Sampling: order of operations, truncation, distribution, and that rows stand alone.

Every test runs with the draws in NumPy and, where it is installed, in Numba.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cuengine.batch import Float32, SamplerOutput, SamplingBatch
from cuengine.device.cpu import CpuDevice
from cuengine.device.philox import philox
from cuengine.errors import ModelError

VOCAB = 301


@pytest.fixture(params=["numpy", "numba"], scope="module")
def device(request: pytest.FixtureRequest) -> CpuDevice:
    if request.param == "numba":
        pytest.importorskip("numba")
    return CpuDevice(use_numba=request.param == "numba")


def batch(rows: int, **fields: Any) -> SamplingBatch:
    values: dict[str, Any] = {
        "target_ids": np.full(rows, -1, np.int32),
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "seeds": np.full(rows, 11, np.uint64),
        "sample_indices": np.zeros(rows, np.uint32),
        "positions": np.arange(rows, dtype=np.uint32),
        "num_logprobs": np.full(rows, -1, np.int32),
    }
    for name, value in fields.items():
        if name in values:
            values[name] = np.broadcast_to(value, rows).astype(values[name].dtype)
        else:
            values[name] = value
    return SamplingBatch(**values)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2) -> Float32:
    generator = np.random.default_rng(seed)
    return (generator.normal(size=(rows, vocab)) * spread).astype(np.float32)


def run(device: CpuDevice, logits: Float32, sampling: SamplingBatch) -> SamplerOutput:
    return device.sample(logits.copy(), sampling)


def oracle(logits: Float32, sampling: SamplingBatch, row: int) -> int:
    """A draw by the definition: float64, full sorts, one Philox call for each token."""
    scaled = logits[row].astype(np.float64) / float(sampling.temperature[row])
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    keep = probabilities >= float(sampling.min_p[row]) * probabilities.max()
    top_k = int(sampling.top_k[row])
    if 0 < top_k < len(scaled):
        keep &= scaled >= np.sort(scaled)[-top_k]
    rest = np.where(keep, probabilities, 0)
    rest /= rest.sum()
    order = sorted(range(len(rest)), key=lambda token: (-rest[token], token))
    ahead = 0.0
    for token in order:
        if ahead >= float(sampling.top_p[row]):
            keep[token] = False
        ahead += rest[token]
    best, chosen = -math.inf, -1
    for token in np.flatnonzero(keep):
        counter = [token // 4, sampling.positions[row], sampling.sample_indices[row], 0]
        word = philox(np.array(counter, np.uint64), int(sampling.seeds[row]))[token % 4]
        score = scaled[token] - math.log(-math.log((float(word) + 0.5) / 2**32))
        if score > best:
            best, chosen = score, int(token)
    return chosen


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_k": 299},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.5, "top_p": 0.999},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.2, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
    ],
)
def test_draws_are_those_of_the_definition(device: CpuDevice, fields: dict[str, Any]) -> None:
    logits = random_logits(16)
    sampling = batch(16, **fields, seeds=2**64 - 5, sample_indices=3)
    tokens = run(device, logits, sampling).token_ids
    assert tokens.tolist() == [oracle(logits, sampling, row) for row in range(16)]


def test_numpy_and_numba_draw_the_same_tokens_of_a_large_vocabulary() -> None:
    pytest.importorskip("numba")
    generator = np.random.default_rng(5)
    rows = 24
    logits = random_logits(rows, 49152, seed=1, spread=4)
    sampling = batch(
        rows,
        temperature=generator.choice([0.3, 0.8, 1.5], rows),
        top_k=generator.choice([0, 1, 50, 1000, 49151], rows),
        top_p=generator.choice([1, 0.9, 0.5], rows),
        min_p=generator.choice([0, 0.05], rows),
        seeds=generator.integers(0, 2**63, rows),
    )
    numba, numpy = (run(CpuDevice(use_numba=use), logits, sampling) for use in (True, False))
    assert numba.token_ids.tolist() == numpy.token_ids.tolist()


def chi_square(counts: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"temperature": 1.0}, 8),
        ({"temperature": 1.0, "top_k": 4}, 4),
        ({"temperature": 1.0, "top_p": 0.75}, 3),
        ({"temperature": 1.0, "min_p": 0.15}, 4),
    ],
)
def test_draws_follow_the_truncated_softmax(
    device: CpuDevice, fields: dict[str, Any], kept: int
) -> None:
    draws = 4000
    weights = np.array([0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01])
    logits = np.tile(np.log(weights).astype(np.float32), (draws, 1))
    tokens = run(device, logits, batch(draws, **fields)).token_ids
    counts = np.bincount(tokens, minlength=8)
    expected = np.where(np.arange(8) < kept, weights, 0)
    expected *= draws / expected.sum()
    assert counts[kept:].sum() == 0
    # 99.9% quantiles of chi-square with kept - 1 degrees of freedom.
    limit = {8: 24.32, 4: 16.27, 3: 13.82}[kept]
    assert chi_square(counts[:kept], expected[:kept]) < limit


def test_a_row_is_drawn_alike_alone_and_in_a_batch(device: CpuDevice) -> None:
    logits = random_logits(12)
    fields = {"temperature": 0.9, "top_p": 0.95}
    together = run(device, logits, batch(12, **fields)).token_ids
    for row in (0, 5, 11):
        alone = run(device, logits[row : row + 1], batch(1, **fields, positions=row))
        assert alone.token_ids[0] == together[row]


def test_seed_sample_and_position_each_change_the_draws(device: CpuDevice) -> None:
    logits = np.zeros((32, VOCAB), np.float32)
    base = run(device, logits, batch(32, temperature=1)).token_ids
    for other in ({"seeds": 12}, {"sample_indices": 1}, {"positions": np.arange(100, 132)}):
        changed = run(device, logits, batch(32, temperature=1, **other)).token_ids
        assert (changed != base).sum() > 24


def test_greedy_takes_the_lowest_of_equal_ids(device: CpuDevice) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [17, 40, 200]] = 3
    assert run(device, logits, batch(1)).token_ids[0] == 17


def test_top_k_keeps_all_that_tie_with_the_kth(device: CpuDevice) -> None:
    logits = np.full((400, 200), -20, np.float32)
    logits[:, 10], logits[:, [50, 60, 70]] = 1, 0
    tokens = run(device, logits, batch(400, temperature=1, top_k=2)).token_ids
    assert set(tokens.tolist()) == {10, 50, 60, 70}


def test_top_p_takes_equals_by_lowest_id(device: CpuDevice) -> None:
    logits = np.zeros((200, 10), np.float32)
    tokens = run(device, logits, batch(200, temperature=1, top_p=0.25)).token_ids
    assert set(tokens.tolist()) == {0, 1, 2}


def test_a_very_low_temperature_is_as_good_as_greedy(device: CpuDevice) -> None:
    logits = random_logits(8)
    tokens = run(device, logits, batch(8, temperature=1e-30)).token_ids
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_only_token_that_is_not_forbidden_is_taken(
    device: CpuDevice, temperature: float
) -> None:
    logits = np.full((3, VOCAB), -np.inf, np.float32)
    logits[[0, 1, 2], [5, 0, 300]] = -1e4
    sampling = batch(3, temperature=temperature, top_p=0.9)
    assert run(device, logits, sampling).token_ids.tolist() == [5, 0, 300]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_forbidden_gives_token_0(
    device: CpuDevice, temperature: float
) -> None:
    sampling = batch(1, temperature=temperature, allowed_mask=np.zeros((1, 10), np.uint32))
    assert run(device, random_logits(1), sampling).token_ids[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error_that_names_the_row(
    device: CpuDevice, value: float
) -> None:
    logits = random_logits(4)
    logits[2, 7] = value
    with pytest.raises(ModelError, match="row 2"):
        run(device, logits, batch(4, temperature=1))


def test_penalties_are_vllms(device: CpuDevice) -> None:
    logits = random_logits(2)
    prompt, output = [3, 3, 4], [4, 9, 9, 9]
    sampling = batch(
        2,
        num_logprobs=0,
        repetition_penalty=np.array([1.5, 1], np.float32),
        presence_penalty=np.array([0.25, 0], np.float32),
        frequency_penalty=np.array([0.5, 0], np.float32),
        prompt_ids=np.array(prompt, np.int32),
        prompt_offsets=np.array([0, 3, 3], np.int32),
        output_ids=np.array(output, np.int32),
        output_offsets=np.array([0, 4, 4], np.int32),
    )
    changed = logits.copy()
    device.sample(changed, sampling)
    expected = logits.astype(np.float64)
    for token in (3, 4, 9):
        expected[0, token] *= 1.5 if expected[0, token] < 0 else 1 / 1.5
    expected[0, 4] -= 0.25 + 0.5
    expected[0, 9] -= 0.25 + 0.5 * 3
    assert np.allclose(changed, expected, rtol=1e-6)


def test_bias_is_added_and_minus_infinity_forbids(device: CpuDevice) -> None:
    logits = random_logits(2)
    first = int(logits[0].argmax())
    sampling = batch(
        2,
        bias_rows=np.array([0, 1, 1], np.int32),
        bias_ids=np.array([first, 8, 8], np.int32),
        bias_values=np.array([-np.inf, 60, 40], np.float32),
    )
    logits[1, 9] = 99
    second = int(np.argsort(logits[0])[-2])
    assert run(device, logits, sampling).token_ids.tolist() == [second, 8]


def test_only_tokens_whose_bit_is_set_are_drawn(device: CpuDevice) -> None:
    rows = 64
    allowed = [0, 31, 32, 64, 300]
    mask = np.zeros((rows, 10), np.uint32)
    for token in allowed:
        mask[:, token // 32] |= np.uint32(1 << token % 32)
    sampling = batch(rows, temperature=3, allowed_mask=mask)
    tokens = run(device, np.zeros((rows, VOCAB), np.float32), sampling).token_ids
    assert set(tokens.tolist()) == set(allowed)


def test_log_probabilities_are_of_the_raw_logits(device: CpuDevice) -> None:
    logits = random_logits(3)
    sampling = batch(
        3,
        target_ids=[-1, 7, -1],
        temperature=[0, 0, 0.5],
        num_logprobs=[4, 0, -1],
        bias_rows=np.array([0], np.int32),
        bias_ids=np.array([123], np.int32),
        bias_values=np.array([100], np.float32),
    )
    output = run(device, logits, sampling)
    raw = logits.astype(np.float64)
    logprobs = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    assert output.token_ids[:2].tolist() == [123, 7]
    assert np.allclose(output.logprobs[:2], logprobs[[0, 1], [123, 7]], atol=1e-5)
    ranks = [1 + int((raw[row] > raw[row, token]).sum()) for row, token in ((0, 123), (1, 7))]
    assert output.ranks.tolist() == [*ranks, 0]
    order = np.argsort(-raw[0])[:4]
    assert output.top_ids[0].tolist() == order.tolist()
    assert np.allclose(output.top_logprobs[0], logprobs[0, order], atol=1e-5)
    assert output.top_ids[1:].tolist() == [[-1] * 4] * 2
    assert np.isnan(output.logprobs[2])
