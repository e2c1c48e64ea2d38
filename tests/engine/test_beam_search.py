"""Beam search on the golden tiny models: token ids and scores of transformers' generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cuengine import LLM, BeamSearchParams
from cuengine.llm import append_delta
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import BeamSearchOutput, CompletionOutput, RequestOutput

TinyModel = Callable[[str], Path]
EmulatedLLM = Callable[..., LLM]

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = ("gqa_default", "mqa_headdim", "llama3_rope")
TOLERANCE = 2e-4
"""Of a score. Where the reference's own lie closer, their order may be another."""


@cache
def cases(file: str = "beam_search.json") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / file).read_text())["cases"]
    return found


def cases_of(model: str) -> list[dict[str, Any]]:
    return [case for case in cases() if case["model"] == model]


def search(llm: LLM, asked: list[dict[str, Any]]) -> list[BeamSearchOutput]:
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in asked]
    outputs = llm.beam_search(prompts, [params_of(case) for case in asked])
    assert_whole(llm)
    return outputs


def params_of(case: dict[str, Any]) -> BeamSearchParams:
    return BeamSearchParams(
        case["num_beams"],
        case["max_new_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )


def assert_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def assert_same(sequences: list[CompletionOutput], case: dict[str, Any]) -> None:
    """Place by place the same score, within the tolerance, and the same text, unless a neighbour's
    score is as close."""
    expected = case["sequences"]
    assert len(sequences) == len(expected)
    for found, reference in zip(sequences, expected, strict=True):
        assert found.score == pytest.approx(reference["score"], abs=TOLERANCE, rel=1e-5)
        assert found.token_ids in [
            other["token_ids"]
            for other in expected
            if abs(other["score"] - reference["score"]) <= TOLERANCE
        ]
    texts = {tuple(found.token_ids) for found in sequences}
    assert texts == {tuple(reference["token_ids"]) for reference in expected}


@pytest.mark.parametrize("model", MODELS)
def test_all_golden_cases_at_once(tiny_model: TinyModel, model: str):
    asked = cases_of(model)
    assert len(asked) == 20
    llm = LLM(str(tiny_model(model)), device="cpu", skip_tokenizer_init=True, num_blocks=600)
    for output, case in zip(search(llm, asked), asked, strict=True):
        assert_same(output.sequences, case)


@pytest.mark.parametrize("model", ["gqa_default", "yarn_rope"])
def test_several_ways_to_end_a_text_and_every_rule_for_when_to_stop(
    tiny_model: TinyModel, model: str
):
    """Up to 30 end-of-sequence tokens, negative penalties, "never", and a width of 1 (greedy).

    All at once: the model's end-of-sequence tokens are those of the moment when a request comes.
    """
    llm = LLM(str(tiny_model(model)), device="cpu", skip_tokenizer_init=True, num_blocks=400)
    asked = [case for case in cases("beam_search_endings.json") if case["model"] == model]
    assert len(asked) == 24
    engine = llm.engine
    for number, case in enumerate(asked):
        engine.model.eos_token_ids = frozenset(case["eos_token_id"])
        engine.add_request(str(number), case["prompt_ids"], params_of(case))
    processor = OutputProcessor(None, engine.finish_sequence)
    outputs = [RequestOutput("", None, [], None) for _ in asked]
    for number, case in enumerate(asked):
        processor.add_request(str(number), case["prompt_ids"], params_of(case))
    while engine.has_unfinished():
        for delta in processor.process(engine.step()):
            append_delta(outputs[int(delta.request_id)], delta)
    assert_whole(llm)
    for output, case in zip(outputs, asked, strict=True):
        assert_same(output.outputs, case)
        for found in output.outputs:
            ended = found.token_ids[-1] in case["eos_token_id"]
            assert found.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("model", MODELS)
def test_a_dozen_cases_on_the_emulated_device(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, model: str
):
    """Four of each model, with every width and penalty, and texts that end by themselves."""
    asked = cases_of(model)[15:19] if model == "gqa_default" else cases_of(model)[11:15]
    llm = emulated_llm(
        tiny_model(model), dtype="float32", num_blocks=200, max_num_seqs=18, max_model_len=64
    )
    for output, case in zip(search(llm, asked), asked, strict=True):
        assert_same(output.sequences, case)


@pytest.mark.parametrize("where", ["cpu", "emulated"])
def test_texts_are_the_same_where_memory_is_short_and_other_searches_are_aborted(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, where: str
):
    """Beams are preempted, held and computed again; every other search is aborted."""
    model = "gqa_default"
    asked = cases_of(model)[5:9]
    fields: dict[str, Any] = {"num_blocks": 14, "max_model_len": 64, "max_num_seqs": 12}
    fields |= {"block_size": 8, "max_num_batched_tokens": 24}
    if where == "cpu":
        llm = LLM(str(tiny_model(model)), device="cpu", skip_tokenizer_init=True, **fields)
    else:
        llm = emulated_llm(tiny_model(model), **fields)
    engine = llm.engine
    for number, case in enumerate(asked):
        engine.add_request(str(number), case["prompt_ids"], params_of(case))
        engine.add_request(f"aborted {number}", case["prompt_ids"][::-1], params_of(case))
    found: dict[str, list[CompletionOutput]] = {}
    steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            texts: list[CompletionOutput] = []
            for token in output.tokens:
                if token.index == len(texts):
                    texts.append(CompletionOutput(token.index, "", []))
                texts[token.index].token_ids.append(token.token_id)
                texts[token.index].score = token.score
            found[output.request_id] = texts
        steps += 1
        if steps % 8 == 0:
            engine.abort(f"aborted {steps // 8 - 1}")
    assert engine.stats().num_preemptions > 0
    assert_whole(llm)
    for number, case in enumerate(asked):
        assert_same(found[str(number)], case)
