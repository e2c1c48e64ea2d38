"""The whole engine on the emulated device in float32: every way to run gives the cpu's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cuengine import LLM, SamplingParams
from cuengine.batch import Batch
from cuengine.cli.main import main
from cuengine.device.emulated import host
from cuengine.device.emulated.runtime import REVERSE, SHUFFLED, KernelFault
from cuengine.device.nvrtc import NvrtcError
from cuengine.errors import ConfigError, ModelError
from cuengine.outputs import RequestOutput
from cuengine.swap_space import SwapCosts

TinyModel = Callable[[str], Path]
EmulatedLLM = Callable[..., LLM]

MODEL = "gqa_default"
SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 96,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "num_blocks": 60,
}
MAX_TOKENS = 10
TOLERANCE = 1e-3


@cache
def prompts(folder: Path) -> list[list[int]]:
    """Beginnings of the golden tokens, so that some are prefixes of others: 1 to 43 tokens."""
    with np.load(folder / "reference.npz") as reference:
        ids = reference["input_ids"].tolist()
    return [ids[:length] for length in (1, 9, 17, 24, 30, 43)]


def greedy(**fields: object) -> SamplingParams:
    known = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**{**known, **fields})  # type: ignore[arg-type]


def generate(
    llm: LLM, asked: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params)


def on_cpu(
    folder: Path, asked: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    settings = {**SETTINGS, "num_blocks": 200}
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, **settings)
    return generate(llm, asked, params)


def assert_same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same tokens; their log-probabilities, where there are any, within the tolerance."""
    for request, reference in zip(got, expected, strict=True):
        for ours, theirs in zip(request.outputs, reference.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            for row, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                for token in row.keys() & other.keys():
                    assert abs(row[token].logprob - other[token].logprob) <= TOLERANCE


def exact(outputs: list[RequestOutput]) -> list[object]:
    """Tokens with their log-probabilities to the last bit."""
    return [
        (token_id, {token: entry.logprob for token, entry in row.items()})
        for output in outputs
        for sample in output.outputs
        for token_id, row in zip(sample.token_ids, sample.logprobs or [], strict=True)
    ]


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[host.EmulatedGraph]:
    """Graphs as they are launched from now on."""
    launched: list[host.EmulatedGraph] = []
    launch = host.EmulatedGraph.launch

    def counted(graph: host.EmulatedGraph) -> None:
        launched.append(graph)
        launch(graph)

    monkeypatch.setattr(host.EmulatedGraph, "launch", counted)
    return launched


def watch_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    batches: list[Batch] = []
    run = llm.engine.runner.run

    def watched(batch: Batch, sampling: object) -> object:
        batches.append(batch)
        return run(batch, sampling)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.runner, "run", watched)
    return batches


def test_a_mixed_batch_gives_the_tokens_of_the_cpu_through_graphs_and_eagerly(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six sequences end one after the other: graphs for 6, 4, 2 and 1, with padding in between."""
    folder = tiny_model(MODEL)
    asked = prompts(folder)
    params = [greedy(max_tokens=3 + 2 * index) for index in range(len(asked))]
    expected = on_cpu(folder, asked, params)
    launched = count_launches(monkeypatch)
    assert_same(
        generate(emulated_llm(folder, **SETTINGS, enforce_eager=True), asked, params), expected
    )
    assert not launched
    assert_same(generate(emulated_llm(folder, **SETTINGS), asked, params), expected)
    assert len(set(map(id, launched))) >= 3


@pytest.mark.parametrize(
    "runtime",
    [{"order": REVERSE}, {"order": SHUFFLED, "seed": 5}, {"delayed": True}],
    ids=["warps reversed", "warps shuffled", "as late as allowed"],
)
def test_neither_the_order_of_warps_nor_a_slow_gpu_changes_a_bit(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, runtime: dict[str, object]
) -> None:
    folder = tiny_model(MODEL)
    asked = prompts(folder)[2:5]
    expected = generate(emulated_llm(folder, **SETTINGS), asked, greedy(max_tokens=6))
    got = generate(emulated_llm(folder, runtime=runtime, **SETTINGS), asked, greedy(max_tokens=6))
    assert exact(got) == exact(expected)


def test_samples_that_share_a_prompt_copy_its_last_block_when_they_part(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(MODEL)
    asked, params = [prompts(folder)[3][:-1]], greedy(n=3, temperature=1.0, seed=11)
    llm = emulated_llm(folder, **SETTINGS)
    batches = watch_batches(llm, monkeypatch)
    got = generate(llm, asked, params)
    assert sum(len(batch.block_copies) for batch in batches) == 2
    assert len({tuple(sample.token_ids) for sample in got[0].outputs}) == 3
    assert_same(got, on_cpu(folder, asked, params))


def test_preempted_sequences_go_on_as_they_would_have(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM
) -> None:
    folder = tiny_model(MODEL)
    asked = prompts(folder)[2:5]
    llm = emulated_llm(folder, **{**SETTINGS, "num_blocks": 14, "enable_prefix_caching": False})
    got = generate(llm, asked, greedy(max_tokens=20))
    assert llm.stats().num_preemptions > 0
    assert_same(got, on_cpu(folder, asked, greedy(max_tokens=20)))


@pytest.mark.parametrize("delayed", [False, True])
def test_sequences_swapped_out_to_the_host_and_back_go_on_as_they_would_have(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, delayed: bool
) -> None:
    folder = tiny_model(MODEL)
    asked = prompts(folder)[2:5]
    settings = {**SETTINGS, "num_blocks": 14, "swap_space": 0.001}
    llm = emulated_llm(folder, runtime={"delayed": delayed}, **settings)
    space = llm.engine.scheduler.swap_space
    assert space is not None
    # Tiny models are computed faster than they are moved: say otherwise.
    space.costs = SwapCosts(block=1, token=1)
    got = generate(llm, asked, greedy(max_tokens=20))
    assert llm.stats().num_swaps > 0
    assert_same(got, on_cpu(folder, asked, greedy(max_tokens=20)))


def test_blocks_found_in_the_prefix_cache_are_as_good_as_computed_ones(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM
) -> None:
    folder = tiny_model(MODEL)
    llm = emulated_llm(folder, **SETTINGS)
    asked = [prompts(folder)[5]]
    expected = on_cpu(folder, asked, greedy())
    assert_same(generate(llm, asked, greedy()), expected)
    again = generate(llm, asked, greedy())
    assert again[0].num_cached_tokens == 40
    assert_same(again, expected)


@pytest.mark.parametrize("tokens", [7, 13])
@pytest.mark.parametrize("block_size", [16, 32])
def test_prompts_cut_into_chunks_give_the_same_tokens(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, tokens: int, block_size: int
) -> None:
    """Chunks of 7 go through the decode kernel, those of 13 through prefill."""
    folder = tiny_model(MODEL)
    asked = prompts(folder)[3:]
    settings = {**SETTINGS, "block_size": block_size, "max_num_batched_tokens": tokens}
    got = generate(emulated_llm(folder, **settings), asked, greedy(max_tokens=4))
    assert_same(got, on_cpu(folder, asked, greedy(max_tokens=4)))


def test_every_way_to_sample_draws_the_tokens_of_the_cpu(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM
) -> None:
    folder = tiny_model(MODEL)
    params = [
        greedy(temperature=0.8, seed=1, top_k=20),
        greedy(temperature=1.2, seed=2, top_p=0.8, logprobs=None),
        greedy(temperature=1.0, seed=3, min_p=0.1, repetition_penalty=1.3),
        greedy(presence_penalty=0.7, frequency_penalty=0.4),
        greedy(logit_bias={7: 4.0, 9: -100.0}, logprobs=4),
        greedy(temperature=0.5, seed=4, min_tokens=5, ignore_eos=False, stop_token_ids=[11]),
    ]
    got = generate(emulated_llm(folder, **SETTINGS), prompts(folder), params)
    assert_same(got, on_cpu(folder, prompts(folder), params))


def test_log_probabilities_of_prompts_come_in_parts_of_many_rows(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(MODEL)
    asked, params = prompts(folder)[2:4], greedy(prompt_logprobs=1, max_tokens=4)
    expected = on_cpu(folder, asked, params)
    monkeypatch.setattr("cuengine.model_runner.LOGITS_ROWS", 5)
    got = generate(emulated_llm(folder, **SETTINGS), asked, params)
    assert_same(got, expected)
    for request, reference in zip(got, expected, strict=True):
        for row, other in zip(
            request.prompt_logprobs or [], reference.prompt_logprobs or [], strict=True
        ):
            if row is not None and other is not None:
                assert row.keys() == other.keys()
                for token, entry in row.items():
                    assert abs(entry.logprob - other[token].logprob) <= TOLERANCE


def test_long_contexts_are_split_over_many_blocks_of_threads(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama3_rope")
    asked = [[token % 250 + 3 for token in range(7, 7 + 530)]]
    settings = {**SETTINGS, "max_model_len": 600, "num_blocks": 80, "max_num_batched_tokens": 96}
    llm = emulated_llm(folder, **settings, enforce_eager=True)
    splits = []
    attention = llm.engine.runner.model.device._attention  # type: ignore[attr-defined]
    plan = attention.plan

    def watched(batch: Batch) -> object:
        planned = plan(batch)
        splits.append(planned.splits)
        return planned

    monkeypatch.setattr(attention, "plan", watched)
    got = generate(llm, asked, greedy(max_tokens=3))
    assert max(splits) == 2
    cpu = LLM(str(folder), device="cpu", skip_tokenizer_init=True, **settings)
    expected = generate(cpu, asked, greedy(max_tokens=3))
    assert_same(got, expected)
    assert_same(generate(emulated_llm(folder, **settings), asked, greedy(max_tokens=3)), expected)


def test_a_wrong_block_in_a_table_is_found_by_the_emulator(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: the table on the device names a block that the guard was not told of."""
    folder = tiny_model(MODEL)
    llm = emulated_llm(folder, **SETTINGS)
    runtime = llm.engine.runner.model.device.runtime  # type: ignore[attr-defined]
    guard = runtime.guard

    def another_block(cache: object, tables: object, block_tables: object, *rest: object) -> None:
        guard(cache, tables, np.where(block_tables == 0, 20, block_tables), *rest)  # type: ignore[call-overload]

    monkeypatch.setattr(runtime, "guard", another_block)
    with pytest.raises((KernelFault, ValueError), match=r"not the kernel's|slot_mapping"):
        generate(llm, [[5, 6, 7]], greedy())


def test_an_entry_of_the_next_row_of_the_block_tables_is_found_by_the_emulator(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are as long as the longest sequence needs: what follows is another sequence's block."""
    llm = emulated_llm(tiny_model(MODEL), **SETTINGS)
    attention = llm.engine.runner.model.device._attention  # type: ignore[attr-defined]
    launch = attention.launch

    def one_too_few(*arguments: object, table_width: int, **rest: object) -> None:
        launch(*arguments, table_width=table_width - 1, **rest)

    monkeypatch.setattr(attention, "launch", one_too_few)
    with pytest.raises(KernelFault, match="not the kernel's"):
        generate(llm, [[5, 6, 7], [8, 9, 10]], greedy())


def test_kernels_that_were_built_ahead_serve_without_nvrtc(
    tiny_model: TinyModel,
    emulated_llm: EmulatedLLM,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out = tmp_path / "kernels"
    wanted = ["--head-dim", "16", "--dtype", "float32", "--cuda", "12"]
    assert main(["compile", "--arch", "sm_80", *wanted, "--out", str(out)]) == 0

    def missing(major: int | None = None) -> None:
        raise NvrtcError("no NVRTC here")

    monkeypatch.setattr("cuengine.device.kernel_cache.find_nvrtc", missing)
    monkeypatch.setattr("cuengine.device.kernel_cache.cache_dir", lambda: tmp_path / "empty")
    monkeypatch.setenv("CUENGINE_KERNELS", str(out))
    folder = tiny_model(MODEL)
    expected = on_cpu(folder, [[5, 6, 7]], greedy())
    assert_same(generate(emulated_llm(folder, **SETTINGS), [[5, 6, 7]], greedy()), expected)
    monkeypatch.delenv("CUENGINE_KERNELS")
    with pytest.raises(NvrtcError, match="no NVRTC here"):
        emulated_llm(folder, **SETTINGS)


def test_logits_that_are_not_numbers_are_an_error_and_the_next_request_is_served(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM
) -> None:
    folder = tiny_model(MODEL)
    llm = emulated_llm(folder, **SETTINGS)
    model = llm.engine.runner.model  # type: ignore[attr-defined]
    head = model.weights.lm_head
    broken = model.device.download(head)
    broken[7, 0] = np.nan
    model.weights.lm_head = model.device.upload_matrix(broken)
    with pytest.raises(ModelError, match="not numbers"):
        generate(llm, [[5, 6, 7]], greedy(max_tokens=1))
    model.weights.lm_head = head
    assert_same(
        generate(llm, [[5, 6, 7]], greedy(max_tokens=1)),
        on_cpu(folder, [[5, 6, 7]], greedy(max_tokens=1)),
    )


BLOCK_BYTES = 2 * 3 * 2 * 16 * 8 * 4
"""K and V, layers, KV heads, head_dim, block_size, float32."""


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_kv_cache_gets_what_the_share_of_memory_leaves(
    tiny_model: TinyModel, emulated_llm: EmulatedLLM, share: float
) -> None:
    total = 12 * 2**20
    settings = {**SETTINGS, "num_blocks": None, "max_num_seqs": 64, "max_model_len": 500}
    llm = emulated_llm(
        tiny_model(MODEL),
        runtime={"memory_bytes": total},
        gpu_memory_utilization=share,
        **settings,
    )
    free, _ = llm.engine.runner.model.device.runtime.memory_info()  # type: ignore[attr-defined]
    # One block more than were asked for pads decode steps.
    assert 0 <= total * share + BLOCK_BYTES - (total - free) < 2 * BLOCK_BYTES
    before = free
    generate(llm, prompts(tiny_model(MODEL)), greedy())
    free, _ = llm.engine.runner.model.device.runtime.memory_info()  # type: ignore[attr-defined]
    assert before - free < 0.01 * total, "steps take memory that was not measured"


@pytest.mark.parametrize(
    ("memory", "fields", "message"),
    [
        (2**18, {}, r"its weights need .* are free on emulated"),
        (
            2**20,
            {"max_num_batched_tokens": 4096},
            r"The largest step does not fit .* Lower max_num_batched_tokens and max_num_seqs",
        ),
        (
            4 * 2**20,
            {"max_model_len": 512, "gpu_memory_utilization": 0.25},
            r"max_model_len=512 needs 64 KV blocks .* Ask for at most .* above 0.25",
        ),
        (4 * 2**20, {"num_blocks": 10_000}, r"The KV cache does not fit .* Lower num_blocks"),
    ],
)
def test_what_does_not_fit_is_refused_at_start_up_with_what_to_change(
    tiny_model: TinyModel,
    emulated_llm: EmulatedLLM,
    memory: int,
    fields: dict[str, object],
    message: str,
) -> None:
    settings = {**SETTINGS, "num_blocks": None, **fields}
    with pytest.raises((ModelError, ConfigError), match=message):
        emulated_llm(tiny_model(MODEL), runtime={"memory_bytes": memory}, **settings)
