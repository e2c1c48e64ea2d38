"""Structured outputs through the whole engine, on a random model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_control import Control, idle, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuengine import (
    LLM,
    AsyncEngine,
    EngineConfig,
    EngineStoppedError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from cuengine.device.cpu import CpuDevice
from cuengine.errors import RequestFailedError
from cuengine.speculation import Speculator
from cuengine.structured_outputs import KINDS

EOS, QUOTE = 2, ord('"') + 3
PROMPT = "abc"
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "max_model_len": 320}
SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "structured.py"


@cache
def script() -> Any:
    spec = importlib.util.spec_from_file_location("structured_bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def plain_llm(folder: Path) -> LLM:
    return LLM(str(folder), **SETTINGS)


@pytest.fixture
def llm(tiny_chat_model: Path) -> LLM:
    return plain_llm(tiny_chat_model)


def asking(*, seed: int | None = 1, max_tokens: int = 40, **fields: Any) -> SamplingParams:
    """SamplingParams from its fields and from those of StructuredOutputsParams."""
    wanted = {name: fields.pop(name) for name in KINDS if name in fields}
    demand = StructuredOutputsParams(**wanted) if wanted else None
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=demand, **fields)


def answers(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    count = len(params) if isinstance(params, list) else 1
    outputs = llm.generate([f"{PROMPT} {i}" for i in range(count)], params)
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return outputs


def ends(llm: LLM, params: SamplingParams) -> list[tuple[str, str | None]]:
    return [(sample.text, sample.finish_reason) for sample in answers(llm, params)[0].outputs]


@given(rng=st.randoms(use_true_random=False))
@settings(
    deadline=None,
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_answer_that_finishes_fits_its_schema(llm: LLM, rng: random.Random) -> None:
    schemas = [script().random_schema(rng, depth=2) for _ in range(5)]
    params = [
        # Random bytes seldom end a string or a number: these tokens are made likely.
        asking(json=schema, seed=i, max_tokens=160, logit_bias={QUOTE: 4, EOS: 9})
        for i, schema in enumerate(schemas)
    ]
    finished = 0
    for output, schema in zip(answers(llm, params), schemas, strict=True):
        (sample,) = output.outputs
        assert sample.finish_reason in ("stop", "length")
        if sample.finish_reason == "stop":
            finished += 1
            assert script().problem_with(output, schema) is None
    assert finished >= 2


def test_the_check_of_answers_sees_what_does_not_fit(llm: LLM) -> None:
    output = answers(llm, asking(regex=r"\{\"a\": 1\}"))[0]
    assert output.outputs[0].text == '{"a": 1}'
    assert script().problem_with(output, {"properties": {"a": {"const": 1}}}) is None
    assert script().problem_with(output, {"properties": {"a": {"const": 2}}}) is not None
    output.outputs[0].text = '{"a": 1'
    assert script().problem_with(output, {}) is not None


MIXED: list[SamplingParams] = [
    asking(json={"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"],
                 "additionalProperties": False}),
    asking(temperature=0, max_tokens=12),
    asking(regex="[a-f]{2,9}", n=3, frequency_penalty=1.5),
    asking(choice=["yes", "no", "never"], temperature=0, logprobs=2),
    asking(seed=4, max_tokens=9, presence_penalty=0.5),
    asking(grammar='start: "(" start ")" | "x"', n=2, best_of=3, top_k=5, min_p=0.01),
    asking(regex="(?s).{3,8}", min_tokens=6, ignore_eos=True),
]  # fmt: skip


def compared(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_same_answers_preempted_and_with_overlapping_steps(
    llm: LLM, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    params = [*MIXED, *(asking(regex="[a-z ]{30,40}", seed=i) for i in range(6))]
    expected = compared(answers(llm, params))
    monkeypatch.setattr(CpuDevice, "overlaps", overlaps)
    narrow = LLM(
        str(tiny_chat_model),
        **SETTINGS | {"max_model_len": 64},
        num_blocks=16,
        max_num_seqs=8,
        max_num_batched_tokens=16,
    )
    assert compared(answers(narrow, params)) == expected
    assert narrow.stats().num_preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_same_answers_with_guessed_tokens(
    llm: LLM, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Masks behind guesses; an answer whose grammar is complete before the guesses are used up."""
    monkeypatch.setattr(Speculator, "limit", lambda self, sequence, load: self._num_tokens)
    guesses = {"method": method, "num_speculative_tokens": 4}
    if method == "ngram":
        guesses |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    else:
        guesses |= {"model": str(tiny_chat_model)}
    guessing = LLM(str(tiny_chat_model), **SETTINGS, speculative_config=guesses)
    params = [*MIXED, asking(regex="(ab|cd){4}", seed=3), asking(regex="(abc){5}", temperature=0)]
    assert compared(answers(guessing, params)) == compared(answers(llm, params))
    stats = guessing.stats()
    assert stats.num_accepted_tokens > 10
    if method == "draft_model":
        # It draws under the same masks: only rounding could make it differ from itself.
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens


def test_the_same_answers_alone_as_together(llm: LLM) -> None:
    together = compared(llm.generate([PROMPT] * len(MIXED), MIXED))
    assert [compared(llm.generate(PROMPT, one))[0] for one in MIXED] == together


def test_the_emulated_device_gives_the_cpus_answers(
    llm: LLM, tiny_chat_model: Path, emulated_llm: Callable[..., LLM]
) -> None:
    """Masked rows beside others, with and without penalties, greedy and drawn."""
    emulated = emulated_llm(
        tiny_chat_model,
        skip_tokenizer_init=False,
        dtype="float32",
        block_size=8,
        max_model_len=64,
        max_num_seqs=12,
        num_blocks=60,
    )
    assert compared(answers(emulated, MIXED)) == compared(answers(llm, MIXED))


def test_numpy_alone_gives_the_same_answers_as_numba(
    llm: LLM, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compared(answers(llm, MIXED))
    finder = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr("cuengine.device.cpu.importlib", finder)
    plain = LLM(str(tiny_chat_model), **SETTINGS)
    assert compared(answers(plain, MIXED)) == expected


def test_samples_follow_the_grammar_each_on_its_own(llm: LLM) -> None:
    outputs = answers(llm, asking(regex="[a-f]{3,8}", n=6))[0].outputs
    assert len({sample.text for sample in outputs}) > 3
    assert all(re.fullmatch("[a-f]{3,8}", sample.text) for sample in outputs)
    alone = answers(llm, asking(regex="[a-f]{3,8}"))[0].outputs
    assert alone[0].token_ids == outputs[0].token_ids


def test_a_sample_ends_with_the_last_token_that_its_grammar_allows(llm: LLM) -> None:
    (sample,) = answers(llm, asking(regex="abcd"))[0].outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("abcd", "stop", None)
    assert sample.token_ids == [byte + 3 for byte in b"abcd"]


def test_the_end_token_is_drawn_only_where_the_grammar_may_end(llm: LLM) -> None:
    likely = {EOS: 100}
    (sample,) = answers(llm, asking(regex="(ab)+", logit_bias=likely))[0].outputs
    assert (sample.text, sample.finish_reason) == ("ab", "stop")
    assert sample.token_ids[-1] == EOS


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "stop"), (5, "stop")])
def test_a_whole_answer_is_no_matter_of_length(llm: LLM, max_tokens: int, reason: str) -> None:
    text = "abcd"[:max_tokens]
    assert ends(llm, asking(regex="abcd", max_tokens=max_tokens)) == [(text, reason)]


def test_ignore_eos_goes_on_while_the_grammar_does(llm: LLM) -> None:
    likely = {EOS: 100}
    endless = asking(regex="a*", ignore_eos=True, logit_bias=likely)
    assert ends(llm, endless) == [("a" * 40, "length")]
    bounded = asking(regex="a{0,4}", ignore_eos=True, logit_bias=likely)
    assert ends(llm, bounded) == [("aaaa", "stop")]


def test_min_tokens_never_break_the_grammar(llm: LLM) -> None:
    likely = {EOS: 100}
    params = asking(regex="a{0,4}", min_tokens=3, logit_bias=likely)
    assert ends(llm, params) == [("aaa", "stop")]
    assert ends(llm, asking(regex="ab", min_tokens=20)) == [("ab", "stop")]
    # "a" is token 100, and here one that ends the sample.
    stopping = {"regex": "a|c{9}", "stop_token_ids": [100], "logit_bias": {100: 100}}
    assert ends(llm, asking(**stopping)) == [("", "stop")]
    assert ends(llm, asking(**stopping, min_tokens=5)) == [("c" * 9, "stop")]


def test_a_bias_against_the_only_token_changes_nothing(llm: LLM) -> None:
    params = asking(regex="aaa", logit_bias={ord("a") + 3: -100})
    assert ends(llm, params) == [("aaa", "stop")]


def test_stop_strings_and_stop_tokens_end_an_answer_before_its_grammar(llm: LLM) -> None:
    assert ends(llm, asking(regex="abcdef", stop=["cd"])) == [("ab", "stop")]
    (sample,) = answers(llm, asking(regex="abcdef", stop_token_ids=[ord("d") + 3]))[0].outputs
    assert (sample.text, sample.stop_reason) == ("abc", ord("d") + 3)


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    (sample,) = answers(llm, asking(regex="xyz", logprobs=3))[0].outputs
    assert sample.logprobs is not None
    assert [len(entry) for entry in sample.logprobs] == [
        4 if (entry[token].rank or 0) > 3 else 3
        for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    assert all(max(entry.values(), key=lambda one: one.logprob).rank == 1
               for entry in sample.logprobs)  # fmt: skip


# The random model draws "x" where 20 letters have come, and then what repeats for ever is forced.
OUTGROWS = 'start: /[a-c]{20}/ more\nmore: "x" more'


def test_a_grammar_that_outgrows_its_limits_is_its_samples_error_alone(llm: LLM) -> None:
    failing, fine = answers(llm, [asking(grammar=OUTGROWS, n=2), asking(regex="a{30}")])
    for sample in failing.outputs:
        assert sample.finish_reason == "error"
        assert re.fullmatch("[a-c]{20}.?", sample.text)
        assert "after 21 tokens, " in str(sample.stop_reason)
        assert "outgrows the limits" in str(sample.stop_reason)
    assert [(sample.text, sample.finish_reason) for sample in fine.outputs] == [("a" * 30, "stop")]


def test_a_bad_demand_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().num_steps
    good, bad = asking(regex="a"), asking(json={"properties": {"a": {"type": "strin"}}})
    with pytest.raises(RequestError, match="type 'strin' is none of") as caught:
        answers(llm, [good, bad])
    assert caught.value.param == "structured_outputs.json.properties.a"
    assert llm.stats().num_steps == steps
    with pytest.raises(RequestError, match="is not a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_without_a_tokenizer_there_is_no_grammar(tiny_chat_model: Path) -> None:
    llm = LLM(str(tiny_chat_model), skip_tokenizer_init=True, **SETTINGS)
    with pytest.raises(RequestError, match="need a tokenizer") as caught:
        llm.generate([{"prompt_token_ids": [5]}], asking(regex="a"))
    assert caught.value.param == "structured_outputs"


# --- behind the async interface ---------------------------------------------------------------


@pytest.fixture
async def engine(tiny_chat_model: Path, control: Control) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.from_config(EngineConfig(model=str(tiny_chat_model), **SETTINGS))
    yield engine
    await engine.stop()
    assert engine.num_restarts == 0


class SlowCompiler:
    """Compiling takes until it is released; `started` counts."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.before = control.compiles
        control.set("slow")

    def release(self) -> None:
        self.control.unset("slow")

    @property
    def started(self) -> int:
        return self.control.compiles - self.before


async def text_of(
    engine: AsyncEngine, request_id: str, params: SamplingParams
) -> tuple[str, str | None]:
    text, reason = "", None
    async for delta in engine.generate([100, 101], params, request_id=request_id):
        text += delta.sequences[0].text
        reason = delta.sequences[0].finish_reason
    return text, reason


async def test_other_streams_go_on_while_a_grammar_is_compiled(
    engine: AsyncEngine, control: Control
) -> None:
    slow = SlowCompiler(control)
    waiting = asyncio.create_task(text_of(engine, "slow", asking(regex="abc")))
    await until(lambda: slow.started == 1)
    for i in range(3):
        await text_of(engine, f"other{i}", asking(max_tokens=5))
    assert not waiting.done()
    slow.release()
    assert await waiting == ("abc", "stop")
    await until(lambda: idle(engine))


async def test_a_bad_demand_raises_with_the_first_delta(engine: AsyncEngine) -> None:
    stream = engine.generate([5], asking(regex="("), request_id="r")
    with pytest.raises(RequestError) as caught:
        await anext(stream)
    assert caught.value.param == "structured_outputs.regex"
    assert await text_of(engine, "r", asking(regex="a")) == ("a", "stop")


async def test_a_grammar_that_outgrows_its_limits_fails_its_request_alone(
    engine: AsyncEngine,
) -> None:
    other = asyncio.create_task(text_of(engine, "other", asking(regex="a{30}")))
    with pytest.raises(RequestFailedError, match="outgrows the limits"):
        await text_of(engine, "r", asking(grammar=OUTGROWS, n=2))
    assert await other == ("a" * 30, "stop")
    assert await text_of(engine, "r", asking(regex="a")) == ("a", "stop")
    await until(lambda: idle(engine))


async def test_an_abort_while_the_grammar_is_compiled_ends_the_stream(
    engine: AsyncEngine, control: Control
) -> None:
    slow = SlowCompiler(control)
    waiting = asyncio.create_task(text_of(engine, "r", asking(regex="abc", n=2)))
    await until(lambda: slow.started == 1)
    await engine.abort("r")
    slow.release()
    assert await waiting == ("", "abort")
    assert await text_of(engine, "r", asking(regex="a")) == ("a", "stop")
    await until(lambda: idle(engine))


async def test_a_reader_that_leaves_while_the_grammar_is_compiled_leaves_nothing(
    engine: AsyncEngine, control: Control
) -> None:
    slow = SlowCompiler(control)
    waiting = asyncio.create_task(text_of(engine, "r", asking(regex="abc")))
    await until(lambda: slow.started == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    slow.release()
    assert await text_of(engine, "r", asking(regex="a")) == ("a", "stop")
    await until(lambda: idle(engine))


async def test_draining_waits_for_a_grammar_and_stopping_does_not(
    engine: AsyncEngine, control: Control
) -> None:
    slow = SlowCompiler(control)
    first = asyncio.create_task(text_of(engine, "r", asking(regex="abc")))
    await until(lambda: slow.started == 1)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    await engine.stop()
    slow.release()
    with pytest.raises(EngineStoppedError):
        await first
    await draining


async def test_aborts_in_the_middle_of_answers_leave_the_pool_whole(engine: AsyncEngine) -> None:
    async def one(i: int) -> None:
        params = asking(json_object=True, seed=i, n=1 + i % 3, max_tokens=60)
        stream = engine.generate([100, 101, i], params, request_id=f"r{i}")
        async for _ in stream:
            if random.Random(i).random() < 0.2:
                break
        await stream.aclose()

    await asyncio.gather(*(one(i) for i in range(24)))
    await until(lambda: idle(engine))
    assert not len(engine._roster)
