"""Steps launched before the last one's tokens are here: the same tokens as without, on tiny models.

That the engine never needs a token early is shown in tests/unit/test_any_requests.py, with a runner
that computes as late as a device may; here the real model, sampler and CPU device take part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from cuengine import LLM, ConfigError, SamplingParams
from cuengine.device.cpu import CpuDevice
from cuengine.loading import layer_weights
from cuengine.swap_space import SwapCosts

TinyModel = Callable[[str], Path]

VOCAB = 256


def make(folder: Path, **fields: object) -> LLM:
    return LLM(str(folder), device="cpu", skip_tokenizer_init=True, block_size=8, **fields)


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """make(), with a device that says its calls return before their work is done."""

    def made(folder: Path, **fields: object) -> LLM:
        monkeypatch.setattr(CpuDevice, "overlaps", True)
        llm = make(folder, **fields)
        monkeypatch.setattr(CpuDevice, "overlaps", False)
        return llm

    return made


@cache
def plain_engine(folder: Path) -> LLM:
    """Room for all, one step after the other."""
    return make(folder, max_model_len=64)


def run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], priority: list[int]
) -> list[object]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, priority=priority)
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return [
        [(sample.token_ids, sample.finish_reason, sample.stop_reason) for sample in output.outputs]
        for output in outputs
    ]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int]:
    prompt = [7] * draw(st.integers(0, 20)) + draw(
        st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20)
    )
    max_tokens = draw(st.integers(1, 16))
    n = draw(st.sampled_from([1, 1, 2, 3]))
    params = SamplingParams(
        n=n,
        best_of=n + 1 if draw(st.booleans()) else None,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([[], [*range(0, VOCAB, 5)]])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 2.0])),
        logit_bias=draw(st.sampled_from([{}, {9: 5.0}])),
    )
    return prompt, params, draw(st.integers(0, 1))


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    work=st.lists(requests(), min_size=2, max_size=10),
    chunk=st.sampled_from([4, 16, 256]),
    prefix_caching=st.booleans(),
    swap_space=st.sampled_from([0.0, 0.01]),
)
def test_overlapped_steps_give_the_tokens_of_steps_one_after_the_other(
    tiny_model: TinyModel,
    overlapping: Callable[..., LLM],
    work: list[tuple[list[int], SamplingParams, int]],
    chunk: int,
    prefix_caching: bool,
    swap_space: float,
):
    folder = tiny_model("gqa_default")
    fields = {
        "max_num_batched_tokens": chunk,
        "enable_prefix_caching": prefix_caching,
        "max_model_len": 64,
    }
    prompts, params, priority = [list(column) for column in zip(*work, strict=True)]
    plain = plain_engine(folder)
    overlapped = overlapping(folder, **fields, num_blocks=12, max_num_seqs=6, swap_space=swap_space)
    assert overlapped.engine.runner.overlaps
    assert not plain.engine.runner.overlaps
    expected = run(plain, prompts, params, priority)
    assert run(overlapped, prompts, params, priority) == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_swapped_out_sequences_go_on_as_if_nothing_had_been(
    tiny_model: TinyModel, overlapping: Callable[..., LLM], overlap: bool, prefix_caching: bool
):
    folder = tiny_model("gqa_default")
    prompts = [[3 + i] * (5 + i) for i in range(12)]
    params = [SamplingParams(seed=i, max_tokens=40, ignore_eos=True) for i in range(12)]
    expected = run(plain_engine(folder), prompts, params, [0] * 12)
    llm = (overlapping if overlap else make)(
        folder,
        enable_prefix_caching=prefix_caching,
        num_blocks=18,
        max_model_len=64,
        swap_space=0.01,
    )
    # Tiny models are computed faster than they are moved: say otherwise.
    space = llm.engine.scheduler.swap_space
    assert space is not None
    space.costs = SwapCosts(block=1, token=1)
    assert run(llm, prompts, params, [0] * 12) == expected
    assert llm.stats().num_swaps > 0
    assert space.pool.num_free == space.pool.num_blocks


@pytest.mark.parametrize("rows", [2, 5])
def test_tokens_of_a_step_sampled_in_several_calls_are_found_by_the_next(
    tiny_model: TinyModel,
    overlapping: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
):
    folder = tiny_model("gqa_default")
    prompts = [[3 + i] * 4 for i in range(7)]
    params = [SamplingParams(seed=i, max_tokens=6, ignore_eos=True) for i in range(7)]
    expected = run(plain_engine(folder), prompts, params, [0] * 7)
    monkeypatch.setattr("cuengine.model_runner.LOGITS_ROWS", rows)
    assert run(overlapping(folder), prompts, params, [0] * 7) == expected


def test_a_swap_space_of_none_and_one_that_cannot_be(tiny_model: TinyModel):
    assert make(tiny_model("gqa_default")).engine.scheduler.swap_space is None
    for value in (-1, "4", True):
        with pytest.raises(ConfigError, match=r"swap_space=.* is not a number of GiB"):
            make(tiny_model("gqa_default"), swap_space=value)


def test_the_weights_that_a_token_meets_are_those_of_the_layers(tiny_model: TinyModel):
    folder = tiny_model("gqa_default")
    model = make(folder).engine.model.config
    assert model is not None
    sizes = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            names = [name for name in file.keys() if "layers" in name]  # noqa: SIM118 (no mapping)
            sizes += [file.get_slice(name).get_shape() for name in names]
    matrices = [rows * columns for rows, columns in (s for s in sizes if len(s) == 2)]
    assert layer_weights(model) == sum(matrices)
