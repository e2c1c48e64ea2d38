"""Speculative decoding on tiny models: the tokens of plain decoding, whoever guesses.

That the scheduler keeps its books is shown in tests/unit/test_any_requests.py and
test_speculation.py; here the real model, sampler and devices take part.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuengine import LLM, ConfigError, SamplingParams
from cuengine.batch import Batch, PendingOutput, SamplingBatch
from cuengine.device.cpu import CpuDevice
from cuengine.device.cuda.attention import AttentionPlan, PagedAttention
from cuengine.model_runner import ModelRunner
from cuengine.outputs import RequestOutput
from cuengine.speculation import Speculator
from cuengine.swap_space import SwapCosts

TinyModel = Callable[[str], Path]
EmulatedLLM = Callable[..., LLM]

MODEL, OTHER = "gqa_default", "linear_rope"
TOKENS = [9, 10, 11, 12]
"""With a bias for these, texts repeat themselves: guesses are right now and then."""

BIAS = dict.fromkeys(TOKENS, 30.0)

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def make(folder: Path, **fields: object) -> LLM:
    return LLM(
        str(folder),
        **{"device": "cpu", "skip_tokenizer_init": True, "block_size": 8, **fields},  # type: ignore[arg-type]
    )


@cache
def plain_engine(folder: Path) -> LLM:
    return make(folder, max_model_len=64)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess as much as allowed in every step, whatever comes of it."""
    monkeypatch.setattr(Speculator, "limit", lambda self, sequence, load: self._num_tokens)


def speculative(tiny_model: TinyModel, method: str) -> dict[str, object]:
    if method == "ngram":
        return NGRAM
    return {"model": str(tiny_model(method)), "num_speculative_tokens": 3}


def run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], priority: list[int]
) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, priority=priority)
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return outputs


def assert_same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        for sample, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert sample.token_ids == other.token_ids
            assert sample.text == other.text
            assert (sample.finish_reason, sample.stop_reason) == (
                other.finish_reason,
                other.stop_reason,
            )
            assert (sample.logprobs is None) == (other.logprobs is None)
            for row, reference in zip(sample.logprobs or [], other.logprobs or [], strict=True):
                assert next(iter(row)) == next(iter(reference))
                for token in row.keys() & reference.keys():
                    assert row[token].logprob == pytest.approx(reference[token].logprob, abs=1e-3)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int]:
    prompt = [7] * draw(st.integers(0, 20)) + draw(
        st.lists(st.sampled_from(TOKENS), min_size=1, max_size=20)
    )
    max_tokens = draw(st.integers(1, 20))
    n = draw(st.sampled_from([1, 1, 2, 3]))
    params = SamplingParams(
        n=n,
        best_of=n + 1 if draw(st.sampled_from([False, False, True])) else None,
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 3)),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([[], [12], [*range(0, 256, 5)]])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 2.0])),
        logit_bias=draw(st.sampled_from([{}, BIAS, BIAS])),
        logprobs=draw(st.sampled_from([None, None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )
    return prompt, params, draw(st.integers(0, 1))


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    work=st.lists(requests(), min_size=2, max_size=6),
    method=st.sampled_from(["ngram", MODEL, OTHER]),
    chunk=st.sampled_from([4, 16, 256]),
    prefix_caching=st.booleans(),
    swap_space=st.sampled_from([0.0, 0.01]),
    overlaps=st.booleans(),
)
@pytest.mark.usefixtures("always")
def test_any_requests_get_the_tokens_and_logprobs_of_plain_decoding(
    tiny_model: TinyModel,
    work: list[tuple[list[int], SamplingParams, int]],
    method: str,
    chunk: int,
    prefix_caching: bool,
    swap_space: float,
    overlaps: bool,
):
    folder = tiny_model(MODEL)
    prompts, params, priority = [list(column) for column in zip(*work, strict=True)]
    expected = run(plain_engine(folder), prompts, params, priority)
    CpuDevice.overlaps = overlaps
    try:
        llm = make(
            folder,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=prefix_caching,
            max_model_len=64,
            num_blocks=12,
            max_num_seqs=6,
            swap_space=swap_space,
            speculative_config=speculative(tiny_model, method),
        )
    finally:
        CpuDevice.overlaps = False
    if llm.engine.scheduler.swap_space is not None:
        # Tiny models are computed faster than they are moved: say otherwise.
        llm.engine.scheduler.swap_space.costs = SwapCosts(block=1, token=1)
    assert_same(run(llm, prompts, params, priority), expected)


@pytest.mark.parametrize("method", ["ngram", MODEL])
@pytest.mark.usefixtures("always")
def test_guesses_are_right_often_enough_to_save_steps(tiny_model: TinyModel, method: str):
    folder = tiny_model(MODEL)
    prompts = [TOKENS * 3 + [TOKENS[i]] for i in range(4)]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=30, ignore_eos=True, logit_bias=BIAS)
        for t in (0.0, 0.0, 0.3, 1.0)
    ]
    llm = make(folder, speculative_config=speculative(tiny_model, method), max_model_len=64)
    assert_same(run(llm, prompts, params, [0] * 4), run(make(folder), prompts, params, [0] * 4))
    stats = llm.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.num_steps < 30
    per_pos = stats.num_accepted_tokens_per_pos
    assert sum(per_pos) == stats.num_accepted_tokens
    assert list(per_pos) == sorted(per_pos, reverse=True)
    if method == MODEL:
        # The same model with the same noise: wrong only where rounding makes it so.
        assert stats.num_accepted_tokens >= 0.98 * stats.num_draft_tokens


@pytest.mark.usefixtures("always")
def test_stop_strings_amid_right_guesses_end_text_tokens_and_logprobs_alike(
    tiny_chat_model: Path,
):
    letters = {byte + 3: 60.0 for byte in b"abc"}
    params = [
        SamplingParams(
            temperature=0.5, seed=seed, max_tokens=40, stop=stop, logit_bias=letters, logprobs=0
        )
        for seed, stop in product(range(4), (["ab"], ["cc", "ba"], ["abcab"]))
    ]
    prompts = ["abcabcabc"] * len(params)
    fields = {"skip_tokenizer_init": False, "max_model_len": 128}
    guessing = make(
        tiny_chat_model,
        **fields,
        speculative_config={"model": str(tiny_chat_model), "num_speculative_tokens": 5},
    )
    got = guessing.generate(prompts, params)
    assert_same(got, make(tiny_chat_model, **fields).generate(prompts, params))
    assert guessing.stats().num_accepted_tokens > 50
    stopped = [sample for output in got for sample in output.outputs if sample.stop_reason]
    assert len(stopped) > 6
    for sample in stopped:
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)


@pytest.mark.parametrize("method", ["ngram", OTHER])
@pytest.mark.usefixtures("always")
def test_what_is_drawn_follows_the_models_distribution(tiny_model: TinyModel, method: str):
    """Chi-square over the three tokens that 1,500 seeds draw, only four being likely."""
    folder = tiny_model(MODEL)
    prompt, count = [*TOKENS, *TOKENS, TOKENS[0]], 1500
    temperature, bias = 4.0, dict.fromkeys(TOKENS, 100.0)
    plain = plain_engine(folder)

    def logprobs(texts: list[list[int]]) -> np.ndarray:
        """Of the last token of each text, before the bias, which is the same for all four."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = plain.generate([{"prompt_token_ids": text} for text in texts], params)
        last = [output.prompt_logprobs[-1] for output in outputs if output.prompt_logprobs]
        return np.array([next(iter(entry.values())).logprob for entry in last if entry])

    expected = {(): 1.0}
    for length in range(3):
        starts = list(product(TOKENS, repeat=length))
        found = logprobs([[*prompt, *start, token] for start in starts for token in TOKENS])
        weights = np.exp(found.reshape(-1, len(TOKENS)) / temperature)
        weights /= weights.sum(axis=1, keepdims=True)
        expected |= {
            (*start, token): expected[start] * weights[i, j]
            for i, start in enumerate(starts)
            for j, token in enumerate(TOKENS)
        }
    llm = make(
        folder, speculative_config=speculative(tiny_model, method), max_num_batched_tokens=2048
    )
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=3, ignore_eos=True, logit_bias=bias
        )
        for seed in range(count)
    ]
    outputs = run(llm, [prompt] * count, params, [0] * count)
    stats = llm.stats()
    assert min(stats.num_accepted_tokens, stats.num_draft_tokens - stats.num_accepted_tokens) > 200
    drawn = [tuple(output.outputs[0].token_ids) for output in outputs]
    cells = list(product(TOKENS, repeat=3))
    wanted = np.array([count * expected[cell] for cell in cells])
    observed = np.array([drawn.count(cell) for cell in cells])
    assert observed.sum() == count
    assert wanted.min() > 5
    # 63 degrees of freedom: exceeded once in a thousand times.
    assert ((observed - wanted) ** 2 / wanted).sum() < 103.4


def copy_of(folder: Path, target: Path, file: str, change: Callable[[dict], None]) -> Path:  # type: ignore[type-arg]
    """A model with one of its JSON files changed."""
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text())
    change(content)
    (target / file).write_text(json.dumps(content))
    return target


def swap_letters(content: dict) -> None:  # type: ignore[type-arg]
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda c: c.update(vocab_size=255), "has 255 tokens, the model has 256"),
        (
            "config.json",
            lambda c: c.update(max_position_embeddings=64, rope_scaling=None, rope_parameters=None),
            "has 64 positions, less than max_model_len=128",
        ),
        ("tokenizer.json", swap_letters, "gives its token ids other texts"),
    ],
    ids=["vocabulary size", "context", "vocabulary"],
)
def test_a_draft_model_that_cannot_draft_for_the_model_is_refused(
    tiny_chat_model: Path,
    tmp_path: Path,
    file: str,
    change: Callable[[dict], None],  # type: ignore[type-arg]
    message: str,
):
    draft = copy_of(tiny_chat_model, tmp_path / "draft", file, change)
    with pytest.raises(ConfigError, match=message):
        make(
            tiny_chat_model,
            skip_tokenizer_init=False,
            max_model_len=128,
            speculative_config={"model": str(draft), "num_speculative_tokens": 2},
        )


def test_a_draft_model_as_large_as_the_model_is_asked_for_a_trial_only(tiny_model: TinyModel):
    """Its passes cost as much as those that they could save."""
    folder = tiny_model(MODEL)
    llm = make(folder, speculative_config=speculative(tiny_model, MODEL), max_model_len=128)
    params = [SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)]
    run(llm, [[5, 6, 7]], params, [0])
    assert 0 < llm.stats().num_draft_tokens <= 4


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_blocks_are_copied_for_a_draft_model_that_has_nothing_to_compute(
    tiny_model: TinyModel,
    emulated_llm: EmulatedLLM,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
):
    """Samples part in steps in which nothing is guessed; later guesses are right all the same."""
    monkeypatch.setattr(Speculator, "limit", lambda self, sequence, load: 3 * (self._steps > 3))
    sizes: list[int] = []
    run_batch = ModelRunner.run

    def watched(self: ModelRunner, batch: Batch, sampling: SamplingBatch) -> PendingOutput:
        sizes.append(len(batch.token_ids))
        return run_batch(self, batch, sampling)

    monkeypatch.setattr(ModelRunner, "run", watched)
    folder = tiny_model(MODEL)
    prompt = TOKENS * 3
    params = [SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True, logit_bias=BIAS)]
    fields = {**EMULATED, "speculative_config": speculative(tiny_model, MODEL), "block_size": 8}
    llm = emulated_llm(folder, **fields) if device == "emulated" else make(folder, **fields)
    got = run(llm, [prompt], params, [0])
    assert_same(got, run(plain_engine(folder), [prompt], params, [0]))
    stats = llm.stats()
    assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens > 10
    assert 0 in sizes


EMULATED: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "num_blocks": 24,
}


@pytest.mark.parametrize("method", ["ngram", OTHER])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.usefixtures("always")
def test_the_cuda_device_verifies_guesses_in_the_decode_kernel(
    tiny_model: TinyModel,
    emulated_llm: EmulatedLLM,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    delayed: bool,
):
    folder = tiny_model(MODEL)
    prompts = [TOKENS * 2 + [TOKENS[i]] for i in range(3)]
    params = [
        SamplingParams(
            n=n, temperature=t, seed=1, max_tokens=10, ignore_eos=True, logit_bias=BIAS, logprobs=1
        )
        for n, t in ((1, 0.0), (2, 0.7), (1, 1.0))
    ]
    params[2].presence_penalty = 0.5
    expected = run(plain_engine(folder), prompts, params, [0] * 3)
    plans: list[AttentionPlan] = []
    plan = PagedAttention.plan

    def watched(self: PagedAttention, batch: object) -> AttentionPlan:
        plans.append(plan(self, batch))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(PagedAttention, "plan", watched)
    llm = emulated_llm(
        folder,
        runtime={"delayed": delayed},
        **EMULATED,
        block_size=8,
        speculative_config=speculative(tiny_model, method),
    )
    assert_same(run(llm, prompts, params, [0] * 3), expected)
    assert llm.stats().num_accepted_tokens > 0
    verified = [p for p in plans if 1 < p.max_queries <= 5]
    assert verified
    assert all(len(p.tiles) == 0 for p in verified)


def test_a_draft_model_that_costs_too_much_to_pay_is_said_to_be_off(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the model itself; n-grams cost nothing."""
    folder = tiny_model(MODEL)
    draft = {"model": str(folder), "num_speculative_tokens": 2}
    for config, off in ((draft, True), (NGRAM, False)):
        caplog.clear()
        make(folder, speculative_config=config, max_model_len=32)
        assert ("speculative decoding stays off" in caplog.text) == off
        assert ("costs 1.00 of" in caplog.text) == off
