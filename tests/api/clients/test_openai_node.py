"""OpenAI's npm package on Node against the server: what it sends is taken, what it gets it reads.

node/package-lock.json names its version; .ci/run installs it with `npm ci`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeTemplate
from serving import Serve

FOLDER = Path(__file__).parent / "node"
CALL = 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TEXT = "Hello all of you!"
JSON_TEXT = '{"city": "Paris"}'

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs Node: install nodejs"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "openai").is_dir(),
        reason=f"needs the npm package openai: npm ci --prefix {FOLDER}",
    ),
]


async def test_the_npm_package_reads_all_that_it_is_sent(serve: Serve) -> None:
    def tools() -> FakeEngine:
        return FakeEngine(text=CALL, chat_template=FakeTemplate("hermes"))

    engines = {
        "plain": FakeEngine(text=TEXT),
        "tools": tools(),
        "json": FakeEngine(text=JSON_TEXT),
        "keyed": FakeEngine(),
        "busy": FakeEngine(),
        "failing": FakeEngine(text="abc", error=ZeroDivisionError("secret"), error_at=2),
        "endless": FakeEngine(text="x" * 5000, delay=0.001),
    }
    settings: dict[str, Any] = {
        "keyed": {"api_keys": ("k",)},
        "busy": {"max_concurrent_requests": 1},
    }
    served = {name: await serve(e, **settings.get(name, {})) for name, e in engines.items()}
    # One request is being answered there, for as long as the test lasts.
    engines["busy"].gate.clear()
    occupied = asyncio.create_task(served["busy"].post("/v1/completions", {"prompt": "a"}))
    await engines["busy"].until(lambda: len(engines["busy"].calls) == 1)
    urls = {name: one.server.url for name, one in served.items()}
    process = await asyncio.create_subprocess_exec(
        "node", str(FOLDER / "client.mjs"), json.dumps(urls), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    got = json.loads(output)
    engines["busy"].gate.set()
    await occupied
    assert not [
        result for result in got.values() if isinstance(result, dict) and "failed" in result
    ]

    assert got["models"] == ["fake-model"]
    (choice,) = got["whole"]["choices"]
    assert choice["message"]["content"] == "Hello all"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 9
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert got["whole"]["usage"]["completion_tokens"] == 9
    final = got["streamed"]["final"]
    assert "".join(got["streamed"]["pieces"]) == TEXT
    assert final["choices"][0]["message"]["content"] == TEXT
    assert final["choices"][0]["finish_reason"] == "stop"
    assert "".join(got["raw_stream"]) == TEXT
    assert final["usage"]["completion_tokens"] == len(TEXT)

    for name in ("tool_call", "streamed_tool_call"):
        assert got[name]["finish_reason"] == "tool_calls"
        assert got[name]["message"]["content"].strip() == "Look:"
        (call,) = got[name]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert got["ran_tool"]["asked"][0] == {"city": "Paris"}
    results = [m for m in got["ran_tool"]["messages"] if m["role"] == "tool"]
    assert results[0]["content"] == "sunny"
    assert (
        bytes(engines["tools"].calls[-1].prompt_token_ids)
        .decode()
        .endswith("<tool>sunny<assistant>")
    )
    assert json.loads(got["parsed"]) == {"city": "Paris"}
    params: Any = engines["json"].calls[0].params
    assert params.structured_outputs.json["required"] == ["city"]

    assert got["response"]["status"] == "completed"
    assert got["response"]["usage"]["output_tokens"] == len(TEXT)
    streamed = got["streamed_response"]
    assert streamed["text"] == streamed["final"] == got["response"]["text"] == TEXT
    assert streamed["kinds"][0] == "response.created"
    assert streamed["kinds"][-1] == "response.completed"

    errors = got["errors"]
    assert all(error["hasId"] for error in errors.values())
    assert (errors["range"]["kind"], errors["range"]["param"]) == ("BadRequestError", "temperature")
    assert (errors["type"]["kind"], errors["type"]["param"]) == ("BadRequestError", "messages")
    assert (errors["model"]["kind"], errors["model"]["code"]) == (
        "NotFoundError",
        "model_not_found",
    )
    assert (errors["key"]["kind"], errors["key"]["status"]) == ("AuthenticationError", 401)
    assert (errors["busy"]["kind"], errors["busy"]["status"]) == ("RateLimitError", 429)
    broken = got["error_in_stream"]
    assert "".join(broken["texts"]) == "ab"
    assert broken["message"]
    assert "secret" not in broken["message"]

    assert 3 <= got["aborted"] < 1000  # what had arrived is still handed out
    await engines["endless"].until(lambda: engines["endless"].calls[0].aborted)
