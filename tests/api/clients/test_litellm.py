"""litellm, as a client of an OpenAI-compatible server, against this one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeTemplate
from serving import Serve, Served

pytestmark = pytest.mark.accept

TEXT = "Hello all of you!"
CALL = 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched when imported
    return pytest.importorskip("litellm", reason="needs the package litellm")


def _at(served: Served, **fields: Any) -> dict[str, Any]:
    url = f"{served.server.url}/v1"
    return {
        "model": "openai/fake-model",
        "api_base": url,
        "api_key": "k",
        "num_retries": 0,
    } | fields


async def test_an_answer_and_its_usage_whole_and_streamed(serve: Serve, litellm: Any) -> None:
    served = await serve(FakeEngine(text=TEXT))
    whole = await litellm.acompletion(**_at(served), messages=HI, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (TEXT, "stop")
    assert whole.usage.completion_tokens == len(TEXT)
    assert len(choice.logprobs.content) == len(TEXT)
    stream = await litellm.acompletion(
        **_at(served), messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [len(TEXT)]
    text = await litellm.atext_completion(
        **_at(served, model="text-completion-openai/fake-model"), prompt="hi", max_tokens=50
    )
    assert text.choices[0].text == TEXT


async def test_a_response_is_read_whole_and_streamed(serve: Serve, litellm: Any) -> None:
    served = await serve(FakeEngine(text=TEXT))
    whole = await litellm.aresponses(**_at(served), input="hi")
    assert whole.output[0].content[0].text == TEXT
    stream = await litellm.aresponses(**_at(served), input="hi", stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert events[-1].type == "response.completed"


async def test_tool_calls_are_parsed_whole_and_streamed(serve: Serve, litellm: Any) -> None:
    served = await serve(FakeEngine(text=CALL, chat_template=FakeTemplate("hermes")))
    asked = _at(served) | {"messages": HI, "tools": TOOLS}
    whole = await litellm.acompletion(**asked)
    stream = await litellm.acompletion(**asked, stream=True)
    joined = litellm.stream_chunk_builder([chunk async for chunk in stream], messages=HI)
    for answer in (whole, joined):
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_a_schema_is_passed_on(serve: Serve, litellm: Any) -> None:
    engine = FakeEngine(text='{"city": "Paris"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    answer = await litellm.acompletion(
        **_at(await serve(engine)), messages=HI, response_format=wanted
    )
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris"}
    params: Any = engine.calls[0].params
    assert params.structured_outputs.json == schema


async def test_errors_become_litellms_own(serve: Serve, litellm: Any) -> None:
    served = await serve(FakeEngine(context=10), api_keys=("k",))
    with pytest.raises(litellm.AuthenticationError):
        await litellm.acompletion(**_at(served, api_key="wrong"), messages=HI)
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**_at(served, model="openai/gpt-4"), messages=HI)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await litellm.acompletion(**_at(served), messages=HI, temperature=-1)
    # Told apart by what the message says.
    long = [{"role": "user", "content": "long " * 20}]
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(**_at(served), messages=long)


async def test_a_stream_that_is_left_is_aborted(serve: Serve, litellm: Any) -> None:
    engine = FakeEngine(text="x" * 5000, delay=0.001)
    stream = await litellm.acompletion(
        **_at(await serve(engine)), messages=HI, stream=True, max_tokens=5000
    )
    async for _ in stream:
        break
    await stream.aclose()
    await engine.until(lambda: engine.calls[0].aborted)
