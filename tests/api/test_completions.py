"""/v1/completions: the shapes of a prompt, echo and OpenAI's four lists of logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Serve

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "reached"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
async def test_a_prompt_may_have_four_shapes(
    serve: Serve, prompt: Any, reached: list[list[int]]
) -> None:
    served = await serve(FakeEngine(text="xyz"))
    status, answer = await served.post(URL, {"prompt": prompt, "n": 2})
    assert status == 200
    assert [call.prompt_token_ids for call in served.engine.calls] == reached
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(reached)))
    assert {choice["text"] for choice in answer["choices"]} == {"xyz"}
    assert answer["usage"]["completion_tokens"] == 6 * len(reached)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ("", "prompt"),
        (None, "prompt"),
        (3, "prompt"),
        ({"a": 1}, "prompt"),
        ([[]], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, True]], "prompt[0][1]"),
        ([True], "prompt[0]"),
        ([256], "prompt"),
        ([-1], "prompt"),
        ([10**30], "prompt"),
    ],
)
async def test_any_other_prompt_is_400_and_named(serve: Serve, prompt: Any, param: str) -> None:
    served = await serve()
    status, error = await served.error(URL, {"prompt": prompt})
    assert status == 400
    assert error["param"] == param


async def test_max_tokens_defaults_to_16_as_openai_has_it(serve: Serve) -> None:
    served = await serve(FakeEngine(text="x" * 50))
    _, answer = await served.post(URL, {"prompt": "a"})
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_streamed_prompts_are_told_apart_by_index(serve: Serve) -> None:
    served = await serve(FakeEngine(text="xyz"))
    events = await served.events(
        URL, {"prompt": ["a", "b", "c"], "stream_options": {"include_usage": True}}
    )
    texts = {0: "", 1: "", 2: ""}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "xyz", 1: "xyz", 2: "xyz"}
    assert events[-1]["usage"]["prompt_tokens"] == 3
    assert events[-1]["usage"]["completion_tokens"] == 9


async def test_logprobs_are_four_lists_of_one_length(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    _, answer = await served.post(URL, {"prompt": "p", "logprobs": 1})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, "b": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_streamed_logprobs_join_to_those_of_the_whole_answer(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    body = {"prompt": "pq", "logprobs": 1, "echo": True}
    _, answer = await served.post(URL, body)
    joined: dict[str, list[Any]] = {}
    text = ""
    for event in await served.events(URL, body):
        text += event["choices"][0]["text"]
        for name, values in event["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    assert joined == answer["choices"][0]["logprobs"]
    assert text == answer["choices"][0]["text"] == "pqabc"


async def test_echo_without_new_tokens_scores_the_prompt_only(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    body = {"prompt": "pq", "logprobs": 1, "echo": True, "max_tokens": 0}
    _, answer = await served.post(URL, body)
    (choice,) = answer["choices"]
    assert choice["text"] == "pq"
    assert choice["logprobs"]["tokens"] == ["p", "q"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"q": -1.0, "r": -0.5}]
    assert answer["usage"]["completion_tokens"] == 0
    events = await served.events(URL, body)
    assert "".join(event["choices"][0]["text"] for event in events) == "pq"


async def test_echo_of_token_ids_shows_their_text(serve: Serve) -> None:
    served = await serve(FakeEngine(text="c"))
    _, answer = await served.post(URL, {"prompt": [97, 98], "echo": True})
    assert answer["choices"][0]["text"] == "abc"


async def test_without_tokenizer_token_ids_go_in_and_out(serve: Serve) -> None:
    served = await serve(FakeEngine(text="ab", with_tokenizer=False))
    status, answer = await served.post(
        URL, {"prompt": [1, 2], "logprobs": 0, "return_token_ids": True}
    )
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == [1, 2]
    assert choice["token_ids"] == [97, 98]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    status, error = await served.error(URL, {"prompt": "text"})
    assert status == 400
    assert "token ids" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"n": 1000}, "n"),
        ({"guided_regex": "a*"}, "guided_regex"),
    ],
)
async def test_a_bad_field_is_400_and_named(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    served = await serve()
    status, error = await served.error(URL, {"prompt": "a"} | fields)
    assert status == 400
    assert error["param"] == param


async def test_too_many_sequences_are_refused_before_they_are_tokenized(serve: Serve) -> None:
    served = await serve()
    status, error = await served.error(URL, {"prompt": ["a"] * 100, "n": 100})
    assert status == 400
    assert error["param"] == "prompt"
    assert served.engine.calls == []


async def test_fields_that_would_change_nothing_are_not_refused(serve: Serve) -> None:
    served = await serve()
    body = {"prompt": "a", "suffix": None, "guided_json": None}
    status, _ = await served.post(URL, body)
    assert status == 200
