"""However the work is split, the tokens are the same: prefix cache, chunks, preemption, batches.

On the tiny golden models; the first token of each prompt is also checked against the reference
logits of transformers. The same on the real model is in tests/e2e/test_greedy_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from cuengine import LLM, SamplingParams

TinyModel = Callable[[str], Path]

BLOCK_SIZE = 8
MAX_TOKENS = 24
MODELS = ("gqa_default", "mqa_headdim", "yarn_rope")


@cache
def golden(folder: Path) -> tuple[list[int], np.ndarray]:
    with np.load(folder / "reference.npz") as reference:
        return reference["input_ids"].tolist(), reference["logits"]


def prompts_of(folder: Path, count: int) -> list[list[int]]:
    """Beginnings of the golden tokens: all share a prefix with the next longer one."""
    ids, _ = golden(folder)
    return [ids[: 10 + 7 * i % 80] for i in range(count)]


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs]


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make(folder: Path, **fields: object) -> LLM:
    return LLM(str(folder), device="cpu", skip_tokenizer_init=True, block_size=BLOCK_SIZE, **fields)


@cache
def alone(folder: Path, count: int) -> list[list[int]]:
    """One prompt after the other, whole, without the prefix cache."""
    llm = make(folder, enable_prefix_caching=False, max_num_batched_tokens=2048)
    return [generate(llm, [prompt], greedy())[0] for prompt in prompts_of(folder, count)]


@pytest.mark.parametrize("model", MODELS)
def test_first_tokens_are_the_most_likely_ones_of_the_reference(tiny_model: TinyModel, model: str):
    folder = tiny_model(model)
    _, logits = golden(folder)
    lengths = [len(prompt) for prompt in prompts_of(folder, 24)]
    assert [tokens[0] for tokens in alone(folder, 24)] == [
        int(logits[length - 1].argmax()) for length in lengths
    ]


@pytest.mark.parametrize(
    ("prefix_caching", "chunk", "tiny_pool", "batch"),
    list(product([True, False], [16, 64, 2048], [True, False], [1, 24])),
)
def test_prefix_cache_chunks_preemption_and_batches_leave_greedy_tokens_alone(
    tiny_model: TinyModel, prefix_caching: bool, chunk: int, tiny_pool: bool, batch: int
):
    for model in MODELS:
        folder = tiny_model(model)
        llm = make(
            folder,
            enable_prefix_caching=prefix_caching,
            max_num_batched_tokens=chunk,
            max_num_seqs=batch,
            **({"num_blocks": 18, "max_model_len": 128} if tiny_pool else {}),
        )
        assert generate(llm, prompts_of(folder, 24), greedy()) == alone(folder, 24)
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        # Prompts that all start in the same step cannot find each other's blocks.
        if not prefix_caching or batch == 1:
            assert (stats.prefix_hits > 0) == prefix_caching
        if tiny_pool and batch > 1:
            assert stats.num_preemptions > 0


def test_the_same_greedy_request_four_times_in_a_row_gives_one_answer(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    llm = make(folder)
    prompt = prompts_of(folder, 5)[4]
    assert [generate(llm, [prompt], greedy())[0] for _ in range(4)] == [alone(folder, 5)[4]] * 4


@pytest.mark.parametrize("tiny_pool", [True, False])
def test_a_seeded_request_draws_the_same_tokens_whatever_else_runs(
    tiny_model: TinyModel, tiny_pool: bool
):
    folder = tiny_model("gqa_default")
    prompts = prompts_of(folder, 24)
    params = [
        SamplingParams(
            seed=i, temperature=0.5 + i / 20, top_p=0.9, max_tokens=MAX_TOKENS, ignore_eos=True
        )
        for i in range(24)
    ]
    llm = make(folder)
    expected = [
        generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    pool = {"num_blocks": 18, "max_model_len": 128} if tiny_pool else {}
    together = make(folder, max_num_batched_tokens=64, **pool)
    assert generate(together, prompts, params) == expected
    assert (together.stats().num_preemptions > 0) == tiny_pool


def test_each_sample_of_a_request_draws_what_it_draws_alone(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    prompt = prompts_of(folder, 3)[2]
    llm = make(folder)

    def samples(n: int) -> list[list[int]]:
        params = SamplingParams(n=n, seed=7, max_tokens=MAX_TOKENS, ignore_eos=True)
        [output] = llm.generate({"prompt_token_ids": prompt}, params)
        return [sample.token_ids for sample in output.outputs]

    three = samples(3)
    assert samples(1) == three[:1]
    assert samples(2) == three[:2]
    assert len({tuple(tokens) for tokens in three}) == 3


def test_greedy_samples_of_one_request_are_all_the_same(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    params = SamplingParams(n=3, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    [output] = make(folder).generate({"prompt_token_ids": prompts_of(folder, 3)[2]}, params)
    assert [sample.token_ids for sample in output.outputs] == [alone(folder, 3)[2]] * 3


@pytest.mark.parametrize("chunk", [7, 2048])
def test_prompt_logprobs_are_those_of_the_reference_with_the_prompt_in_the_cache(
    tiny_model: TinyModel, chunk: int
):
    folder = tiny_model("gqa_default")
    ids, logits = golden(folder)
    reference = logits.astype(np.float64)
    reference -= np.log(np.exp(reference).sum(-1, keepdims=True))
    llm = make(folder, max_num_batched_tokens=chunk)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    for _ in range(2):
        [output] = llm.generate({"prompt_token_ids": ids}, params)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert output.num_cached_tokens == 0
        for i, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            expected = {ids[i + 1], *np.argsort(-reference[i])[:3].tolist()}
            assert set(entry) == expected
            assert next(iter(entry)) == ids[i + 1]
            for token, found in entry.items():
                assert found.logprob == pytest.approx(reference[i, token], abs=1e-3)
                assert found.rank == 1 + int((reference[i] > reference[i, token]).sum())


def test_min_tokens_puts_the_end_off(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    prompt = prompts_of(folder, 1)[0]
    llm = make(folder)
    plain = generate(llm, [prompt], greedy())[0]
    stop = plain[2]
    fields = {"temperature": 0, "max_tokens": 12, "stop_token_ids": [stop], "ignore_eos": True}
    assert generate(llm, [prompt], SamplingParams(**fields))[0] == plain[: plain.index(stop) + 1]
    longer = generate(llm, [prompt], SamplingParams(**fields, min_tokens=6))[0]
    assert len(longer) >= 6
    assert stop not in longer[:5]


def test_logit_bias_forces_and_forbids_tokens(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    prompt = prompts_of(folder, 1)[0]
    llm = make(folder)
    plain = generate(llm, [prompt], greedy())[0]
    forced = SamplingParams(temperature=0, max_tokens=3, logit_bias={9: 100}, ignore_eos=True)
    assert generate(llm, [prompt], forced)[0] == [9, 9, 9]
    forbidden = SamplingParams(
        temperature=0, max_tokens=3, logit_bias={plain[0]: -100}, ignore_eos=True
    )
    assert plain[0] not in generate(llm, [prompt], forbidden)[0]


def test_a_repetition_penalty_sees_prompt_and_output(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    prompt = prompts_of(folder, 1)[0]
    # With a bias for ever the same tokens, only penalties can bring others.
    biased = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    bias = {prompt[0]: 60, 201: 59, 202: 58}
    llm = make(folder)

    def tokens(**fields: object) -> list[int]:
        params = SamplingParams(**biased, logit_bias=bias, **fields)  # type: ignore[arg-type]
        return generate(llm, [prompt], params)[0]

    assert tokens() == [prompt[0]] * 4
    assert tokens(repetition_penalty=4.0)[:2] == [201, 202]
    assert prompt[0] in tokens(presence_penalty=2.0)


def test_slices_of_logits_rows_give_what_all_rows_at_once_give(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
):
    folder = tiny_model("gqa_default")
    prompts = prompts_of(folder, 8)
    params = [
        SamplingParams(
            seed=i,
            max_tokens=6,
            ignore_eos=True,
            logprobs=i % 3,
            prompt_logprobs=2 if i % 2 else None,
            frequency_penalty=1.0 if i % 3 else 0.0,
            logit_bias={i: 5.0, 100 + i: -100.0},
        )
        for i in range(8)
    ]

    def run() -> list[object]:
        outputs = make(folder).generate([{"prompt_token_ids": p} for p in prompts], params)
        return [(o.outputs[0].token_ids, tops(o.outputs[0].logprobs)) for o in outputs] + [
            tops(o.prompt_logprobs) for o in outputs
        ]

    def tops(entries: list | None) -> object:  # type: ignore[type-arg]
        return entries and [
            entry and [(token, round(lp.logprob, 3), lp.rank) for token, lp in entry.items()]
            for entry in entries
        ]

    whole = run()
    monkeypatch.setattr("cuengine.model_runner.LOGITS_ROWS", 5)
    assert run() == whole
