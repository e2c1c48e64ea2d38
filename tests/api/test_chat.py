"""/v1/chat/completions: what reaches the engine, and what becomes of its deltas."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeDefaults, FakeEngine
from serving import Serve

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_whole_answer_has_text_usage_and_finish_reason(serve: Serve) -> None:
    served = await serve(FakeEngine(text="Good day"))
    status, answer = await served.post(CHAT, HI | {"model": "fake-model"})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake-model"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good day", "refusal": None}
    assert choice["finish_reason"] == "stop"
    # "<user>hi<assistant>" at one token a byte
    assert answer["usage"] == {
        "prompt_tokens": 19,
        "completion_tokens": 8,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_a_stream_is_a_role_then_one_chunk_a_step_then_the_reason(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    events = await served.events(CHAT, HI)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:]] == ["a", "b", "c"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, None, "stop"]
    assert all("usage" not in event for event in events)


async def test_steps_that_add_no_text_send_no_chunk(serve: Serve) -> None:
    # Two bytes make the one character: the fake shows neither half, the last step only the end.
    served = await serve(FakeEngine(text="aé"))
    events = await served.events(CHAT, HI)
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert contents == ["", "a", None]


async def test_include_usage_adds_one_last_event_without_choices(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    events = await served.events(CHAT, HI | {"stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events[:-1])


async def test_continuous_usage_counts_up_in_every_chunk(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events(CHAT, HI | {"stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 1, 2, 3, 3]


async def test_n_samples_stream_side_by_side_and_end_each(serve: Serve) -> None:
    served = await serve(FakeEngine(text="xyz"))
    events = await served.events(CHAT, HI | {"n": 3})
    texts = {0: "", 1: "", 2: ""}
    ends = []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "xyz", 1: "xyz", 2: "xyz"}
    assert sorted(ends) == [0, 1, 2]
    _, whole = await served.post(CHAT, HI | {"n": 3})
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 9


async def test_logprobs_have_openais_shape_and_no_infinity(serve: Serve) -> None:
    served = await serve(FakeEngine(text="a"))
    _, answer = await served.post(CHAT, HI | {"logprobs": True, "top_logprobs": 3})
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "a"
    assert entry["bytes"] == [97]
    assert entry["logprob"] == -1.0
    tops = [(top["token"], top["logprob"], top["bytes"]) for top in entry["top_logprobs"]]
    assert tops == [("b", -0.5, [98]), ("a", -1.0, [97]), ("c", -9999.0, [99])]


async def test_the_chosen_token_is_no_top_logprob_unless_it_is_among_the_most_likely(
    serve: Serve,
) -> None:
    served = await serve(FakeEngine(text="a"))
    _, answer = await served.post(CHAT, HI | {"logprobs": True, "top_logprobs": 1})
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["b"]


async def test_streamed_logprobs_cover_every_token(serve: Serve) -> None:
    served = await serve(FakeEngine(text="aé!"))
    events = await served.events(CHAT, HI | {"logprobs": True})
    shown = []
    for event in events:
        logprobs = event["choices"][0]["logprobs"]
        shown += [
            byte for entry in (logprobs or {"content": []})["content"] for byte in entry["bytes"]
        ]
    assert bytes(shown).decode() == "aé!"


async def test_every_parameter_reaches_the_engine(serve: Serve) -> None:
    served = await serve()
    values: dict[str, Any] = {
        "n": 2, "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": 11,
        "stop": ["a", "b"], "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "prompt_logprobs": 1, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    extra = {"max_tokens": 4, "logit_bias": {"17": -3}, "priority": 2, "cache_salt": "s"}
    status, _ = await served.post(CHAT, HI | values | extra)
    assert status == 200
    (call,) = served.engine.calls
    assert {name: getattr(call.params, name) for name in values} == values
    assert call.params.max_tokens == 4
    assert call.params.logit_bias == {17: -3}
    assert (call.priority, call.cache_salt) == (2, "s")


async def test_null_means_the_same_as_leaving_out(serve: Serve) -> None:
    served = await serve()
    names = ("temperature", "n", "stop", "seed", "logit_bias", "tools", "stream", "max_tokens",
             "response_format", "tool_choice", "logprobs", "user")  # fmt: skip
    status, _ = await served.post(CHAT, HI | dict.fromkeys(names))
    assert status == 200
    await served.post(CHAT, HI)
    first, second = served.engine.calls
    assert first.params == second.params


async def test_generation_config_gives_the_defaults_and_the_request_overrides_them(
    serve: Serve,
) -> None:
    defaults = FakeDefaults(temperature=0.6, top_p=0.9, top_k=40, repetition_penalty=1.1)
    served = await serve(FakeEngine(generation_defaults=defaults))
    await served.post(CHAT, HI)
    await served.post(CHAT, HI | {"temperature": 0, "top_p": 1, "top_k": -1})
    first, second = (call.params for call in served.engine.calls)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (
        0.6, 0.9, 40, 1.1,
    )  # fmt: skip
    assert (second.temperature, second.top_p, second.top_k) == (0, 1, -1)


async def test_max_completion_tokens_wins_and_no_limit_means_the_room_left(serve: Serve) -> None:
    served = await serve()
    await served.post(CHAT, HI | {"max_completion_tokens": 3, "max_tokens": 5})
    await served.post(CHAT, HI)
    assert [call.params.max_tokens for call in served.engine.calls] == [3, None]


async def test_a_bad_max_completion_tokens_is_blamed_by_its_own_name(serve: Serve) -> None:
    served = await serve()
    status, error = await served.error(CHAT, HI | {"max_completion_tokens": 0})
    assert status == 400
    assert error["param"] == "max_completion_tokens"
    assert error["message"].startswith("max_completion_tokens=0")


async def test_parts_of_text_are_joined_and_roles_reach_the_template(serve: Serve) -> None:
    served = await serve()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]  # fmt: skip
    status, _ = await served.post(CHAT, {"messages": messages})
    assert status == 200
    prompt = bytes(served.engine.calls[0].prompt_token_ids).decode()
    assert prompt == "<system>be brief<user>one\ntwo<assistant><tool>42<assistant>"


async def test_a_final_message_can_be_continued(serve: Serve) -> None:
    served = await serve()
    messages = [*HI["messages"], {"role": "assistant", "content": "Well,"}]
    await served.post(CHAT, {"messages": messages, "continue_final_message": True})
    prompt = bytes(served.engine.calls[0].prompt_token_ids).decode()
    assert prompt == "<user>hi<assistant>Well,"


async def test_template_arguments_and_tools_reach_the_template(serve: Serve) -> None:
    served = await serve()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = HI | {"chat_template_kwargs": {"thinking": False}, "tools": tools}
    await served.post(CHAT, body)
    assert served.engine.chat_template.kwargs == {"thinking": False}
    assert served.engine.chat_template.tools == tools
    await served.post(CHAT, body | {"tool_choice": "none"})
    assert served.engine.chat_template.tools is None


async def test_token_ids_are_returned_where_asked_for(serve: Serve) -> None:
    served = await serve(FakeEngine(text="ab"))
    _, whole = await served.post(CHAT, HI | {"return_token_ids": True})
    assert bytes(whole["prompt_token_ids"]).decode() == "<user>hi<assistant>"
    assert whole["choices"][0]["token_ids"] == [97, 98]
    events = await served.events(CHAT, HI | {"return_token_ids": True})
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [e["choices"][0].get("token_ids") for e in events] == [None, [97], [98]]


async def test_prompt_logprobs_have_vllms_shape(serve: Serve) -> None:
    served = await serve()
    _, answer = await served.post(CHAT, HI | {"prompt_logprobs": 0})
    entries = answer["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == 19
    assert entries[1] == {"117": {"logprob": -1.0, "rank": 2, "decoded_token": "u"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "crash"}]}, "messages"),
        (HI | {"response_format": {"type": "xml"}}, "response_format.type"),
        (HI | {"tool_choice": "required"}, "tool_choice"),
        (HI | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (HI | {"functions": [{"name": "f"}]}, "functions"),
        (HI | {"guided_json": {"type": "object"}}, "guided_json"),
        (HI | {"top_logprobs": 3}, "top_logprobs"),
        (HI | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (HI | {"logprobs": 3}, "logprobs"),
        (HI | {"temperature": -1}, "temperature"),
        (HI | {"temperature": "hot"}, "temperature"),
        (HI | {"top_p": 0}, "top_p"),
        (HI | {"n": 0}, "n"),
        (HI | {"n": True}, "n"),
        (HI | {"stop": [""]}, "stop"),
        (HI | {"stop": [1]}, "stop[0]"),
        (HI | {"logit_bias": {"x": 1}}, "logit_bias"),
        (HI | {"logit_bias": {"1": 200}}, "logit_bias"),
        (HI | {"seed": 10**30}, "seed"),
        (HI | {"stream_options": {"include_usage": True}}, "stream_options"),
        (HI | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (HI | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (HI | {"add_generation_prompt": True, "continue_final_message": True},
         "continue_final_message"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_400_and_named(serve: Serve, body: dict[str, Any], param: str) -> None:
    served = await serve()
    status, error = await served.error(CHAT, body)
    assert status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert served.engine.calls == []


async def test_a_model_without_chat_template_says_what_to_do(serve: Serve) -> None:
    served = await serve(FakeEngine(chat_template=None))
    status, error = await served.error(CHAT, HI)
    assert status == 400
    assert "--chat-template" in error["message"]
