"""The real model's greedy tokens, however the work is split: long, so run by `make accept`.

Expected tokens are those of Hugging Face transformers in float32, one prompt at a time.
"""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import pytest

from cuengine import LLM, SamplingParams

pytestmark = pytest.mark.accept

BLOCK_SIZE = 16
BATCH = 24


def outputs(llm: LLM, cases: list[dict[str, Any]]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
    params = [
        SamplingParams(temperature=0, max_tokens=len(case["output_ids"]), ignore_eos=False)
        for case in cases
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def repeated(cases: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return list(islice((case for _ in range(count) for case in cases), count))


@pytest.mark.parametrize(
    ("prefix_caching", "chunk", "batch"), [*product([True, False], [16, 64, 2048], [1, BATCH])]
)
def test_prefix_cache_chunks_and_batching_leave_greedy_tokens_alone(
    smollm2: str, golden_smollm2: dict[str, Any], prefix_caching: bool, chunk: int, batch: int
):
    llm = LLM(
        smollm2,
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=chunk,
        max_num_seqs=batch,
        max_model_len=2048,
    )
    cases = golden_smollm2["cases"] if batch == 1 else repeated(golden_smollm2["cases"], BATCH)
    assert outputs(llm, cases) == [case["output_ids"] for case in cases]


@pytest.mark.parametrize(("prefix_caching", "chunk"), [*product([True, False], [16, 64, 2048])])
def test_preemption_leaves_greedy_tokens_alone(
    smollm2: str, golden_smollm2: dict[str, Any], prefix_caching: bool, chunk: int
):
    cases = repeated(golden_smollm2["cases"], BATCH)
    longest = max(len(case["prompt_ids"]) + len(case["output_ids"]) for case in cases)
    num_blocks = longest // BLOCK_SIZE + 3
    llm = LLM(
        smollm2,
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=chunk,
        max_num_seqs=BATCH,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=num_blocks * BLOCK_SIZE,
    )
    assert outputs(llm, cases) == [case["output_ids"] for case in cases]
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_free_blocks == num_blocks


def test_the_same_greedy_request_four_times_in_a_row_gives_one_answer(
    smollm2: str, golden_smollm2: dict[str, Any]
):
    llm = LLM(smollm2, max_model_len=2048)
    case = golden_smollm2["cases"][-1]
    answers = [outputs(llm, [case])[0] for _ in range(4)]
    assert answers == [case["output_ids"]] * 4
