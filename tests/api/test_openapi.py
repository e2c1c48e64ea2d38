"""/openapi.json describes what is served: the same routes, the same types."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine
from serving import Serve

from cuengine.api.routes import ROUTES

HTTP = ("get", "post")


def _references(value: Any) -> set[str]:
    """All that `$ref` names, anywhere in the document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_references, value.values()))
    if isinstance(value, list):
        return set().union(*map(_references, value))
    return set()


@pytest.fixture
async def document(serve: Serve) -> dict[str, Any]:
    served = await serve()
    status, content = await served.get("/openapi.json")
    assert status == 200
    assert isinstance(content, dict)
    return content


def test_every_route_is_described_and_every_reference_leads_somewhere(
    document: dict[str, Any],
) -> None:
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    assert described == {(route.method.lower(), route.path.replace(":.+", "")) for route in ROUTES}
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert _references(document) <= names
    operations = [op for item in document["paths"].values() for op in item.values()]
    assert len({op["operationId"] for op in operations}) == len(operations)
    assert all(op["summary"] for op in operations)


def test_events_are_never_described_as_one_string(document: dict[str, Any]) -> None:
    contents = {
        (path, method): operation["responses"]["200"].get("content", {})
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    streams = {key: content["text/event-stream"] for key, content in contents.items()
               if "text/event-stream" in content}  # fmt: skip
    assert {("/v1/chat/completions", "post"), ("/dashboard/events", "get")} <= streams.keys()
    assert all(content == {} for content in streams.values())


def test_a_request_body_has_every_field_of_the_type_that_checks_it(
    document: dict[str, Any],
) -> None:
    for route in ROUTES:
        if route.body is None:
            continue
        schema = document["components"]["schemas"][route.body.__name__]
        fields = msgspec.structs.fields(route.body)
        assert set(schema["properties"]) == {field.name for field in fields}
        assert set(schema.get("required", ())) == {field.name for field in fields if field.required}
    prompt = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert len(prompt["anyOf"]) == 4


async def test_answers_fit_what_is_described(serve: Serve, document: dict[str, Any]) -> None:
    served = await serve(FakeEngine(text="ab"))
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "hi"}], "logprobs": True,
            "prompt_logprobs": 1, "return_token_ids": True, "top_logprobs": 1,
        },
        "/v1/completions": {"prompt": "a", "logprobs": 1, "prompt_logprobs": 1},
        "/v1/responses": {"input": "a"},
        "/tokenize": {"prompt": "a", "return_token_strs": True},
        "/detokenize": {"tokens": [97]},
    }  # fmt: skip
    for route in ROUTES:
        if not isinstance(route.answer, type):
            continue
        path = route.path.replace("{model:.+}", "fake-model")
        if route.method == "GET":
            status, answer = await served.get(path)
        else:
            status, answer = await served.post(path, bodies[route.path])
        assert status == 200
        msgspec.convert(answer, route.answer, str_keys=True)
        schema = document["components"]["schemas"][route.answer.__name__]
        assert set(answer) <= set(schema["properties"])
        assert set(schema.get("required", ())) <= set(answer)


async def test_keys_are_described_where_they_are_asked_for(
    serve: Serve, document: dict[str, Any]
) -> None:
    assert "securitySchemes" not in document["components"]
    served = await serve(api_keys=("k",))
    _, content = await served.get("/openapi.json")
    for path, item in content["paths"].items():
        for operation in item.values():
            private = path.startswith("/v1") or path == "/dashboard/events"
            assert ("security" in operation) == private
