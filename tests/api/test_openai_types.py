"""OpenAI's own client against the server: what it sends is taken, what it gets fits its types.

The engine is a fake one here; tests/e2e has the real model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeTemplate
from openai import AsyncOpenAI, BadRequestError
from serving import Serve

ASK: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
CALL = 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@asynccontextmanager
async def _client(serve: Serve, engine: FakeEngine | None = None) -> AsyncIterator[AsyncOpenAI]:
    served = await serve(engine)
    url = f"{served.server.url}/v1"
    async with AsyncOpenAI(
        base_url=url, api_key="k", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_every_field_of_a_chat_request_is_taken(serve: Serve) -> None:
    async with _client(serve) as client:
        answer = await client.chat.completions.create(
            model="fake-model",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "name": "me", "content": "hi"},
                {"role": "assistant", "content": [{"type": "text", "text": "ho"}]},
                *ASK,
            ],
            max_completion_tokens=5,
            temperature=0.5,
            top_p=0.9,
            n=2,
            stop=["x", "y"],
            seed=7,
            logit_bias={"65": -100},
            presence_penalty=0.1,
            frequency_penalty=0.1,
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "text"},
            modalities=["text"],
            user="me",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            safety_identifier="s",
            prompt_cache_key="c",
            tools=TOOLS,
            tool_choice="auto",
            parallel_tool_calls=False,
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "ignore_eos": True,
                "min_tokens": 1,
                "stop_token_ids": [1],
                "priority": 3,
                "prompt_logprobs": 1,
                "add_generation_prompt": True,
                "continue_final_message": False,
                "chat_template_kwargs": {"thinking": False},
                "return_token_ids": True,
                "cache_salt": "salt",
                "skip_special_tokens": True,
                "include_stop_str_in_output": True,
            },
        )
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content[0].top_logprobs) == 2


async def test_a_tool_call_is_read_and_answered(serve: Serve) -> None:
    engine = FakeEngine(text=CALL, chat_template=FakeTemplate("hermes"))
    async with _client(serve, engine) as client:
        answer = await client.chat.completions.create(model="", messages=ASK, tools=TOOLS)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
        history: Any = [
            *ASK,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        await client.chat.completions.create(model="", messages=history, tools=TOOLS)
        prompt = bytes(engine.calls[1].prompt_token_ids).decode()
        assert prompt.endswith("<tool>sunny<assistant>")


async def test_streamed_tool_calls_are_put_together_by_the_client(serve: Serve) -> None:
    engine = FakeEngine(text=CALL, chat_template=FakeTemplate("hermes"))
    async with (
        _client(serve, engine) as client,
        client.chat.completions.stream(
            model="", messages=ASK, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Look:"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert final.usage is not None
    assert final.usage.completion_tokens == len(CALL)


@pytest.mark.parametrize("prompt", ["text", ["one", "two"], [1, 2], [[1, 2], [3]]])
async def test_completions_take_all_four_kinds_of_prompt(serve: Serve, prompt: Any) -> None:
    async with _client(serve) as client:
        answer = await client.completions.create(
            model="", prompt=prompt, logprobs=2, best_of=1, seed=1, stop="x", user="me"
        )
        assert all(choice.text == "Hello!" for choice in answer.choices)
        echoed = await client.completions.create(model="", prompt=prompt, echo=True)
        assert all(len(choice.text) > len("Hello!") for choice in echoed.choices)
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(model="", prompt=prompt, suffix="x")
        assert caught.value.param == "suffix"


async def test_a_response_is_read_whole_and_streamed(serve: Serve) -> None:
    async with _client(serve) as client:
        first = await client.responses.create(
            model="",
            input="hi",
            instructions="be brief",
            temperature=0.5,
            max_output_tokens=50,
            include=["message.output_text.logprobs"],
            top_logprobs=1,
            text={"format": {"type": "text"}},
            store=False,
            metadata={"a": "b"},
        )
        assert first.output_text == "Hello!"
        assert first.usage is not None
        assert first.usage.output_tokens == 6
        history: Any = [
            {"role": "user", "content": "hi"},
            *(item.model_dump() for item in first.output),
            {"role": "user", "content": "and now?"},
        ]
        async with client.responses.stream(model="", input=history) as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "Hello!"


async def test_an_error_has_its_parts(serve: Serve) -> None:
    async with _client(serve) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="", messages=ASK, tool_choice="required")
        assert caught.value.param == "tool_choice"
        assert caught.value.type == "invalid_request_error"
        assert "needs tools" in str(caught.value)
