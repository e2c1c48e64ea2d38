"""`n` and `best_of` on tiny models: the same samples among any number, and ranked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cuengine import LLM, SamplingParams
from cuengine.outputs import CompletionOutput

TinyModel = Callable[[str], Path]
EmulatedLLM = Callable[..., LLM]
MakeLLM = Callable[..., LLM]

MODEL = "gqa_default"
PROMPT = [7, 30, 211, 45, 98, 3, 17, 160, 22, 9, 201, 64, 5]


@pytest.fixture(params=["cpu", "emulated"])
def make(
    request: pytest.FixtureRequest, tiny_model: TinyModel, emulated_llm: EmulatedLLM
) -> MakeLLM:
    """make(**fields) -> an LLM on each device."""

    def made(**fields: object) -> LLM:
        settings = {"block_size": 8, "num_blocks": 64, "max_model_len": 64, **fields}
        if request.param == "emulated":
            return emulated_llm(tiny_model(MODEL), **settings)
        return LLM(str(tiny_model(MODEL)), device="cpu", skip_tokenizer_init=True, **settings)

    return made


def params(**fields: object) -> SamplingParams:
    common = {"temperature": 1.0, "seed": 11, "max_tokens": 6, "ignore_eos": True}
    return SamplingParams(**(common | fields))  # type: ignore[arg-type]


def ids(samples: list[CompletionOutput]) -> list[list[int]]:
    return [sample.token_ids for sample in samples]


def assert_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_seeded_sample_i_is_the_same_among_1_to_8_alone_and_beside_others(make: MakeLLM):
    llm = make(max_num_seqs=40)
    asked = {"prompt_token_ids": PROMPT}
    [eight] = llm.generate([asked], params(n=8))
    expected = ids(eight.outputs)
    assert len({tuple(tokens) for tokens in expected}) == 8
    # All at once, each beside the others.
    outputs = llm.generate([asked] * 7, [params(n=n) for n in range(1, 8)])
    for n, output in enumerate(outputs, 1):
        assert ids(output.outputs) == expected[:n]
    assert_whole(llm)


def test_samples_are_the_same_where_memory_is_short_and_other_requests_are_aborted(make: MakeLLM):
    [expected] = make().generate([{"prompt_token_ids": PROMPT}], params(n=4, max_tokens=20))
    llm = make(num_blocks=14, max_num_seqs=12)
    engine = llm.engine
    engine.add_request("r", PROMPT, params(n=4, max_tokens=20))
    for number in range(4):
        engine.add_request(f"aborted {number}", PROMPT[number:], params(n=2, max_tokens=40))
    tokens: list[list[int]] = [[], [], [], []]
    steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            for token in output.tokens if output.request_id == "r" else ():
                tokens[token.index].append(token.token_id)
        steps += 1
        engine.abort(f"aborted {steps // 6}")
    assert engine.stats().num_preemptions > 0
    assert tokens == ids(expected.outputs)
    assert_whole(llm)


def test_best_of_ranks_by_the_mean_and_not_by_the_sum(make: MakeLLM):
    """Samples end at different lengths: the sum would prefer the short ones."""
    llm = make()
    asked = [{"prompt_token_ids": PROMPT}]
    fields = {"stop_token_ids": [*range(0, 256, 6)], "max_tokens": 20, "logprobs": 0}
    [every] = llm.generate(asked, params(n=8, **fields))
    sums = [sample.cumulative_logprob or 0 for sample in every.outputs]
    means = [total / len(s.token_ids) for total, s in zip(sums, every.outputs, strict=True)]
    by_mean = sorted(range(8), key=lambda i: means[i], reverse=True)
    by_sum = sorted(range(8), key=lambda i: sums[i], reverse=True)
    assert by_mean[:3] != by_sum[:3]
    [best] = llm.generate(asked, params(n=3, best_of=8, **fields))
    assert ids(best.outputs) == [every.outputs[i].token_ids for i in by_mean[:3]]
