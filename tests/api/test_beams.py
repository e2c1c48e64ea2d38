"""Beam search over HTTP: vLLM's fields, the offline engine's texts, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Serve, Served, raw_request

from cuengine.api.server import ServerSettings, running_server
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig
from cuengine.llm import LLM
from cuengine.sampling_params import BeamSearchParams, SamplingParams

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
HI = {"messages": MESSAGES, "prompt": "hi", "use_beam_search": True}


@pytest.fixture
async def tiny(tiny_chat_model: Path) -> AsyncIterator[Served]:
    """The server before the real engine, on a random model whose tokens are bytes."""
    config = EngineConfig(model=str(tiny_chat_model), device="cpu", num_blocks=200, max_num_seqs=16)
    engine = AsyncEngine.from_config(config)
    async with (
        running_server(engine, ServerSettings(port=0)) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Served(engine, server, session)


async def test_the_best_n_of_best_of_beams_are_what_the_offline_engine_finds(
    tiny: Served, tiny_chat_model: Path
) -> None:
    llm = LLM(str(tiny_chat_model), device="cpu", num_blocks=200)
    params = BeamSearchParams(4, 12, length_penalty=0.5, early_stopping="never")
    expected = llm.beam_search(["one", "two and more"], params)
    body = {
        "prompt": ["one", "two and more"], "use_beam_search": True, "best_of": 4, "n": 2,
        "max_tokens": 12, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0,
        "seed": 7, "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 3,
    }  # fmt: skip
    status, answer = await tiny.post(COMPLETIONS, body)
    assert status == 200, answer
    wanted = [found for output in expected for found in output.sequences[:2]]
    assert len(wanted) == len(answer["choices"]) == 4
    for index, (choice, found) in enumerate(zip(answer["choices"], wanted, strict=True)):
        assert choice["index"] == index
        assert choice["token_ids"] == found.token_ids
        assert choice["text"] == found.text
        assert choice["finish_reason"] == found.finish_reason
        logprobs = choice["logprobs"]["token_logprobs"]
        assert sum(logprobs) / len(logprobs) ** 0.5 == pytest.approx(found.score, abs=1e-4)
        names = [f"token_id:{token}" for token in found.token_ids]
        assert choice["logprobs"]["tokens"] == names
        for name, chosen, top in zip(
            names, logprobs, choice["logprobs"]["top_logprobs"], strict=True
        ):
            assert top[name] == chosen
            assert len(top) in (3, 4)
    assert answer["usage"]["completion_tokens"] == sum(len(f.token_ids) for f in wanted)


async def test_chat_finds_what_the_offline_engine_finds(
    tiny: Served, tiny_chat_model: Path
) -> None:
    llm = LLM(str(tiny_chat_model), device="cpu", num_blocks=200)
    assert llm.engine.model.chat_template is not None
    prompt = llm.tokenizer.encode(
        llm.engine.model.chat_template.render(MESSAGES), add_special_tokens=False
    )
    params = BeamSearchParams(3, 10)
    [expected] = llm.beam_search([{"prompt_token_ids": prompt}], params)
    body = {
        "messages": MESSAGES, "use_beam_search": True, "n": 3, "max_completion_tokens": 10,
        "logprobs": True,
    }  # fmt: skip
    status, answer = await tiny.post(CHAT, body)
    assert status == 200, answer
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [found.text for found in expected.sequences]
    for choice, found in zip(answer["choices"], expected.sequences, strict=True):
        assert len(choice["logprobs"]["content"]) == len(found.token_ids)


async def test_chat_takes_best_of_for_samples_too(tiny: Served, tiny_chat_model: Path) -> None:
    llm = LLM(str(tiny_chat_model), device="cpu", num_blocks=200)
    params = SamplingParams(n=2, best_of=5, seed=3, max_tokens=8)
    [expected] = llm.chat(MESSAGES, params)
    body = {"messages": MESSAGES, "n": 2, "best_of": 5, "seed": 3, "max_tokens": 8}
    _, answer = await tiny.post(CHAT, body)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [sample.text for sample in expected.outputs]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stream": True}, "stream", "known only in the end"),
        ({"temperature": 0.5}, "temperature", "cannot be combined"),
        ({"top_p": 0.9}, "top_p", "cannot be combined"),
        ({"top_k": 5}, "top_k", "cannot be combined"),
        ({"min_p": 0.1}, "min_p", "cannot be combined"),
        ({"min_tokens": 3}, "min_tokens", "cannot be combined"),
        ({"presence_penalty": 1}, "presence_penalty", "cannot be combined"),
        ({"frequency_penalty": 1}, "frequency_penalty", "cannot be combined"),
        ({"repetition_penalty": 1.5}, "repetition_penalty", "cannot be combined"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "cannot be combined"),
        ({"stop": ["x"]}, "stop", "cannot be combined"),
        ({"stop_token_ids": [5]}, "stop_token_ids", "cannot be combined"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "cannot be combined"),
        ({"structured_outputs": {"regex": "a*"}}, "structured_outputs", "cannot be combined"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be combined"),
        ({"early_stopping": "always"}, "early_stopping", "always"),
        ({"length_penalty": 11}, "length_penalty", "from -10 to 10"),
        ({"n": 3, "best_of": 2}, "n", "n=3 is more than best_of=2"),
        ({"best_of": 129}, "best_of", "best_of=129 is more than this server's limit of 128"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty", "needs use_beam_sear"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping", "needs use_beam_s"),
        ({"use_beam_search": False, "best_of": 2, "stream": True}, "best_of", "only in the end"),
    ],
)
async def test_what_makes_no_sense_together_is_400_and_named(
    serve: Serve, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    served = await serve()
    status, error = await served.error(path, HI | fields)
    assert status == 400
    assert error["param"] == param
    assert message in error["message"]
    assert served.engine.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 1}, "logprobs"), ({"echo": True, "max_tokens": 0}, "max_tokens")],
)
async def test_a_prompt_is_not_scored_by_beam_search(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    served = await serve()
    status, error = await served.error(COMPLETIONS, HI | fields)
    assert (status, error["param"]) == (400, param)


async def test_values_that_change_nothing_are_taken(serve: Serve) -> None:
    served = await serve()
    body = HI | {
        "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "stop": [], "seed": 1, "n": 2,
        "repetition_penalty": 1.0, "stream": False, "echo": True,
        "response_format": {"type": "text"},
    }  # fmt: skip
    status, answer = await served.post(COMPLETIONS, body)
    assert status == 200, answer
    assert len(answer["choices"]) == 2
    params = served.engine.calls[0].params
    assert (params.beam_width, params.n, params.max_tokens) == (2, 2, 16)
    plain = {"prompt": "a", "length_penalty": 1.0, "early_stopping": False}
    assert (await served.post(COMPLETIONS, plain))[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_more_beams_than_can_run_are_refused_by_the_name_that_was_sent(
    tiny: Served, path: str
) -> None:
    for fields, name in (({"n": 17}, "n"), ({"n": 1, "best_of": 17}, "best_of")):
        status, error = await tiny.error(path, HI | fields | {"max_tokens": 4})
        assert (status, error["param"]) == (400, name)
        assert error["message"].startswith(f"{name}=17 is more than this engine runs at once")


async def test_the_responses_route_does_not_search(serve: Serve) -> None:
    served = await serve()
    status, error = await served.error(RESPONSES, {"input": "hi", "use_beam_search": True})
    assert (status, error["param"]) == (400, "use_beam_search")


async def test_blocks_are_free_after_clients_with_beams_vanish(tiny: Served) -> None:
    body = HI | {"max_tokens": 1500, "ignore_eos": True, "n": 4}
    writers = [(await tiny.raw(raw_request(COMPLETIONS, body)))[1] for _ in range(6)]
    async with asyncio.timeout(60):
        while not (tiny.engine.stats().num_running and tiny.engine.stats().num_waiting):
            await asyncio.sleep(0.001)
    for writer in writers:
        writer.close()
    async with asyncio.timeout(60):
        while tiny.engine.stats().num_used_blocks or tiny.server.in_flight:
            await asyncio.sleep(0.01)
    stats = tiny.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
