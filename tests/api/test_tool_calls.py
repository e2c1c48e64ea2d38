"""Tool calls found in a model's text: each format, whole and in pieces, and what is none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeTemplate
from hypothesis import example, given
from hypothesis import strategies as st
from serving import Serve

from cuengine.api.tool_calls import CallArguments, CallStart, Piece, Text, ToolCallParser

CHAT = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}

Calls = list[tuple[str, str]]


def _parse(style: Any, pieces: list[str], *, parallel: bool = True) -> tuple[str, Calls]:
    """The content, and (name, arguments) of each call."""
    parser = ToolCallParser(style, ["weather", "time"], parallel=parallel)
    found: list[Piece] = []
    for piece in pieces:
        found += parser.push(piece)
    found += parser.finish()
    calls: list[list[str]] = []
    content = ""
    for item in found:
        match item:
            case Text(text):
                content += text
            case CallStart(index, _, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                calls[index][1] += text
    return content, [(name, arguments) for name, arguments in calls]


ONE = '{"city": "Paris", "note": "a } \\" {"}'
EXPECTED: list[tuple[str, str, str, Calls]] = [
    # format, what the model says, content, calls
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", "  spaced \n", "  spaced \n", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>', "",
     [("weather", ONE)]),
    ("hermes", f'Let me see.\n<tool_call>{{"arguments": {ONE}, "name": "weather"}}</tool_call>',
     "Let me see.", [("weather", ONE)]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}}</tool_call>\n'
               f'<tool_call>{{"name": "weather", "arguments": {ONE}}}</tool_call> done',
     "done", [("time", "{}"), ("weather", ONE)]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {"a": [1, {"b": null}]}}</tool_call>', "",
     [("other", '{"a": [1, {"b": null}]}')]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "id": 5, "arguments": {"a": 1}}', "",
     [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1', "", [("time", '{"a": 1')]),
    ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", "a < b <tool_", "a < b <tool_", []),
    ("hermes", '{"name": "time", "arguments": {}}', '{"name": "time", "arguments": {}}', []),
    ("mistral", "Hello.", "Hello.", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}]', "",
     [("weather", ONE)]),
    ("mistral", f'[TOOL_CALLS][{{"name": "time", "arguments": {{}}}}, '
                f'{{"name": "weather", "arguments": {ONE}, "id": "abcdefghi"}}]', "",
     [("time", "{}"), ("weather", ONE)]),
    ("mistral", f"Well.[TOOL_CALLS]weather[ARGS]{ONE}[TOOL_CALLS]time[ARGS]{{}}", "Well.",
     [("weather", ONE), ("time", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ONE}", "", [("weather", ONE)]),
    ("mistral", f"[TOOL_CALLS]weather{ONE}", "", [("weather", ONE)]),
    ("mistral", "[TOOL_CALLS] are what I make", "[TOOL_CALLS] are what I make", []),
    ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ("llama3_json", "Hello {there}.", "Hello {there}.", []),
    ("llama3_json", f'{{"name": "weather", "parameters": {ONE}}}', "", [("weather", ONE)]),
    ("llama3_json", f'{{"type": "function", "name": "weather", "parameters": {ONE}}}', "",
     [("weather", ONE)]),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ONE}}}; '
                    '{"name": "time", "parameters": {}}', "", [("weather", ONE), ("time", "{}")]),
    ("llama3_json", f'Sure. <|python_tag|>{{"name": "anything", "arguments": {ONE}}}', "Sure.",
     [("anything", ONE)]),
    ("llama3_json", '{"name": "Alice", "parameters": {"age": 7}}',
     '{"name": "Alice", "parameters": {"age": 7}}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"name": "time", "parameters": {}}; and more',
     "; and more", [("time", "{}")]),
    ("llama3_json", '<|python_tag|>weather.call(city="Paris")',
     '<|python_tag|>weather.call(city="Paris")', []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "said", "content", "calls"), EXPECTED)
def test_calls_are_found_whole_and_letter_by_letter(
    style: str, said: str, content: str, calls: Calls
) -> None:
    assert _parse(style, [said]) == (content, calls)
    assert _parse(style, list(said)) == (content, calls)


_FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[", "]", "{", "}",
     '"name"', '"arguments"', ": ", ", ", ";", '"weather"', '{"a": 1}', "null", "\\", '"', " ",
     "\n", "word", "weather", '{"name": "weather", "arguments": {}}', "\u0e44", "<", "1.5"]
)  # fmt: skip


@given(
    style=st.sampled_from(["hermes", "mistral", "llama3_json"]),
    fragments=st.lists(_FRAGMENTS, max_size=12),
    data=st.data(),
)
@example("mistral", ["[TOOL_CALLS]", " ", "[TOOL_CALLS]"], None)
@example("mistral", ["[TOOL_CALLS]", "\n ", '{"name": 3}'], None)
@example("hermes", ["<tool_call>", '{"name": "weather", "arguments": {}}'], None)
def test_however_text_is_cut_the_result_is_the_same_and_no_text_is_lost(
    style: str, fragments: list[str], data: Any
) -> None:
    said = "".join(fragments)
    whole = _parse(style, [said])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=5))) if data else [3, 4, 9]
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert _parse(style, pieces) == whole
    assert _parse(style, list(said)) == whole
    content, calls = whole
    if not calls:
        assert content == said


def test_arguments_flow_while_they_are_written_and_text_is_not_held_back() -> None:
    parser = ToolCallParser("hermes", [], parallel=True)
    assert parser.push("Hi <") == [Text("Hi")]
    assert parser.push("b") == [Text(" <b")]
    assert parser.push('<tool_call>{"name": "f", "arg') == [CallStart(0, *_start(parser))]
    assert parser.push('uments": {"a') == [CallArguments(0, '{"a')]
    assert parser.push('": 1') == [CallArguments(0, '": 1')]
    assert parser.push("}}") == [CallArguments(0, "}")]


def _start(parser: ToolCallParser) -> Any:
    """The id is random: anything is equal to it."""

    class Anything(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    return Anything(), "f"


def test_without_parallel_calls_the_first_one_counts() -> None:
    said = 2 * '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    assert _parse("hermes", [said], parallel=False) == ("", [("time", "{}")])


def test_ids_differ_and_mistrals_have_nine_letters() -> None:
    said = '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]'
    parser = ToolCallParser("mistral", [], parallel=True)
    ids = [piece.id for piece in parser.push(said) if isinstance(piece, CallStart)]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", one) for one in ids)


# --- through the server -------------------------------------------------------------------------

CALL = f'Look: <tool_call>{{"name": "weather", "arguments": {ONE}}}</tool_call>'


async def test_a_whole_answer_with_a_call_has_openais_shape(serve: Serve) -> None:
    served = await serve(FakeEngine(text=CALL, chat_template=FakeTemplate("hermes")))
    _, answer = await served.post(CHAT, ASK)
    (choice,) = answer["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Look:", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": ONE}}
    # What marks a call may be a special token.
    assert served.engine.calls[0].params.skip_special_tokens is False


async def test_content_is_null_where_there_are_only_calls(serve: Serve) -> None:
    text = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    served = await serve(FakeEngine(text=text, chat_template=FakeTemplate("hermes")))
    _, answer = await served.post(CHAT, ASK)
    assert answer["choices"][0]["message"]["content"] is None


async def test_streamed_calls_are_deltas_that_join_to_the_whole(serve: Serve) -> None:
    served = await serve(FakeEngine(text=CALL, chat_template=FakeTemplate("hermes")))
    events = await served.events(CHAT, ASK | {"n": 2})
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        deltas = [call for c in choices for call in c["delta"].get("tool_calls", [])]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "Look:"
        assert deltas[0]["type"] == "function"
        assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
        assert all(set(delta) == {"index", "function"} for delta in deltas[1:])
        assert len(deltas) > 10
        assert "".join(delta["function"]["arguments"] for delta in deltas) == ONE
        assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_call_that_is_cut_off_ends_with_length(serve: Serve) -> None:
    served = await serve(FakeEngine(text=CALL, chat_template=FakeTemplate("hermes")))
    _, answer = await served.post(CHAT, ASK | {"max_tokens": len(CALL) - 20})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert ONE.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
async def test_without_tools_text_stays_text(serve: Serve, fields: dict[str, Any]) -> None:
    served = await serve(FakeEngine(text=CALL, chat_template=FakeTemplate("hermes")))
    _, answer = await served.post(CHAT, ASK | fields)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert served.engine.calls[0].params.skip_special_tokens is True


async def test_logprobs_cover_every_token_of_a_call(serve: Serve) -> None:
    served = await serve(FakeEngine(text=CALL, chat_template=FakeTemplate("hermes")))
    events = await served.events(CHAT, ASK | {"logprobs": True})
    entries = [
        entry
        for event in events
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert "".join(entry["token"] for entry in entries) == CALL


async def test_the_operators_format_wins_over_the_templates(serve: Serve) -> None:
    text = '[TOOL_CALLS][{"name": "time", "arguments": {"a": 1}}]'
    served = await serve(
        FakeEngine(text=text, chat_template=FakeTemplate("hermes")), tool_call_parser="mistral"
    )
    _, answer = await served.post(CHAT, ASK)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


async def test_tools_that_the_template_would_not_show_are_refused(serve: Serve) -> None:
    served = await serve(FakeEngine(chat_template=FakeTemplate(takes_tools=False)))
    status, error = await served.error(CHAT, ASK)
    assert (status, error["param"]) == (400, "tools")
    assert (await served.post(CHAT, ASK | {"tool_choice": "none"}))[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
async def test_what_makes_no_sense_is_400(serve: Serve, fields: dict[str, Any], param: str) -> None:
    served = await serve()
    status, error = await served.error(CHAT, ASK | fields)
    assert (status, error["param"]) == (400, param)
