"""response_format, structured_outputs, text.format and forced tool calls over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import pytest_asyncio
from fake_engine import FakeEngine, FakeTemplate
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel, Field
from serving import Serve, Served

from cuengine.api.protocol import FunctionDefinition, Tool
from cuengine.api.server import ServerSettings, running_server
from cuengine.api.structured import of_tool_calls
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig
from cuengine.errors import RequestError
from cuengine.structured_outputs import StructuredOutputsParams

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"é": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "日本"]}},
    "required": ["é", "b"],
    "additionalProperties": False,
}
WITH_TOOLS = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}


with_tiny_servers = pytest.mark.asyncio(loop_scope="module")
"""For tests that use `serve_tiny`: its servers run on until the last of them is through."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def serve_tiny(tiny_chat_model: Path) -> AsyncIterator[Callable[..., Any]]:
    """serve_tiny("hermes"): the random model whose tokens are bytes, with a template for tools."""
    running: list[Any] = []
    started: dict[str | None, Served] = {}

    async def start(style: str | None = None) -> Served:
        if style in started:
            return started[style]
        engine = AsyncEngine.from_config(
            EngineConfig(
                model=str(tiny_chat_model),
                device="cpu",
                num_blocks=200,
                chat_template=WITH_TOOLS + (MARKS[style] if style else ""),
            )
        )
        server = running_server(engine, ServerSettings(port=0))
        session = aiohttp.ClientSession()
        running.extend([session, server])
        started[style] = Served(engine, await server.__aenter__(), await session.__aenter__())
        return started[style]

    yield start
    for one in running:
        await one.__aexit__(None, None, None)


def asked(served: Served) -> StructuredOutputsParams | None:
    """What the engine was given last."""
    demand: StructuredOutputsParams | None = served.engine.calls[-1].params.structured_outputs
    return demand


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": SCHEMA, "strict": True, "description": "d"}}},
         StructuredOutputsParams(json=SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         StructuredOutputsParams(json={"type": "object"})),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
         StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}},
         StructuredOutputsParams(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}},
         StructuredOutputsParams(grammar='start: "a"')),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
         StructuredOutputsParams(json_object=True, whitespace_pattern=" ?")),
    ],
)  # fmt: skip
async def test_each_demand_reaches_the_engine(
    serve: Serve, fields: dict[str, Any], expected: StructuredOutputsParams | None
) -> None:
    served = await serve()
    bodies = [(CHAT, HI | fields), (COMPLETIONS, {"prompt": "a"} | fields)]
    if "structured_outputs" in fields:
        bodies.append((RESPONSES, {"input": "a"} | fields))
    for path, body in bodies:
        assert (await served.post(path, body))[0] == 200
        assert asked(served) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True},
         StructuredOutputsParams(json=SCHEMA)),
    ],
)  # fmt: skip
async def test_the_text_format_of_a_response_reaches_the_engine_and_comes_back(
    serve: Serve, wanted: dict[str, Any], expected: StructuredOutputsParams | None
) -> None:
    served = await serve()
    _, answer = await served.post(RESPONSES, {"input": "hi", "text": {"format": wanted}})
    assert asked(served) == expected
    assert answer["text"]["format"] == wanted


async def test_two_demands_at_once_are_refused(serve: Serve) -> None:
    served = await serve()
    two = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    for path, body in ((CHAT, HI | two), (COMPLETIONS, {"prompt": "a"} | two)):
        status, error = await served.error(path, body)
        assert (status, error["param"]) == (400, "response_format")
    body = {"input": "a", "text": {"format": {"type": "json_object"}},
            "structured_outputs": {"regex": "a"}}  # fmt: skip
    assert (await served.error(RESPONSES, body))[1]["param"] == "text.format"


def bad(path: str) -> dict[str, Any]:
    return {"type": "object", "properties": {path: {"type": "strin"}}}


TOOL = {"type": "function", "function": {"name": "f", "parameters": bad("x")}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, HI | {"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": bad("a")}}},
         "response_format.json_schema.schema.properties.a"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": bad("a")}}},
         "response_format.json_schema.schema.properties.a"),
        (COMPLETIONS, {"prompt": ["a", "b"], "structured_outputs": {"json": bad("a")}},
         "structured_outputs.json.properties.a"),
        (RESPONSES, {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "n", "schema": bad("a")}}},
         "text.format.schema.properties.a"),
        (CHAT, HI | {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, HI | {"structured_outputs": {"json": False}}, "structured_outputs.json"),
        (CHAT, HI | {"structured_outputs": {"json": True}}, "structured_outputs.json"),
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": "true"}},
         "structured_outputs.json"),
        (RESPONSES, {"input": "a", "structured_outputs": {"json": {"minimum": 1e300}}},
         "structured_outputs.json.minimum"),
        (CHAT, HI | {"tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
        (CHAT, HI | {"tools": [TOOL | {"function": {"name": "ok"}}, TOOL],
                     "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tools[1].function.parameters"),
        (CHAT, HI | {"tools": [TOOL | {"function": {"name": "ok"}}], "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": bad("a")}}},
         "response_format.json_schema.schema"),
        (CHAT, HI | {"tools": [TOOL | {"function": {"name": "f", "parameters": {
            "properties": {"a": {"multipleOf": 999983}}}}}], "tool_choice": "required"},
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
@with_tiny_servers
async def test_a_bad_demand_is_400_with_its_place(
    serve_tiny: Callable[..., Any], path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    served = await serve_tiny("hermes")
    status, error = await served.error(path, body | {"stream": stream})
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert "\n" not in error["message"] or "regex" in param


OUTGROWS = {"structured_outputs": {"grammar": 'start: /[a-c]{20}/ more\nmore: "x" more'}}


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, HI), (COMPLETIONS, {"prompt": "a", "max_tokens": 300}), (RESPONSES, {"input": "a"})],
)
@with_tiny_servers
async def test_an_answer_that_outgrows_its_grammar_is_an_error_and_no_success(
    serve_tiny: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    served = await serve_tiny()
    status, error = await served.error(path, body | OUTGROWS)
    assert (status, error["type"], error["code"]) == (500, "server_error", "request_failed")
    assert "outgrows the limits" in error["message"]
    async with served.session.post(
        served.server.url.rstrip("/") + path, json=body | OUTGROWS | {"stream": True}
    ) as response:
        stream = await response.text()
    assert response.status == 200  # a beginning had come
    assert "outgrows the limits" in stream
    for success in ('"finish_reason":"', "response.completed", "response.incomplete"):
        assert success not in stream


def test_calls_that_outgrow_their_limits_blame_the_tools() -> None:
    """No line of the grammar that they became is to blame, and the client knows none."""
    tool = Tool("function", FunctionDefinition("f", parameters={"type": "object"}))
    tokenizer = FakeEngine().tokenizer
    assert tokenizer is not None
    demand = of_tool_calls("hermes", [tool], tokenizer, several=True)
    param = "structured_outputs.grammar"
    error = demand.as_sent(RequestError(f"{param}: it outgrows its limits", param=param))
    assert (error.param, str(error)) == ("tools", "tools: it outgrows its limits")


@pytest.mark.parametrize("stream", [False, True])
@with_tiny_servers
async def test_an_answer_in_the_asked_for_format(
    serve_tiny: Callable[..., Any], stream: bool
) -> None:
    served = await serve_tiny()
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    body = HI | {"response_format": wanted, "n": 3, "seed": 1}
    texts = ["", "", ""]
    if stream:
        for event in await served.events(CHAT, body):
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        _, answer = await served.post(CHAT, body)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        value = json.loads(text)
        assert value.keys() == {"é", "b"}
        assert value["é"] <= 99
        assert value["b"] in ("x", "日本")


# --- tool calls -------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Zürich", 'a "b"']}},
        "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "größe"}},
    {"type": "function", "function": {"name": "list", "parameters": {
        "properties": {"items": {"$ref": "#/$defs/items"}}, "required": ["items"],
        "$defs": {"items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        "additionalProperties": False}}},
]  # fmt: skip


def fits(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "weather":
        return value in ({"city": "Zürich"}, {"city": 'a "b"'})
    if name == "größe":
        return bool(value == {})
    return name == "list" and all(item in (True, False) for item in value["items"])


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("style", [None, *MARKS])
@with_tiny_servers
async def test_a_required_call_is_made_and_read(
    serve_tiny: Callable[..., Any], style: str | None
) -> None:
    """Whatever format the model writes; where that is not known, in one of JSON alone."""
    served = await serve_tiny(style)
    body = HI | {"tools": TOOLS, "tool_choice": "required", "n": 8, "seed": 3}
    _, answer = await served.post(CHAT, body)
    names = set()
    for choice in answer["choices"]:
        assert choice["finish_reason"] in ("tool_calls", "length")
        if choice["finish_reason"] == "tool_calls":
            assert choice["message"]["content"] is None
            for name, arguments in calls_of(choice):
                assert fits(name, arguments)
                names.add(name)
    assert len(names) > 1


@pytest.mark.parametrize("style", [None, *MARKS])
@with_tiny_servers
async def test_a_named_function_is_called_once(
    serve_tiny: Callable[..., Any], style: str | None
) -> None:
    served = await serve_tiny(style)
    named = {"type": "function", "function": {"name": "list"}}
    _, answer = await served.post(CHAT, HI | {"tools": TOOLS, "tool_choice": named, "n": 4})
    for choice in answer["choices"]:
        ((name, arguments),) = calls_of(choice)
        assert choice["finish_reason"] == "tool_calls"
        assert name == "list"
        assert fits(name, arguments)


@pytest.mark.parametrize("style", MARKS)
@with_tiny_servers
async def test_one_call_only_where_parallel_calls_are_not_wanted(
    serve_tiny: Callable[..., Any], style: str
) -> None:
    served = await serve_tiny(style)
    body = HI | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    _, answer = await served.post(CHAT, body | {"n": 6, "return_token_ids": True})
    for choice in answer["choices"]:
        assert len(calls_of(choice)) == 1
        assert bytes(t - 3 for t in choice["token_ids"]).count(b'"name"') == 1


@pytest.mark.parametrize("style", MARKS)
@with_tiny_servers
async def test_with_tools_at_hand_an_answer_is_a_call_or_in_the_format(
    serve_tiny: Callable[..., Any], style: str
) -> None:
    served = await serve_tiny(style)
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
    body = HI | {"tools": TOOLS[:1], "response_format": wanted, "n": 16, "seed": 1,
                 "parallel_tool_calls": False}  # fmt: skip
    _, answer = await served.post(CHAT, body)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert {None} < {*contents} <= {None, "1", "2"}
    for choice in answer["choices"]:
        assert choice["finish_reason"] == (
            "tool_calls" if choice["message"]["content"] is None else "stop"
        )


async def test_what_marks_a_call_is_the_models_token_for_it(serve: Serve) -> None:
    class OneToken(FakeEngine):
        def __post_init__(self) -> None:
            super().__post_init__()
            encode = self.tokenizer.encode  # type: ignore[union-attr]
            self.tokenizer.encode = lambda text, **kwargs: (  # type: ignore[union-attr, method-assign]
                [77] if text == "<tool_call>" else encode(text, **kwargs)
            )

    served = await serve(OneToken(chat_template=FakeTemplate("hermes")))
    await served.post(CHAT, HI | {"tools": TOOLS, "tool_choice": "required"})
    demand = asked(served)
    assert demand is not None
    assert re.search(r'<\[77\]> "\\n" .* "\\n" "</tool_call>"', demand.grammar or "")


# --- OpenAI's client --------------------------------------------------------------------------


class Weather(BaseModel):
    city: Literal["Zürich", "Oslo"]
    days: list[int] = Field(max_length=2)


@with_tiny_servers
async def test_openais_client_parses_answers_and_calls(serve_tiny: Callable[..., Any]) -> None:
    served = await serve_tiny("hermes")
    url = str(served.server.url).rstrip("/") + "/v1"
    messages: Any = HI["messages"]
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.parse(
            model="", messages=messages, response_format=Weather, max_tokens=300
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        called = await client.chat.completions.parse(
            model="",
            messages=messages,
            tools=[pydantic_function_tool(Weather)],
            tool_choice={"type": "function", "function": {"name": "Weather"}},
            max_tokens=300,
        )
        (call,) = called.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Weather)
        async with client.chat.completions.stream(
            model="",
            messages=messages,
            tools=[pydantic_function_tool(Weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
        ) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Weather)
        response = await client.responses.parse(
            model="", input="hi", text_format=Weather, max_output_tokens=300
        )
        assert isinstance(response.output_parsed, Weather)
