"""OpenAI's own Python client against `cuengine serve` with the real SmolLM2."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel, Field

MODEL = "smollm2"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(smollm2_folder: Path) -> Iterator[OpenAI]:
    command = [sys.executable, "-m", "cuengine.cli.main", "serve", str(smollm2_folder)]
    options = ["--port", "0", "--served-model-name", MODEL, "--max-model-len", "1024"]
    server = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    log = ""
    while not (found := re.search(r"Serving \S+ at (http://\S+)", log)):
        line = server.stdout.readline()
        assert line, f"the server ended:\n{log}"
        log += line
    try:
        yield OpenAI(base_url=f"{found[1]}/v1", api_key="unused", max_retries=0, timeout=300)
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_chat_knows_the_capital_of_france(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=30
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_whole_answer_and_ends_with_usage(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": FRANCE,
        "temperature": 0,
        "max_tokens": 30,
    }
    whole = client.chat.completions.create(**options)
    pieces, usage, reasons = [], None, []
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3
    assert reasons == ["stop"]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_golden_prompts_complete_as_transformers_has_them(
    client: OpenAI, golden_smollm2: dict[str, Any]
) -> None:
    for case in golden_smollm2["cases"][:3]:
        answer = client.completions.create(
            model=MODEL,
            prompt=case["prompt_ids"],
            temperature=0,
            max_tokens=12,
            extra_body={"return_token_ids": True},
        )
        extra = answer.choices[0].model_extra
        assert extra is not None
        assert extra["token_ids"] == case["output_ids"][:12]


def test_three_samples_of_one_seed_differ_and_come_again(client: OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=seed,
            temperature=1.0,
            max_tokens=12,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask(7)
    assert len(set(first)) == 3
    assert ask(7) == first
    assert ask(8) != first


def test_a_stop_string_is_left_out_of_the_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6,", temperature=0, max_tokens=30, stop=[" 9", "zzz"]
    )
    assert answer.choices[0].text == " 7, 8,"
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_come_in_the_clients_own_types(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the most likely one.
        assert entry.top_logprobs[0].token == entry.token
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode()
    assert text == answer.choices[0].message.content
    plain = client.completions.create(
        model=MODEL, prompt="The sky is", temperature=0, max_tokens=4, logprobs=2
    )
    lists = plain.choices[0].logprobs
    assert lists is not None
    assert "".join(lists.tokens or []) == plain.choices[0].text
    assert [len(top) for top in lists.top_logprobs or []] == [2, 2, 2, 2]


def test_errors_carry_param_and_code(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=FRANCE)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=FRANCE, tool_choice="required")
    assert unsupported.value.param == "tool_choice"


class City(BaseModel):
    """What OpenAI's client makes a JSON schema of."""

    name: str = Field(max_length=20)
    country: Literal["France", "Italy", "Spain"]
    inhabitants: int = Field(ge=1000, le=100_000_000)
    seasons: list[Literal["spring", "summer"]] = Field(max_length=2)


def test_an_answer_is_parsed_into_a_class(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris in JSON."}],
        response_format=City,
        temperature=0,
        max_completion_tokens=120,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)
    response = client.responses.parse(
        model=MODEL, input="Name a city in JSON.", text_format=City, max_output_tokens=120
    )
    assert isinstance(response.output_parsed, City)


def test_a_stream_that_is_closed_early_leaves_the_server_idle(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count to a thousand."}],
        stream=True,
        max_tokens=900,
    )
    next(iter(stream))
    stream.close()
    url = str(client.base_url).replace("/v1/", "/metrics")
    for _ in range(200):
        text = client.get(url, cast_to=str)
        if "cuengine_requests_running 0.0" in text and "cuengine_kv_blocks_used 0.0" in text:
            return
    raise AssertionError("the request still runs")
