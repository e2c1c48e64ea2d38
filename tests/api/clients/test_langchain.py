"""langchain-openai's chat model against the server, on both of OpenAI's interfaces."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, FakeTemplate
from serving import Serve

pytestmark = pytest.mark.accept
langchain_openai = pytest.importorskip(
    "langchain_openai", reason="needs the package langchain-openai"
)

import openai  # noqa: E402
from langchain_core.messages import AIMessage, ToolMessage  # noqa: E402
from pydantic import BaseModel  # noqa: E402

TEXT = "Hello all of you!"
CALL = 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def weather(city: str) -> str:
    """How the weather is in a city."""
    return f"sunny in {city}"


class City(BaseModel):
    """A city."""

    city: str


async def _chat(serve: Serve, engine: FakeEngine, **fields: Any) -> Any:
    served = await serve(engine)
    return langchain_openai.ChatOpenAI(
        base_url=f"{served.server.url}/v1", api_key="k", model="fake-model", max_retries=0, **fields
    )


@pytest.mark.parametrize("responses", [False, True])
async def test_an_answer_and_its_usage_whole_and_streamed(serve: Serve, responses: bool) -> None:
    chat = await _chat(serve, FakeEngine(text=TEXT), use_responses_api=responses, stream_usage=True)
    whole = await chat.ainvoke("hi")
    assert whole.text == TEXT
    assert whole.usage_metadata["output_tokens"] == len(TEXT)
    chunks = [chunk async for chunk in chat.astream("hi")]
    assert len([chunk for chunk in chunks if chunk.text]) == len(TEXT)
    joined = sum(chunks[1:], chunks[0])
    assert joined.text == TEXT
    assert joined.usage_metadata["output_tokens"] == len(TEXT)


async def test_log_probabilities_arrive(serve: Serve) -> None:
    chat = await _chat(serve, FakeEngine(text="abc"), logprobs=True, top_logprobs=2)
    answer = await chat.ainvoke("hi")
    entries = answer.response_metadata["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b", "c"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_a_tool_call_is_parsed_whole_and_streamed_and_answered(serve: Serve) -> None:
    engine = FakeEngine(text=CALL, chat_template=FakeTemplate("hermes"))
    chat = (await _chat(serve, engine)).bind_tools([weather])
    whole = await chat.ainvoke("hi")
    chunks = [chunk async for chunk in chat.astream("hi")]
    for answer in (whole, sum(chunks[1:], chunks[0])):
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    history = ["hi", AIMessage(whole.text, tool_calls=whole.tool_calls)]
    history.append(ToolMessage("sunny", tool_call_id=whole.tool_calls[0]["id"]))
    await chat.ainvoke(history)
    prompt = bytes(engine.calls[-1].prompt_token_ids).decode()
    assert prompt.endswith("<tool>sunny<assistant>")


async def test_a_structured_answer_is_parsed_and_asked_for_by_its_schema(serve: Serve) -> None:
    engine = FakeEngine(text='{"city": "Paris"}')
    chat = (await _chat(serve, engine)).with_structured_output(City, method="json_schema")
    assert await chat.ainvoke("hi") == City(city="Paris")
    params: Any = engine.calls[0].params
    assert params.structured_outputs.json["required"] == ["city"]


async def test_errors_are_those_of_openais_client(serve: Serve) -> None:
    chat = await _chat(serve, FakeEngine())
    with pytest.raises(openai.BadRequestError) as bad:
        await chat.ainvoke("hi", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await chat.ainvoke("hi", model="gpt-4")


async def test_a_stream_that_is_left_is_aborted(serve: Serve) -> None:
    engine = FakeEngine(text="x" * 5000, delay=0.001)
    chat = await _chat(serve, engine)
    stream = chat.astream("hi", max_tokens=5000)
    async for _ in stream:
        break
    await stream.aclose()
    await engine.until(lambda: engine.calls[0].aborted)
