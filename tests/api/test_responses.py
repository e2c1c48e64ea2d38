"""/v1/responses: plain text, whole and streamed; everything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Serve, Served

URL = "/v1/responses"


async def _events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each event, whose `event:` line must name its type."""
    status, text = await served.post(URL, body | {"stream": True})
    assert status == 200, text
    events = []
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_whole_response_has_openais_shape(serve: Serve) -> None:
    served = await serve(FakeEngine(text="Good day"))
    status, answer = await served.post(
        URL, {"input": "hi", "metadata": {"a": "b"}, "temperature": 0.5, "user": "me"}
    )
    assert status == 200
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    (part,) = item["content"]
    assert part == {"type": "output_text", "text": "Good day", "annotations": [], "logprobs": []}
    assert answer["usage"] == {
        "input_tokens": 19,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 27,
    }
    assert (answer["temperature"], answer["metadata"], answer["user"]) == (0.5, {"a": "b"}, "me")
    assert answer["store"] is False


async def test_instructions_and_messages_reach_the_template(serve: Serve) -> None:
    served = await serve()
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "two", "annotations": []}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "three"}]},
    ]  # fmt: skip
    status, _ = await served.post(URL, {"input": items, "instructions": "be brief"})
    assert status == 200
    prompt = bytes(served.engine.calls[0].prompt_token_ids).decode()
    assert prompt == "<system>be brief<user>one<assistant>two<system>three<assistant>"


async def test_an_answer_that_is_cut_off_is_incomplete(serve: Serve) -> None:
    served = await serve(FakeEngine(text="Good day"))
    body = {"input": "hi", "max_output_tokens": 4}
    _, answer = await served.post(URL, body)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == "Good"
    events = await _events(served, body)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["status"] == "incomplete"


async def test_a_stream_opens_tells_and_closes_in_openais_order(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    events = await _events(served, {"input": "hi"})
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert deltas == ["a", "b", "c"]
    assert events[7]["text"] == "abc"
    _, whole = await served.post(URL, {"input": "hi"})
    final = events[-1]["response"]
    assert final["output"][0]["content"] == whole["output"][0]["content"]
    assert final["usage"] == whole["usage"]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


async def test_logprobs_come_where_they_are_included(serve: Serve) -> None:
    served = await serve(FakeEngine(text="ab"))
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, answer = await served.post(URL, body)
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = await _events(served, body)
    streamed = [entry for event in events for entry in event.get("logprobs", [])]
    assert streamed == entries + entries  # once in the deltas, once in the text's end


async def test_an_error_in_mid_stream_is_an_error_event(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc", error=ZeroDivisionError("secret"), error_at=1))
    events = await _events(served, {"input": "hi"})
    assert events[-1]["type"] == "error"
    assert "secret" not in events[-1]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
         "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": "crash"}, "input"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_400_and_named(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    served = await serve()
    status, error = await served.error(URL, {"input": "hi"} | fields)
    assert (status, error["param"]) == (400, param)
    assert served.engine.calls == []
