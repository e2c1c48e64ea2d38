"""Offline generation through LLM, with a tiny chat model: one byte is one token there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuengine import (
    LLM,
    BeamSearchParams,
    ConfigError,
    EngineConfig,
    RequestError,
    SamplingParams,
)


@pytest.fixture(scope="module")
def llm(tiny_chat_model: Path) -> LLM:
    return LLM(str(tiny_chat_model), device="cpu", max_model_len=256)


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields})  # type: ignore[arg-type]


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_params(llm: LLM):
    prompts = ["a long prompt that takes its time", "b", {"prompt_token_ids": [70, 71]}]
    outputs = llm.generate(prompts, [greedy(max_tokens=n) for n in (9, 2, 5)])
    assert [output.prompt for output in outputs] == [*prompts[:2], None]
    assert outputs[1].prompt_token_ids == [ord("b") + 3]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]


def test_text_is_what_the_tokenizer_makes_of_all_tokens_at_once(llm: LLM):
    params = [greedy(seed=seed, temperature=1, max_tokens=60) for seed in range(4)]
    for output in llm.generate(["x"] * 4, params):
        sample = output.outputs[0]
        whole = llm.tokenizer.decode([*output.prompt_token_ids, *sample.token_ids])
        assert sample.text == whole.removeprefix("x")


def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM):
    steps = llm.stats().num_steps
    with pytest.raises(RequestError, match="is not in this model's vocabulary"):
        llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [999]}], greedy())
    with pytest.raises(RequestError, match="A prompt is a string or"):
        llm.generate([7], greedy())  # type: ignore[list-item]
    with pytest.raises(RequestError, match="A prompt is a string or"):
        llm.generate({"prompt_token_ids": "12"}, greedy())  # type: ignore[typeddict-item]
    with pytest.raises(RequestError, match="A prompt is a string or"):
        llm.generate(None, greedy())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="params: SamplingParams, or one for each prompt, not"):
        llm.generate("x", BeamSearchParams(2, 4))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"params: 2 for 1 prompt$"):
        llm.generate("x", [greedy(), greedy()])
    assert not llm.engine.has_unfinished()
    assert llm.stats().num_steps == steps


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    step = llm.engine.step
    steps_left = [3]

    def interrupted() -> object:
        if not steps_left[0]:
            raise KeyboardInterrupt
        steps_left[0] -= 1
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], greedy(max_tokens=50))
    assert not llm.engine.has_unfinished()
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert len(llm.generate("three", greedy())[0].outputs[0].token_ids) == 8


def test_several_conversations_are_answered_in_order(llm: LLM):
    first = [{"role": "user", "content": "one"}]
    second = [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]
    together = llm.chat([first, second], greedy())
    assert [output.outputs[0].token_ids for output in together] == [
        llm.chat(messages, greedy())[0].outputs[0].token_ids for messages in (first, second)
    ]
    assert together[0].prompt == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"


def test_best_of_returns_the_samples_with_the_best_mean_logprob(llm: LLM):
    fields = {"temperature": 1.0, "seed": 5, "logprobs": 0, "max_tokens": 6}
    [every] = llm.generate("x", greedy(n=4, **fields))
    means = [sample.cumulative_logprob or 0 for sample in every.outputs]
    ranking = sorted(range(4), key=lambda i: means[i], reverse=True)
    [best] = llm.generate("x", greedy(n=2, best_of=4, **fields))
    assert [sample.token_ids for sample in best.outputs] == [
        every.outputs[i].token_ids for i in ranking[:2]
    ]
    assert [sample.index for sample in best.outputs] == [0, 1]


def test_higher_priorities_run_first(tiny_chat_model: Path):
    llm = LLM(str(tiny_chat_model), device="cpu", max_model_len=64, max_num_seqs=1)
    order = []
    process = llm._processor.process

    def watched(outputs: list) -> list:  # type: ignore[type-arg]
        deltas = process(outputs)
        order.extend(delta.request_id for delta in deltas if delta.finished)
        return deltas

    llm._processor.process = watched  # type: ignore[method-assign]
    outputs = llm.generate(["a", "b", "c"], greedy(), priority=[2, 0, 1])
    ids = [output.request_id for output in outputs]
    assert order == [ids[1], ids[2], ids[0]]


def test_a_model_without_a_tokenizer_takes_token_ids_only(tiny_chat_model: Path):
    llm = LLM(str(tiny_chat_model), device="cpu", skip_tokenizer_init=True, max_model_len=64)
    [output] = llm.generate({"prompt_token_ids": [5, 6]}, greedy())
    assert output.outputs[0].text == ""
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.generate("text")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, greedy(stop=["x"]))
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat([{"role": "user", "content": "x"}])


def test_unknown_settings_are_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"max_seqs: there is no .*max_num_seqs"):
        LLM("x", max_seqs=3)
    assert EngineConfig().max_num_seqs > 0
