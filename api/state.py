"""What all handlers of one server share. Made once by create_app; no module has its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from aiohttp import web

from cuengine.api.engine import ServingEngine
from cuengine.api.errors import ApiError
from cuengine.api.limits import Limits
from cuengine.api.metrics import Metrics
from cuengine.api.settings import ServerSettings
from cuengine.api.tracing import Tracing
from cuengine.api.watchers import Watchers

logger = logging.getLogger("cuengine.api")

T = TypeVar("T")

# Tokenizing and templates are pure computation: two threads keep one long prompt from holding up
# the short ones behind it, more would only take time from the engine's thread.
TOKENIZER_THREADS = 2
# What is tokenized, or rendered, within some hundred microseconds.
SHORT_TEXT = 2000
MAX_IGNORED_FIELDS = 200


class ServerState:
    """The engine, the settings, the names it serves under, and what is going on now.

    max_prompt_tokens  the context, or less where the operator says so
    limits       how much work is taken on
    watchers     who looks at the dashboard's only engine, or its first
    tracing      where spans go, if anywhere
    openapi      the description of all routes, set where they are added
    draining     a signal has come: new requests are refused
    in_flight    requests being answered
    """

    def __init__(self, engine: ServingEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model_names = settings.served_model_names or (engine.config.model,)
        self.created = int(time.time())
        self.metrics = Metrics(engine, self.model_names[0])
        self.max_prompt_tokens = min(
            engine.max_model_len, settings.max_prompt_tokens or engine.max_model_len
        )
        self.limits = Limits(settings.max_concurrent_requests, settings.max_queued_requests)
        self.watchers = Watchers(engine, self.metrics, self.model_names[0])
        self._watchers_of: dict[str, Watchers] = {}
        endpoint = settings.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint, self.model_names[0])
        self.openapi: dict[str, Any] = {}
        self.draining = False
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, "cuengine-tokenizer")
        self._ignored_fields: set[str] = set()

    @cached_property
    def longest_text(self) -> int:
        """Bytes that no prompt of max_prompt_tokens can exceed: so many times the longest token.

        Going over the whole vocabulary takes a moment; few texts are so long that they need it.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return 0
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        return longest * self.max_prompt_tokens

    async def off_loop(self, work: Callable[[], T], size: int) -> T:
        """Run `work` on a tokenizer thread, unless that costs more than it saves.

        size  characters or tokens that it goes over. A busy loop lets go of the interpreter every 5
              milliseconds: a short prompt is done long before another thread gets its turn.
        """
        if size <= SHORT_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def start_draining(self) -> None:
        """Take no new requests, and show nothing to watchers any more, who would stay for ever."""
        self.draining = True
        for watchers in (self.watchers, *self._watchers_of.values()):
            watchers.end()

    def watchers_of(self, replica: str | None) -> Watchers:
        """Of one of several engines; None: of the only one, or the first. Else ApiError 404."""
        if replica is None:
            return self.watchers
        names = sorted(self.engine.replicas() or ())
        if replica not in names:
            raise ApiError(
                404,
                f"There is no replica {replica!r}, but: {', '.join(names) or 'none with a name'}.",
                param="replica",
            )
        if replica not in self._watchers_of:
            watched = {name: watchers for name, watchers in self._watchers_of.items() if watchers}
            new = Watchers(self.engine, self.metrics, self.model_names[0], replica)
            self._watchers_of = {**watched, replica: new}
        return self._watchers_of[replica]

    def request_started(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def request_finished(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def check_model(self, name: str | None) -> str:
        """The served name a request asked for, the first where it named none; else ApiError 404."""
        if name is None or name == "":
            return self.model_names[0]
        if name in self.model_names:
            return name
        served = ", ".join(self.model_names)
        raise ApiError(
            404,
            f"The model {name!r} does not exist. This server serves: {served}.",
            param="model",
            code="model_not_found",
        )

    def note_ignored(self, route: str, fields: set[str]) -> None:
        """Log request fields that have no meaning here, each once."""
        # A client that makes names up must not fill the log, nor this set.
        room = MAX_IGNORED_FIELDS - len(self._ignored_fields)
        if room <= 0:
            return
        new = sorted(name for name in fields - self._ignored_fields if len(name) < 100)[:room]
        if new:
            self._ignored_fields.update(new)
            names = ", ".join(map(repr, new))
            logger.warning("%s: fields that mean nothing here: %s", route, names)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


STATE = web.AppKey("state", ServerState)
