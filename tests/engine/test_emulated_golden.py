"""The golden tiny models through `LLM(..., device="emulated")`: the kernels that a GPU would run.

The reference is the cpu device in float32, which test_golden_tiny.py holds to float64 formulas and
to transformers; every token of a prompt counts, and a few that are generated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cuengine import LLM, SamplingParams
from cuengine.outputs import RequestOutput

NAMES = (
    "bias",
    "gqa_default",
    "linear_rope",
    "llama3_rope",
    "mha_untied",
    "mqa_headdim",
    "yarn_rope",
)
SETTINGS = {"max_model_len": 128, "max_num_batched_tokens": 40, "max_num_seqs": 4, "num_blocks": 12}
MAX_TOKENS, TOP = 8, 3

TOLERANCE = {"float32": 1e-3, "float16": 2.5e-2, "bfloat16": 2e-1}
"""On log-probabilities of the float32 reference. Weights, activations and cache are rounded to 11
bits of precision or to 8, so one is 8 times the other. Seen at worst over all of these models:
0.017 and 0.18, some 10 units in the last place of logits around 4 after 40 roundings a layer."""

PARAMS = SamplingParams(
    temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
)


def run(llm: LLM, folder: Path) -> RequestOutput:
    with np.load(folder / "reference.npz") as reference:
        token_ids = reference["input_ids"].tolist()
    return llm.generate({"prompt_token_ids": token_ids}, PARAMS)[0]


def on_cpu(folder: Path) -> RequestOutput:
    return run(LLM(str(folder), device="cpu", skip_tokenizer_init=True, **SETTINGS), folder)


def check(got: RequestOutput, expected: RequestOutput, tolerance: float) -> None:
    """Log-probabilities within tolerance, and the most likely token where it stands out."""
    assert got.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    rows = list(zip(got.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True))
    for sample, reference in zip(got.outputs, expected.outputs, strict=True):
        same = 0
        while same < MAX_TOKENS and sample.token_ids[same] == reference.token_ids[same]:
            same += 1
        # The first that differs still has the same tokens before it.
        rows += list(zip(sample.logprobs, reference.logprobs, strict=True))[: same + 1]
    assert len(rows) >= 96
    for row, reference in rows:
        common = row.keys() & reference.keys()
        worst = max(abs(row[token].logprob - reference[token].logprob) for token in common)
        assert worst <= tolerance
        first, second = sorted(reference, key=lambda token: -reference[token].logprob)[:2]
        if reference[first].logprob - reference[second].logprob > 2 * tolerance:
            assert max(row, key=lambda token: row[token].logprob) == first


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_tokens_are_those_of_the_cpu(
    tiny_model: Callable[[str], Path], emulated_llm: Callable[..., LLM], name: str
) -> None:
    folder = tiny_model(name)
    got = run(emulated_llm(folder, dtype="float32", **SETTINGS), folder)
    expected = on_cpu(folder)
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    check(got, expected, TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("name", "dtype", "architecture"),
    [
        ("linear_rope", "bfloat16", 80),
        ("mha_untied", "bfloat16", 90),
        ("bias", "bfloat16", 80),
        ("yarn_rope", "float16", 75),
        ("mqa_headdim", "float16", 80),
    ],
)
def test_in_16_bits_log_probabilities_stay_close_and_clear_tokens_the_same(
    tiny_model: Callable[[str], Path],
    emulated_llm: Callable[..., LLM],
    name: str,
    dtype: str,
    architecture: int,
) -> None:
    """sm_75 runs the plain attention kernels, sm_80 and sm_90 those on tensor cores."""
    folder = tiny_model(name)
    llm = emulated_llm(folder, dtype=dtype, runtime={"architecture": architecture}, **SETTINGS)
    check(run(llm, folder), on_cpu(folder), TOLERANCE[dtype])


def test_the_checkpoints_dtype_is_taken_and_its_references_tokens_come_out(
    tiny_model: Callable[[str], Path], emulated_llm: Callable[..., LLM]
) -> None:
    """Against transformers itself, in a checkpoint of float32."""
    folder = tiny_model("gqa_default")
    llm = emulated_llm(folder, **SETTINGS)
    assert llm.engine.runner.model.device.dtype == "float32"  # type: ignore[attr-defined]
    got = run(llm, folder)
    with np.load(folder / "reference.npz") as reference:
        logits = reference["logits"].astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    assert got.prompt_logprobs is not None
    for row, reference in zip(got.prompt_logprobs[1:], expected, strict=False):
        assert row is not None
        assert max(abs(entry.logprob - reference[token]) for token, entry in row.items()) <= 1e-3
    assert got.outputs[0].token_ids[0] == logits[-1].argmax()
