"""An engine that says what a test tells it to, when the test tells it to.

Run as a script it serves: `python fake_engine.py '{"text": "a b c", "delay": 0.1}'`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuengine.api.server import ServerSettings, run_server
from cuengine.config import EngineConfig
from cuengine.engine_view import EngineView
from cuengine.errors import EngineStoppedError, RequestError
from cuengine.outputs import Logprob, RequestDelta, SequenceDelta, TokenLogprobs
from cuengine.sampling_params import BeamSearchParams, RequestParams, SamplingParams
from cuengine.stats import EngineStats


class FakeTokenizer:
    """One token per UTF-8 byte."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def half_character(self, ids: Sequence[int]) -> tuple[bytes, str]:
        return b"", ""


class FakeTemplate:
    """<role>content for each message; refuses a message that says "refuse", fails on "crash"."""

    def __init__(self, tool_call_format: Any = None, *, takes_tools: bool = True) -> None:
        self.tool_call_format = tool_call_format
        self.takes_tools = takes_tools
        self.kwargs: dict[str, Any] = {}
        self.tools: Sequence[Mapping[str, Any]] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        self.kwargs, self.tools = kwargs, tools
        if messages[-1]["content"] == "refuse":
            raise RequestError("roles must alternate", param="messages")
        if messages[-1]["content"] == "crash":
            raise TypeError("'NoneType' is not iterable")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + "<assistant>" if add_generation_prompt else text


@dataclass
class FakeDefaults:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


@dataclass
class Call:
    """One request as it reached the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    priority: int
    cache_salt: str | None
    finished: bool = False
    aborted: bool = False


@dataclass
class FakeEngine:
    """text      what every sample says, one byte a step
    hold      where set, no step happens until it is released; "first": only the first ones wait
    delay     seconds a step takes
    error     raised instead of the step with the number `error_at`
    figures_of  of several engines, by name
    seen      what a view of it is; None: an empty pool of eight blocks
    context   prompt and output may be so long
    """

    text: str = "Hello!"
    delay: float = 0.0
    error: Exception | None = None
    error_at: int = 0
    context: int = 100_000
    with_tokenizer: bool = True
    calls: list[Call] = field(default_factory=list)
    started: int = 0
    stopped: int = 0
    failed: bool = False
    restarting: bool = False
    num_restarts: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    chat_template: FakeTemplate | None = field(default_factory=FakeTemplate)
    generation_defaults: FakeDefaults = field(default_factory=FakeDefaults)
    figures: EngineStats = field(default_factory=EngineStats)
    figures_of: dict[str, EngineStats] | None = None
    counts: tuple[int, int] | None = None
    seen: EngineView | None = None
    views: int = 0
    viewed: str | None = None

    def __post_init__(self) -> None:
        self.config = EngineConfig(model="fake-model")
        self.max_model_len = self.context
        self.tokenizer = FakeTokenizer() if self.with_tokenizer else None
        self.gate.set()

    async def start(self) -> None:
        self.started += 1

    async def stop(self) -> None:
        self.stopped += 1

    def stats(self) -> EngineStats:
        return self.figures

    def replicas(self) -> dict[str, EngineStats] | None:
        return self.figures_of

    def replica_counts(self) -> tuple[int, int] | None:
        return self.counts

    async def view(self, replica: str | None = None) -> EngineView:
        self.views += 1
        self.viewed = replica
        await self._news()
        if self.stopped:
            raise EngineStoppedError("the engine has stopped")
        return self._idle_view() if self.seen is None else self.seen

    def _idle_view(self) -> EngineView:
        return EngineView(
            time=0.0, block_size=16, ref_counts=bytes(8), cached=bytes(1), running=[], queue=[],
            queued={}, num_host_blocks=0, num_free_host_blocks=0, steps=[], token_budget=512,
            speculative=False, stats=self.figures,
        )  # fmt: skip

    async def _news(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something the engine did makes `condition` true."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(condition)

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: RequestParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        call = Call(request_id, prompt_token_ids, params, priority, cache_salt)
        self.calls.append(call)
        if isinstance(params, BeamSearchParams):
            params = params.sampling_params()
        try:
            await self._news()
            if self.stopped:
                raise EngineStoppedError("the engine has stopped")
            if len(prompt_token_ids) >= self.context:
                raise RequestError(
                    f"the prompt has {len(prompt_token_ids)} tokens, the context is {self.context}",
                    code="context_length_exceeded",
                )
            tokens = list(self.text.encode())
            length = min(len(tokens), params.max_tokens or len(tokens))
            for step in range(length):
                await self.gate.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.error is not None and step == self.error_at:
                    raise self.error
                if self.stopped:
                    raise EngineStoppedError("the engine has stopped")
                call.finished = step == length - 1
                yield self._delta(call, params, tokens[step], first=step == 0)
        finally:
            call.aborted = not call.finished
            await self._news()

    def _delta(
        self, call: Call, params: SamplingParams, token: int, *, first: bool
    ) -> RequestDelta:
        reason = None
        if call.finished:
            reason = "length" if params.max_tokens == len(self.text.encode()) else "stop"
            if params.max_tokens is not None and params.max_tokens < len(self.text.encode()):
                reason = "length"
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = [
                None,
                *(_logprobs(t, params.prompt_logprobs) for t in call.prompt_token_ids[1:]),
            ]
        return RequestDelta(
            call.request_id,
            call.prompt_token_ids,
            [
                SequenceDelta(
                    index,
                    bytes([token]).decode(errors="ignore"),
                    [token],
                    None if params.logprobs is None else [_logprobs(token, params.logprobs)],
                    reason,
                )
                for index in range(params.n)
            ],
            finished=call.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=3 if len(call.prompt_token_ids) > 3 else 0,
        )


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The chosen token is the second most likely; the last alternative is impossible."""
    others = [(token + 1 + i) % 256 for i in range(max(0, count - 1 if count > 1 else count))]
    entries = {token: Logprob(-1.0, rank=2, decoded_token=chr(token))}
    for place, other in enumerate(others):
        value = -0.5 if place == 0 else float("-inf")
        entries[other] = Logprob(value, rank=1 if place == 0 else place + 2)
    return entries


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    settings = ServerSettings(**{"port": 0} | options.pop("settings", {}))
    run_server(FakeEngine(**options), settings)
