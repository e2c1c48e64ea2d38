"""Requests from their submission to their last delta, whoever runs them: checks, seeds, text.

Text is made here, where the event loop is: a stop string ends its sample by a message, and what an
engine drew meanwhile is dropped. What each sample has got so far is kept, so that another engine
can go on where one ended. Where the engines are and what becomes of requests when one dies is
decided in async_engine.py, for a process of this machine, and in ray_backend/, for many machines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from cuengine.admission import Limits
from cuengine.config import EngineConfig
from cuengine.errors import CuengineError, EngineStoppedError, RequestError, RequestFailedError
from cuengine.flights import Flight, Stream
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import EngineOutput, RequestDelta
from cuengine.sampling_params import RequestParams, SamplingParams
from cuengine.suspicion import Suspicion
from cuengine.text_side import TextSide
from cuengine.wire import Ready

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer

logger = logging.getLogger("cuengine")


class FrontDesk(ABC):
    """What AsyncEngine and RayEngine have in common."""

    def __init__(self, config: EngineConfig, text: TextSide, ready: Ready) -> None:
        """ready: of the engines, the least that one of them can do."""
        self.config = config
        self.model_name: str = text.name
        self.model_config: ModelConfig = text.model_config
        self.max_model_len = ready.max_model_len
        self.tokenizer: Tokenizer | None = text.tokenizer
        self.chat_template: ChatTemplate | None = text.chat_template
        self.generation_defaults: GenerationDefaults = text.generation_defaults
        self._limits = Limits(ready.max_model_len, config.max_num_seqs, ready.vocab_size)
        self._processor = OutputProcessor(text.tokenizer, self._finish_sample)
        self._seeds = random.Random(config.seed)
        # Requests with a reader, whether new ones are taken, and what speaks against whom.
        self._flights: dict[str, Flight] = {}
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()
        self._suspicion = Suspicion()

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Nothing runs any more, and nothing will."""

    @abstractmethod
    async def start(self) -> None:
        """Let the engines run, if they don't yet; `generate` does so by itself."""

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: RequestParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Deltas of one request as they come; the last one is `finished`.

        Closing the generator, or cancelling who waits for it, aborts the request within one step.
        Raises, with the first delta or later, RequestError for a request that cannot be served,
        RequestFailedError for one whose grammar cannot be followed to the answer's end,
        EngineDiedError for one that kills the engine, and EngineStoppedError where the engine has
        stopped or failed.
        """
        await self.start()
        if not self._accepting or self.failed:
            raise EngineStoppedError(self._why_stopped())
        if request_id in self._flights:
            raise RequestError(f"request_id={request_id!r} is in use", param="request_id")
        self._processor.check_request(params)
        self._limits.check(prompt_token_ids, params)
        num_samples = 1
        if isinstance(params, SamplingParams):
            params = self._portable(params)
            num_samples = params.num_samples
        stream: Stream = asyncio.Queue()
        flight = Flight(
            request_id,
            prompt_token_ids,
            params,
            priority,
            cache_salt,
            [[] for _ in range(num_samples)],
            stream,
        )
        self._processor.add_request(request_id, prompt_token_ids, params)
        self._flights[request_id] = flight
        self._idle.clear()
        self._begin(flight)
        try:
            finished = False
            while not finished:
                news = await stream.get()
                if isinstance(news, CuengineError):
                    raise news
                finished = news.finished
                yield news
        finally:
            self._withdraw(flight)
            self._end(flight)
            del self._flights[request_id]
            if not self._flights:
                self._idle.set()

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last delta with finish_reason "abort"."""
        flight = self._flights.get(request_id)
        if flight is not None and not flight.over:
            delta = self._processor.abort(request_id)
            assert delta is not None
            flight.stream.put_nowait(delta)
            self._withdraw(flight)
            self._end(flight)

    async def drain(self) -> None:
        """Take no new requests and wait until the running ones are through."""
        self._accepting = False
        await self._idle.wait()

    # What engines give.

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Tokens of requests that are not over, by their own ids."""
        good = []
        for output in outputs:
            flight = self._flights[output.request_id]
            failed = next((one for one in output.tokens if one.finish_reason == "error"), None)
            if failed is None:
                flight.record(output)
                good.append(output)
            else:
                logger.warning("Request %s fails: %s", flight.request_id, failed.stop_reason)
                self._withdraw(flight)
                self._fail(flight, RequestFailedError(str(failed.stop_reason)))
        for delta in self._processor.process(good):
            flight = self._flights[delta.request_id]
            flight.stream.put_nowait(delta)
            if delta.finished:
                self._end(flight)
        if self._suspicion:
            for output in good:
                self._clear(self._flights[output.request_id])

    # What requests go through.

    def _portable(self, params: SamplingParams) -> SamplingParams:
        """The same for any engine: with a seed, and with a schema that msgpack can carry.

        Raises RequestError for a schema that is no JSON.
        """
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(64))
        wanted = params.structured_outputs
        if wanted is not None:
            wanted.key()
            if isinstance(wanted.json, dict):
                # Its numbers may be of any size.
                wanted = dataclasses.replace(wanted, json=json.dumps(wanted.json))
                params = dataclasses.replace(params, structured_outputs=wanted)
        return params

    def _end(self, flight: Flight) -> None:
        """Nothing more will come of a request, which no engine has any more."""
        if not flight.over:
            flight.over = True
            self._take_off(flight)
            self._processor.abort(flight.request_id)
            self._clear(flight)

    def _fail(self, flight: Flight, error: CuengineError) -> None:
        if not flight.over:
            flight.stream.put_nowait(error)
            self._end(flight)

    def _clear(self, flight: Flight) -> None:
        """A request has got a token, or is over: if it ran alone, it is another one's turn."""
        suspects = self._suspicion.suspects
        self._suspicion.clear(flight.request_id)
        if flight.request_id in suspects:
            self._submit_all()

    def _finish_sample(self, request_id: str, index: int) -> None:
        """Its text has come to a stop string."""
        flight = self._flights[request_id]
        flight.outputs[index] = None
        if flight.key is not None:
            self._send_finish(flight, index)

    # What is for those who have engines to say.

    @abstractmethod
    def _why_stopped(self) -> str: ...

    @abstractmethod
    def _begin(self, flight: Flight) -> None:
        """A new request: have it run, if it may."""

    @abstractmethod
    def _submit_all(self) -> None:
        """See to it that all requests run that may, suspects one at a time."""

    @abstractmethod
    def _withdraw(self, flight: Flight) -> None:
        """Take a request back from the engine that has it, if one has."""

    @abstractmethod
    def _take_off(self, flight: Flight) -> None:
        """Forget which engine has it."""

    @abstractmethod
    def _send_finish(self, flight: Flight, index: int) -> None:
        """Tell the engine that one of the samples has come to its end."""
