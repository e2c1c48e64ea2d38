"""The sampling kernels against cuengine/device/sampler.py: the same tokens, to the last one.

Both take the same float32 values and the same Philox noise, so that greedy and drawn tokens, ranks
and scores are equal. Log-probabilities are sums of float32 exponentials on both sides: 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launching import ORDERS, Array, Emulator

from cuengine.batch import Float32, SamplerOutput, SamplingBatch
from cuengine.device.emulated.runtime import REVERSE, SHUFFLED
from cuengine.device.philox import gumbel, token_words
from cuengine.device.sampler import apply_constraints, empty_output, least_scaled, sample

Start = Callable[..., Emulator]

THREADS = 1024


def batch(rows: int, **fields: Any) -> SamplingBatch:
    """Drawn at temperature 1 unless told otherwise."""
    values: dict[str, Any] = {
        "target_ids": np.full(rows, -1, np.int32),
        "temperature": np.ones(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "seeds": np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        "sample_indices": np.arange(rows, dtype=np.uint32) % np.uint32(3),
        "positions": np.arange(rows, dtype=np.uint32) + np.uint32(7),
        "num_logprobs": np.full(rows, -1, np.int32),
    }
    for name, value in fields.items():
        if name in values:
            values[name] = np.broadcast_to(value, rows).astype(values[name].dtype)
        else:
            values[name] = value
    return SamplingBatch(**values)


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3) -> Float32:
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, vocab)) * spread).astype(np.float32)


def constrain(gpu: Emulator, logits: Float32, sampling: SamplingBatch) -> Array:
    scores = gpu.result(logits.shape, np.float32, "scores")
    penalized = sampling.repetition_penalty is not None
    counts = gpu.result(logits.shape, np.int32, "counts") if penalized else None
    bias_rows = sampling.bias_rows
    gpu.launch(
        "apply_constraints", (len(logits),), THREADS,
        scores, counts, logits, logits.shape[1], sampling.allowed_mask,
        bias_rows, sampling.bias_ids, sampling.bias_values,
        0 if bias_rows is None else len(bias_rows),
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
        sampling.prompt_ids, sampling.prompt_offsets, sampling.output_ids, sampling.output_offsets,
    )  # fmt: skip
    assert gpu.written(scores)
    return scores


def draw(gpu: Emulator, scores: Float32, sampling: SamplingBatch) -> tuple[Array, Array]:
    """Tokens, and the maxima of the scores."""
    rows, vocab = scores.shape
    token_ids = gpu.result((rows,), np.int32, "token_ids")
    maxima = gpu.result((rows,), np.float32, "maxima")
    gpu.launch(
        "sample_tokens", (rows,), THREADS,
        token_ids, maxima, scores, vocab, sampling.target_ids, sampling.temperature,
        sampling.top_k, sampling.top_p, least_scaled(sampling.min_p), sampling.seeds,
        sampling.sample_indices, sampling.positions,
    )  # fmt: skip
    assert gpu.written(token_ids)
    assert gpu.written(maxima)
    return token_ids, maxima


def report(gpu: Emulator, logits: Float32, sampling: SamplingBatch, tokens: Array) -> SamplerOutput:
    shape = empty_output(sampling).top_ids.shape
    output = SamplerOutput(
        token_ids=tokens,
        logprobs=gpu.result(tokens.shape, np.float32, "logprobs"),
        ranks=gpu.result(tokens.shape, np.int32, "ranks"),
        top_ids=gpu.result(shape, np.int32, "top_ids"),
        top_logprobs=gpu.result(shape, np.float32, "top_logprobs"),
    )
    gpu.launch(
        "report_logprobs", (len(logits),), THREADS,
        output.logprobs, output.ranks, output.top_ids if shape[1] else None,
        output.top_logprobs if shape[1] else None, logits, logits.shape[1],
        tokens, sampling.num_logprobs, shape[1],
    )  # fmt: skip
    for array in (output.logprobs, output.ranks, output.top_ids, output.top_logprobs):
        assert not array.size or gpu.written(array)
    return output


def assert_same_tokens(gpu: Emulator, logits: Float32, sampling: SamplingBatch) -> Array:
    tokens, maxima = draw(gpu, logits, sampling)
    np.testing.assert_array_equal(tokens, sample(logits.copy(), sampling).token_ids)
    np.testing.assert_array_equal(maxima, logits.max(axis=1))
    return tokens


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [1, 31, 301, 1030, 5003])
def test_greedy_takes_the_largest_of_equals_the_lowest_id(
    emulator: Start, order: int, vocab: int
) -> None:
    logits = random_logits(4, vocab)
    logits[1] = 0
    logits[2, vocab // 3 :: 7] = 50
    logits[3, : vocab // 2] = -np.inf
    assert_same_tokens(emulator(order), logits, batch(4, temperature=0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [5, 301, 4099])
def test_draws_with_the_noise_of_philox(emulator: Start, order: int, vocab: int) -> None:
    logits = random_logits(8, vocab)
    sampling = batch(8, temperature=[1, 0.7, 2, 0, 1e-3, 0.3, 5, 1])
    assert_same_tokens(emulator(order), logits, sampling)


def test_a_draw_is_the_largest_of_score_and_noise(emulator: Start) -> None:
    """By the definition, apart from sampler.py."""
    logits = random_logits(6, 333, seed=4)
    sampling = batch(6, temperature=0.8)
    tokens, _ = draw(emulator(), logits, sampling)
    for row in range(6):
        words = token_words(
            np.arange(333),
            int(sampling.seeds[row]),
            int(sampling.sample_indices[row]),
            int(sampling.positions[row]),
        )
        assert tokens[row] == (logits[row].astype(np.float64) / 0.8 + gumbel(words)).argmax()


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": [1, 2, 5, 40, 299, 300, 301, 1000]},
    "top_p": {"top_p": [0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0]},
    "min_p": {"min_p": [0.0, 1e-9, 0.01, 0.05, 0.3, 0.9, 1.0, 0.1]},
    "all": {
        "top_k": [3, 50, 0, 20, 7, 100, 0, 2],
        "top_p": [0.9, 0.5, 0.8, 1.0, 0.3, 0.95, 0.99, 0.1],
        "min_p": [0.0, 0.01, 0.1, 0.05, 0.0, 1e-3, 0.0, 0.5],
        "temperature": [1, 0.5, 2, 0.1, 10, 1, 0, 3],
    },
}


@pytest.mark.parametrize("vocab", [301, 2500])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncation_keeps_the_same_tokens(emulator: Start, truncation: str, vocab: int) -> None:
    for seed in range(4):
        logits = random_logits(8, vocab, seed, spread=1 + seed)
        sampling = batch(8, positions=np.arange(8) + 100 * seed, **TRUNCATIONS[truncation])
        assert_same_tokens(emulator(SHUFFLED, seed), logits, sampling)


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_top_p_of_equals_goes_by_id(emulator: Start, kept: int) -> None:
    """Of eight equal tokens among far less likely ones, the first ones are drawn and no other."""
    vocab, rows = 1500, 64
    logits = np.full((rows, vocab), -200, np.float32)
    ids = np.arange(8) * 180 + 5
    logits[:, ids] = 2
    sampling = batch(rows, top_p=kept / 8, temperature=1, seeds=np.arange(rows))
    tokens = assert_same_tokens(emulator(REVERSE), logits, sampling)
    assert set(tokens.tolist()) == set(ids[:kept].tolist())


def test_top_k_keeps_all_that_equal_the_kth(emulator: Start) -> None:
    logits = np.full((64, 1100), -20, np.float32)
    logits[:, [3, 700, 1099]] = 1
    logits[:, 50] = 1.5
    sampling = batch(64, top_k=2, seeds=np.arange(64))
    tokens = assert_same_tokens(emulator(), logits, sampling)
    assert set(tokens.tolist()) == {3, 50, 700, 1099}


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")  # NumPy's, to -inf as wanted
def test_extremes(emulator: Start) -> None:
    """One token left, none left, all equal, huge gaps, temperatures next to 0 and very high."""
    logits = random_logits(10, 1200)
    logits[0] = -np.inf
    logits[1] = -np.inf
    logits[1, 1111] = -5
    logits[2] = 0
    logits[3] *= 1e37
    logits[4, 600:] = -np.inf
    sampling = batch(
        10,
        temperature=[1, 1, 1, 1, 1, 1e-30, 1e30, 1e-45, 1, 1],
        top_k=[5, 5, 10, 3, 700, 0, 0, 2, 5000, 0],
        top_p=[0.5, 0.5, 0.5, 0.9, 0.9999, 0.9, 0.9, 1, 1, 0.99999],
        min_p=[0.1, 0.1, 0, 0, 0, 0, 0, 0, 1, 0],
    )
    tokens = assert_same_tokens(emulator(), logits, sampling)
    assert tokens[0] == 0, "every token is forbidden"
    assert tokens[1] == 1111


def test_targets_are_given_back(emulator: Start) -> None:
    logits = random_logits(3, 64)
    sampling = batch(3, target_ids=[63, -1, 0], temperature=[1, 0, 0])
    assert assert_same_tokens(emulator(), logits, sampling).tolist()[::2] == [63, 0]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_logit_that_is_no_number_shows_in_the_maxima(emulator: Start, bad: float) -> None:
    """Forbidden or not: the host sees it, as it does on the CPU."""
    logits = random_logits(4, 1100)
    logits[1, 1050] = bad
    logits[2, 3] = bad
    mask = np.full((4, 35), 0xFFFFFFFF, np.uint32)
    mask[2, 0] = ~np.uint32(1 << 3)
    sampling = batch(
        4, temperature=[0, 1, 1, 1], top_p=0.9, allowed_mask=mask,
        bias_rows=np.array([1, 3], np.int32), bias_ids=np.array([1050, 5], np.int32),
        bias_values=np.array([-np.inf, 1], np.float32),
    )  # fmt: skip
    gpu = emulator()
    _, maxima = draw(gpu, constrain(gpu, logits, sampling), sampling)
    assert np.isfinite(maxima).tolist() == [True, False, False, True]


def penalties(rows: int, vocab: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "repetition_penalty": random.choice([1, 1.3, 0.8, 2], rows).astype(np.float32),
        "presence_penalty": random.choice([0, 0.5, -1.5], rows).astype(np.float32),
        "frequency_penalty": random.choice([0, 0.25, -0.1], rows).astype(np.float32),
    }
    for name in ("prompt", "output"):
        lengths = random.integers(0, 200, rows)
        lengths[0] = 0
        # Few different ids, so that many repeat.
        ids = random.integers(0, max(1, vocab // 9), lengths.sum()) * 9 % vocab
        fields[f"{name}_ids"] = ids.astype(np.int32)
        fields[f"{name}_offsets"] = np.cumsum([0, *lengths]).astype(np.int32)
    return fields


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [33, 1500])
def test_constraints_to_the_bit(emulator: Start, order: int, vocab: int) -> None:
    rows = 6
    random = np.random.default_rng(vocab)
    logits = random_logits(rows, vocab)
    sampling = batch(
        rows,
        allowed_mask=random.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32),
        bias_rows=np.array([0, 0, 3, 5, 5, 5], np.int32),
        bias_ids=np.array([0, vocab - 1, 7, 1, 2, 3], np.int32),
        bias_values=np.array([5, -5, -np.inf, 100, -0.25, 1e-3], np.float32),
        **penalties(rows, vocab, order),
    )
    expected = logits.copy()
    apply_constraints(expected, sampling)
    np.testing.assert_array_equal(constrain(emulator(order), logits, sampling), expected)


@pytest.mark.parametrize("only", ["allowed_mask", "bias", "penalties", "prompt"])
def test_constraints_one_by_one(emulator: Start, only: str) -> None:
    """What is not asked for is a null pointer."""
    rows, vocab = 3, 70
    logits = random_logits(rows, vocab)
    fields: dict[str, Any] = {}
    if only == "allowed_mask":
        fields["allowed_mask"] = np.full((rows, 3), 0x0F0F00FF, np.uint32)
    elif only == "bias":
        # An end of the text that min_tokens forbids.
        fields["bias_rows"] = np.array([2], np.int32)
        fields["bias_ids"] = np.array([int(logits[2].argmax())], np.int32)
        fields["bias_values"] = np.array([-np.inf], np.float32)
    else:
        fields |= penalties(rows, vocab, 1)
    if only == "prompt":
        fields["output_ids"] = fields["output_offsets"] = None
    sampling = batch(rows, temperature=0, **fields)
    gpu = emulator()
    tokens, _ = draw(gpu, constrain(gpu, logits, sampling), sampling)
    np.testing.assert_array_equal(tokens, sample(logits.copy(), sampling).token_ids)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [8, 1030])
def test_logprobs_are_of_the_raw_logits(emulator: Start, order: int, vocab: int) -> None:
    """Whatever forbade, penalized or truncated: ranks and log-probabilities know nothing of it."""
    rows = 6
    logits = random_logits(rows, vocab)
    logits[1] = 1  # all equal: the most likely are the first
    logits[2, ::2] = -np.inf
    sampling = batch(
        rows,
        top_k=3,
        num_logprobs=[0, 5, 20, -1, 3, 1],
        target_ids=[-1, 4, -1, -1, vocab - 1, -1],
        allowed_mask=np.full((rows, -(-vocab // 32)), 0x55555555, np.uint32) << np.uint32(1),
        **penalties(rows, vocab, 2),
    )
    expected = sample(logits.copy(), sampling)
    gpu = emulator(order)
    tokens, _ = draw(gpu, constrain(gpu, logits, sampling), sampling)
    output = report(gpu, logits, sampling, tokens)
    np.testing.assert_array_equal(output.token_ids, expected.token_ids)
    np.testing.assert_array_equal(output.ranks, expected.ranks)
    np.testing.assert_array_equal(output.top_ids, expected.top_ids)
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(output.top_logprobs, expected.top_logprobs, atol=1e-5)


def test_logprobs_in_float64(emulator: Start) -> None:
    """By the formula, apart from sampler.py, with logits far from 0."""
    logits = random_logits(2, 3000, spread=8) + np.array([[300], [-300]], np.float32)
    sampling = batch(2, num_logprobs=0)
    tokens = np.array([17, 2999], np.int32)
    output = report(emulator(), logits, sampling, tokens)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True))
    exact -= logits.max(1, keepdims=True)
    chosen = exact[[0, 1], tokens]
    # float32 has steps of 3e-5 at 300, where the result is rounded from.
    np.testing.assert_allclose(output.logprobs, chosen, rtol=1e-6, atol=1e-5)
    assert output.ranks.tolist() == [1 + (exact[row] > chosen[row]).sum() for row in range(2)]


@pytest.mark.accept
def test_draws_over_a_real_vocabulary(emulator: Start) -> None:
    for seed in range(3):
        logits = random_logits(8, 128256, seed)
        sampling = batch(
            8, top_k=[0, 0, 50, 2000, 0, 1, 0, 40], top_p=[1, 0.9, 1, 0.95, 0.999, 1, 0.5, 0.99],
            positions=np.arange(8) + 10 * seed,
        )  # fmt: skip
        assert_same_tokens(emulator(SHUFFLED, seed), logits, sampling)
