"""The real model, all golden prompts in one batch: tokens, texts and log-probabilities.

Expected values are those of transformers in float32. More ways to split the work are tried in
tests/e2e/test_greedy_matrix.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from cuengine import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(smollm2: str) -> LLM:
    return LLM(smollm2, max_model_len=1024, max_num_seqs=24, kv_cache_memory=2**30)


@pytest.mark.parametrize("again", [False, True])
def test_golden_prompts_give_golden_tokens_texts_and_logprobs(
    llm: LLM, golden_smollm2: dict[str, Any], again: bool
):
    cases = golden_smollm2["cases"]
    hits = llm.stats().prefix_hits
    outputs = llm.generate(
        [{"prompt_token_ids": case["prompt_ids"]} for case in cases],
        [
            SamplingParams(temperature=0, max_tokens=len(case["output_ids"]), logprobs=5)
            for case in cases
        ],
    )
    # The second time, prompts are found in the prefix cache.
    assert (llm.stats().prefix_hits > hits) == again
    for case, output in zip(cases, outputs, strict=True):
        [sample] = output.outputs
        assert sample.token_ids == case["output_ids"]
        assert sample.text == case["output_text"]
        assert sample.finish_reason == ("stop" if case["output_ids"][-1] == 2 else "length")
        assert sample.logprobs is not None
        for entry, expected in zip(sample.logprobs, case["top5_logprobs"], strict=True):
            for token, logprob in expected:
                assert entry[token].logprob == pytest.approx(logprob, abs=5e-3)


def test_chat_renders_the_template_and_stops_at_the_end_of_the_turn(
    llm: LLM, golden_smollm2: dict[str, Any]
):
    case = golden_smollm2["cases"][0]
    assert case["kind"] == "chat"
    params = SamplingParams(temperature=0, max_tokens=32)
    [output] = llm.chat([{"role": "user", "content": case["text"]}], params)
    assert output.prompt_token_ids == case["prompt_ids"]
    assert output.outputs[0].text == case["output_text"]
    assert output.outputs[0].finish_reason == "stop"


def test_a_text_prompt_is_tokenized_and_a_stop_string_cuts_its_answer(
    llm: LLM, golden_smollm2: dict[str, Any]
):
    case = golden_smollm2["cases"][-1]
    assert case["kind"] == "raw"
    params = SamplingParams(temperature=0, max_tokens=40, stop=["9, 1"])
    [output] = llm.generate(case["text"], params)
    assert output.prompt_token_ids == case["prompt_ids"]
    [sample] = output.outputs
    assert sample.text == case["output_text"].partition("9, 1")[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "9, 1")
    assert sample.token_ids == case["output_ids"][: len(sample.token_ids)]
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
