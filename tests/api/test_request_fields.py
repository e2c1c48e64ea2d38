"""Every field of every route: types, null, ranges, nesting, and what no route knows."""

from __future__ import annotations

import itertools
import json
import logging
import re
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine
from serving import Serve

from cuengine.api.protocol import MEANT_IF_EMPTY, Body
from cuengine.api.routes import ROUTES

HI = {"messages": [{"role": "user", "content": "hi"}]}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
BODIES: dict[str, type[Body]] = {route.path: route.body for route in ROUTES if route.body}
CANDIDATES: tuple[Any, ...] = ({"a": {"b": 1}}, [{"a": 1}], "text", 5, True, 1.5)


def _wrong_value(kind: Any) -> Any:
    """One that is not of the type `kind`; a number where everything would be taken."""
    for value in CANDIDATES:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return value
    return 5


def test_every_route_with_a_body_is_tested_here() -> None:
    assert set(GOOD) == set(BODIES)


@pytest.mark.parametrize("path", GOOD)
async def test_a_field_of_the_wrong_type_is_400_and_named(serve: Serve, path: str) -> None:
    served = await serve()
    for field in msgspec.structs.fields(BODIES[path]):
        wrong = {field.name: _wrong_value(field.type)}
        status, error = await served.error(path, GOOD[path] | wrong)
        assert status == 400, wrong
        assert error["param"].partition("[")[0].partition(".")[0] == field.name
        assert field.name in error["message"]


def _without_ids(answer: Any) -> Any:
    text = re.sub(r"[0-9a-f]{32}", "ID", json.dumps(answer))
    return json.loads(re.sub(r'("created(_at)?": )\d+', r"\1 0", text))


@pytest.mark.parametrize("path", GOOD)
async def test_null_is_the_same_as_leaving_out(serve: Serve, path: str) -> None:
    served = await serve()
    nulls = {
        field.name: None for field in msgspec.structs.fields(BODIES[path]) if not field.required
    }
    _, plain = await served.post(path, GOOD[path])
    status, answer = await served.post(path, nulls | GOOD[path])
    assert status == 200
    assert _without_ids(answer) == _without_ids(plain)


@pytest.mark.parametrize("path", GOOD)
async def test_unknown_fields_are_ignored_and_logged_once(
    serve: Serve, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve()
    with caplog.at_level(logging.WARNING, "cuengine.api"):
        for _ in range(3):
            status, _ = await served.post(path, GOOD[path] | {"frobnicate": {"deep": [1]}})
            assert status == 200
    assert len([r for r in caplog.records if "frobnicate" in r.getMessage()]) == 1


@pytest.mark.parametrize("path", GOOD)
async def test_a_field_that_would_change_the_answer_is_refused_unless_it_says_nothing(
    serve: Serve, path: str
) -> None:
    served = await serve()
    refused = sorted(BODIES[path].refused)
    values = itertools.cycle(("x", 1, True, {"type": "x"}, ["x"]))
    for name, value in zip(refused, values, strict=False):
        status, error = await served.error(path, GOOD[path] | {name: value})
        assert (status, error["param"]) == (400, name)
        assert error["message"] == f"{name} is not supported by this server."
    for nothing in (None, False, [], {}, ""):
        fields = refused if nothing is None else [n for n in refused if n not in MEANT_IF_EMPTY]
        status, answer = await served.post(path, GOOD[path] | dict.fromkeys(fields, nothing))
        assert status == 200, answer


@pytest.mark.parametrize("path", [path for path in GOOD if BODIES[path].refused >= MEANT_IF_EMPTY])
async def test_what_allows_nothing_or_any_json_is_refused_too(serve: Serve, path: str) -> None:
    """An empty list of allowed tokens is no list that was left out."""
    served = await serve()
    for name, empty in itertools.product(sorted(MEANT_IF_EMPTY), ([], {}, "")):
        status, error = await served.error(path, GOOD[path] | {name: empty})
        assert (status, error["param"]) == (400, name)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
async def test_deep_nesting_is_400_wherever_it_is(serve: Serve, path: str, opening: bytes) -> None:
    served = await serve()
    good = json.dumps(GOOD[path]).encode()[:-1]
    names = [next(iter(GOOD[path])), "model", "unknown"]
    for name in names:
        body = good + f', "{name}": '.encode() + opening * (100_000 // len(opening))
        status, error = await served.error(path, body)
        assert status == 400
        assert "nested too deeply" in error["message"]


@pytest.mark.parametrize("path", GOOD)
async def test_half_a_surrogate_pair_is_400_wherever_it_is(serve: Serve, path: str) -> None:
    served = await serve()
    good = json.dumps(GOOD[path])[:-1]
    for text in (', "model": "a\\ud800"}', ', "x\\udfff": 1}', ', "x": ["\\uDBFFx"]}'):
        status, error = await served.error(path, (good + text).encode())
        assert status == 400
        assert "surrogate pair" in error["message"]
    assert (await served.post(path, (good + ', "x": "\\ud83d\\ude00"}').encode()))[0] == 200


def _with_arguments(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            *HI["messages"],
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[" * 100_000, "nested"),
        ('{"a": ' * 50_000, "nested"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": NaN}', "NaN"),
        ("[1]", "JSON object"),
        ("{", "not JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_json_within_a_message_is_held_to_the_same_rules(
    serve: Serve, path: str, arguments: str, says: str
) -> None:
    served = await serve()
    body = _with_arguments(arguments)
    status, error = await served.error(path, body)
    assert status == 400
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert says in error["message"]
    assert (await served.post(path, _with_arguments("{}")))[0] == 200


MALFORMED_TOOLS: list[tuple[Any, str]] = [
    (5, "tools[1]"),
    ("f", "tools[1]"),
    ({}, "tools[1].type"),
    ({"type": "function"}, "tools[1].function"),
    ({"type": "function", "function": "f"}, "tools[1].function"),
    ({"type": "function", "function": {}}, "tools[1].function.name"),
    ({"type": "function", "function": {"name": 5}}, "tools[1].function.name"),
    ({"type": "function", "function": {"name": ""}}, "tools[1].function.name"),
    (
        {"type": "function", "function": {"name": "f", "parameters": "{}"}},
        "tools[1].function.parameters",
    ),
    (
        {"type": "function", "function": {"name": "f", "parameters": [1]}},
        "tools[1].function.parameters",
    ),
    (
        {"type": "function", "function": {"name": "f", "description": 1}},
        "tools[1].function.description",
    ),
    ({"type": "web_search"}, "tools[1].type"),
    ({"name": "f", "parameters": {}}, "tools[1].type"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_malformed_tool_is_400_and_the_entry_is_named(serve: Serve, path: str) -> None:
    served = await serve()
    good = {"type": "function", "function": {"name": "f"}}
    for entry, param in MALFORMED_TOOLS:
        status, error = await served.error(path, HI | {"tools": [good, entry]})
        assert (status, error["param"]) == (400, param)
    assert served.engine.calls == []


OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 101}, "prompt_logprobs"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 4097}, "stop"),
    ({"stop": ["a" * 2048, "b" * 2049]}, "stop"),
    ({"stream_options": {}}, "stream_options"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_a_value_out_of_range_is_400_and_named(serve: Serve, path: str) -> None:
    served = await serve()
    known = {field.name for field in msgspec.structs.fields(BODIES[path])}
    tested = [(fields, param) for fields, param in OUT_OF_RANGE if fields.keys() <= known]
    assert len(tested) > 15
    for fields, param in tested:
        status, error = await served.error(path, GOOD[path] | fields)
        assert (status, error["param"]) == (400, param)
    assert served.engine.calls == []


async def test_stop_strings_up_to_the_stated_limits_are_taken(serve: Serve) -> None:
    served = await serve()
    for stop in (["abc"] * 64, "a" * 4096, ["a" * 2048, "b" * 2048], []):
        assert (await served.post("/v1/completions", {"prompt": "a", "stop": stop}))[0] == 200
    _, error = await served.error("/v1/completions", {"prompt": "a", "stop": ["ab"] * 70})
    assert "70 strings of 140 characters" in error["message"]
    assert "at most 64 strings of 4096 characters" in error["message"]


async def test_no_new_tokens_are_refused_with_when_they_are_allowed(serve: Serve) -> None:
    served = await serve(FakeEngine(text="abc"))
    _, error = await served.error("/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert "with echo: true" in error["message"]
    body = {"prompt": "a", "max_tokens": 0, "echo": True}
    assert (await served.post("/v1/completions", body))[0] == 200


async def test_n_is_limited_as_the_operator_says(serve: Serve) -> None:
    served = await serve(max_n=2)
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert (await served.post(path, GOOD[path] | {"n": 2}))[0] == 200
        status, error = await served.error(path, GOOD[path] | {"n": 3})
        assert (status, error["param"]) == (400, "n")
        assert "limit of 2" in error["message"]
