"""The server before the real engine, on a random model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Served, raw_request

from cuengine.api.server import ServerSettings, running_server
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig
from cuengine.llm import LLM
from cuengine.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", num_blocks=200, max_num_seqs=16)


@pytest.fixture
async def served(tiny_chat_model: Path) -> AsyncIterator[Served]:
    engine = AsyncEngine.from_config(_config(tiny_chat_model))
    async with (
        running_server(engine, ServerSettings(port=0, served_model_names=("tiny",))) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Served(engine, server, session)


async def _all_requests_over(served: Served) -> None:
    # Their handlers hear that the clients have gone by themselves, a moment before or after.
    async with asyncio.timeout(60):
        while served.server.in_flight:
            await asyncio.sleep(0.001)


async def _all_blocks_free(served: Served) -> None:
    async with asyncio.timeout(60):
        while True:
            stats = served.engine.stats()
            if stats.num_used_blocks == 0 and stats.num_running == stats.num_waiting == 0:
                return
            await asyncio.sleep(0.01)


async def test_the_server_says_what_the_offline_engine_says(
    served: Served, tiny_chat_model: Path
) -> None:
    prompts = ["one", "two and more", "\u0e44\u0e17\u0e22 \U0001f600"]
    llm = LLM(str(tiny_chat_model), device="cpu", num_blocks=200)
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    _, answer = await served.post(COMPLETIONS, body)
    for choice, output in zip(answer["choices"], expected, strict=True):
        assert choice["text"] == output.outputs[0].text
        assert choice["token_ids"] == output.outputs[0].token_ids
        assert choice["prompt_token_ids"] == output.prompt_token_ids


async def test_the_joined_stream_is_the_whole_answer(served: Served) -> None:
    body = HI | {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 40}
    _, whole = await served.post(CHAT, body)
    texts = {0: "", 1: "", 2: ""}
    for event in await served.events(CHAT, body):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert [choice["message"]["content"] for choice in whole["choices"]] == [*texts.values()]


async def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 30}
    _, answer = await served.post(COMPLETIONS, body)
    text = answer["choices"][0]["text"]
    stop = text[10:13]
    _, answer = await served.post(COMPLETIONS, body | {"stop": stop})
    (choice,) = answer["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_echoed_logprobs_are_those_of_prompt_logprobs(served: Served) -> None:
    body = {"prompt": "abcd", "logprobs": 2, "echo": True, "max_tokens": 0, "prompt_logprobs": 2}
    _, answer = await served.post(COMPLETIONS, body)
    (choice,) = answer["choices"]
    ids = (await served.post("/tokenize", {"prompt": "abcd"}))[1]["tokens"]
    expected = [
        None if entry is None else entry[str(token)]["logprob"]
        for token, entry in zip(ids, choice["prompt_logprobs"], strict=True)
    ]
    assert choice["logprobs"]["token_logprobs"] == expected
    assert expected[0] is None
    assert all(value < 0 for value in expected[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_the_context_is_400_with_openais_code(
    served: Served, stream: bool
) -> None:
    for body in ({"prompt": "x" * 3000}, {"prompt": "x", "max_tokens": 5000}):
        status, error = await served.error(COMPLETIONS, body | {"stream": stream})
        assert status == 400
        assert error["code"] == "context_length_exceeded"
        assert str(served.engine.max_model_len) in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 100}, "n"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
    ],
)
async def test_what_only_the_engine_can_check_is_400_and_named(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    status, error = await served.error(CHAT, HI | fields)
    assert status == 400
    assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_are_free_after_running_and_queued_clients_vanish(
    served: Served, stream: bool
) -> None:
    body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "n": 2, "stream": stream}
    writers = [(await served.raw(raw_request(COMPLETIONS, body)))[1] for _ in range(30)]
    async with asyncio.timeout(60):
        while not (served.engine.stats().num_used_blocks and served.engine.stats().num_waiting):
            await asyncio.sleep(0.001)
    for writer in writers:
        writer.close()
    await _all_blocks_free(served)
    await _all_requests_over(served)


async def test_random_clients_some_of_which_vanish_leave_nothing_behind(served: Served) -> None:
    rng = random.Random(3)

    async def client(number: int) -> None:
        body = {
            "prompt": "x" * rng.randint(1, 60), "max_tokens": rng.randint(1, 30), "seed": number,
            "stream": rng.random() < 0.5, "ignore_eos": True, "n": rng.choice([1, 1, 2]),
        }  # fmt: skip
        if rng.random() < 0.4:
            _, writer = await served.raw(raw_request(COMPLETIONS, body))
            await asyncio.sleep(rng.random() * 0.1)
            writer.close()
            return
        status, answer = await served.post(COMPLETIONS, body)
        assert status == 200
        if not body["stream"]:
            usage = answer["usage"]
            assert usage["completion_tokens"] == body["max_tokens"] * body["n"]
        else:
            assert answer.endswith("data: [DONE]\n\n")
            assert "error" not in json.loads(answer.split("\n\n")[0].removeprefix("data: "))

    for _ in range(4):
        await asyncio.gather(*(client(rng.getrandbits(30)) for _ in range(15)))
    await _all_blocks_free(served)


async def test_tokenizing_a_long_text_lets_the_event_loop_run(served: Served) -> None:
    tokenizer = served.engine.tokenizer
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    def encode() -> int:
        before = turns
        assert len(tokenizer.encode("wörd " * 200_000)) == 1_200_000
        return turns - before

    counting = asyncio.create_task(count_turns())
    assert await asyncio.to_thread(encode) > 20
    counting.cancel()


async def test_metrics_follow_the_engine(served: Served) -> None:
    for _ in range(2):
        await served.post(COMPLETIONS, {"prompt": "x" * 100, "max_tokens": 5, "ignore_eos": True})
    _, text = await served.get("/metrics")
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert float(figures["cuengine_generation_tokens_total"]) == 10
    # 100 bytes are six whole blocks of 16, found by the second request.
    assert float(figures["cuengine_prefix_cache_hits_total"]) == 96
