"""The engine behind an async interface: one thread steps it, one event loop hears the news.

Callers put commands into a list that the thread empties before each step; what a step brought goes
to the loop in one call. Detokenization happens on the engine's thread: a stop string must end its
sample before the next step is scheduled, and a few microseconds a token cost less than the extra
steps would. Grammars are compiled on threads of their own, before a request is handed over: however
long one takes, no step waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cuengine.config import EngineConfig
from cuengine.engine import Engine
from cuengine.errors import ConfigError, CuengineError, EngineStoppedError, RequestError
from cuengine.grammar import Grammar
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import RequestDelta, SequenceDelta, TokenLogprobs
from cuengine.sampling_params import RequestParams, SamplingParams
from cuengine.stats import EngineStats

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer

logger = logging.getLogger("cuengine")

GRAMMAR_THREADS = 2

News = RequestDelta | CuengineError
Stream = asyncio.Queue[News]


class AsyncEngine:
    """An Engine on a thread of its own; all coroutines run on the loop that first awaited one.

    failed  a step raised: everything that ran got EngineStoppedError, and nothing runs any more
    """

    def __init__(self, engine: Engine) -> None:
        if engine.model.config is None or engine.model.generation_defaults is None:
            raise ConfigError("AsyncEngine needs an engine made by Engine.from_config")
        self.config: EngineConfig = engine.config
        self.model_config: ModelConfig = engine.model.config
        self.max_model_len: int = engine.max_model_len
        self.tokenizer: Tokenizer | None = engine.model.tokenizer
        self.chat_template: ChatTemplate | None = engine.model.chat_template
        self.generation_defaults: GenerationDefaults = engine.model.generation_defaults
        self.failed = False
        self._engine = engine
        self._processor = OutputProcessor(engine.model.tokenizer, engine.finish_sequence)
        self._thread = threading.Thread(target=self._run, name="cuengine-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopping = False
        self._stats = engine.stats()
        # On the engine's thread only: where the news of a request goes.
        self._running: dict[str, Stream] = {}
        # On the loop only: streams with a reader, and whether new ones are taken.
        self._streams: dict[str, Stream] = {}
        self._compiling: dict[str, RequestDelta] = {}
        """Requests that wait for their grammar, and what ends one that is aborted meanwhile."""
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "cuengine-grammar")
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """Load the model, in the calling thread. Raises ModelError and ConfigError."""
        return cls(Engine.from_config(config))

    async def start(self) -> None:
        """Start the engine's thread, if it isn't running; `generate` does so by itself."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

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
        Raises, with the first delta or later, RequestError for a request that cannot be served and
        EngineStoppedError where the engine has stopped or failed.
        """
        await self.start()
        if not self._accepting or self.failed:
            raise EngineStoppedError(self._why_stopped())
        if request_id in self._streams:
            raise RequestError(f"request_id={request_id!r} is in use", param="request_id")
        stream: Stream = asyncio.Queue()
        self._streams[request_id] = stream
        self._idle.clear()

        def add() -> None:
            try:
                self._processor.check_request(params)
                self._engine.add_request(
                    request_id,
                    prompt_token_ids,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    grammar=grammar,
                )
                self._processor.add_request(request_id, prompt_token_ids, params)
                self._running[request_id] = stream
            except CuengineError as error:
                self._post([(stream, error)])

        finished = False
        try:
            grammar = None
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                grammar = await self._compile(request_id, prompt_token_ids, params)
            if stream.empty():  # else it has been aborted, or the engine has stopped
                self._command(add)
            while not finished:
                news = await stream.get()
                if isinstance(news, CuengineError):
                    finished = True
                    raise news
                finished = news.finished
                yield news
        finally:
            del self._streams[request_id]
            if not self._streams:
                self._idle.set()
            if not finished:
                self._command(lambda: self._abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last delta with finish_reason "abort"."""
        if (last := self._compiling.get(request_id)) is not None:
            self._streams[request_id].put_nowait(last)
        self._command(lambda: self._abort(request_id))

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    async def drain(self) -> None:
        """Take no new requests and wait until the running ones are through."""
        self._accepting = False
        await self._idle.wait()

    async def stop(self) -> None:
        """End the engine's thread; what still runs gets EngineStoppedError."""
        self._accepting = False
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail_streams()

    async def _compile(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> Grammar | None:
        """The request's grammar. While it is compiled, the engine's thread does not know of it."""
        none: list[TokenLogprobs] | None = None if params.logprobs is None else []
        samples = [SequenceDelta(i, "", [], none, finish_reason="abort") for i in range(params.n)]
        self._compiling[request_id] = RequestDelta(
            request_id, prompt_token_ids, samples, finished=True
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._grammar_threads, self._engine.compile_grammar, params
            )
        finally:
            del self._compiling[request_id]

    def _why_stopped(self) -> str:
        if self.failed:
            return "The engine has failed; its log says why. Restart it."
        return "The engine is shutting down and takes no more requests."

    def _fail_streams(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(EngineStoppedError(self._why_stopped()))

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._next_commands():
                deltas = self._processor.process(self._engine.step())
                self._stats = self._engine.stats()
                if deltas:
                    self._post([(self._stream_of(delta), delta) for delta in deltas])
        except Exception:
            logger.exception("The engine failed; running requests are lost")
            self.failed = True
            self._call_loop(self._fail_streams)

    def _next_commands(self) -> bool:
        """Sleep until there is work, do what callers asked for; false: stop."""
        with self._wake:
            while not (self._commands or self._stopping or self._engine.has_unfinished()):
                self._wake.wait()
            if self._stopping:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        return True

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        delta = self._processor.abort(request_id)
        if delta is not None:
            self._post([(self._stream_of(delta), delta)])

    def _stream_of(self, delta: RequestDelta) -> Stream:
        if delta.finished:
            return self._running.pop(delta.request_id)
        return self._running[delta.request_id]

    def _post(self, news: Sequence[tuple[Stream, News]]) -> None:
        def deliver() -> None:
            for stream, item in news:
                stream.put_nowait(item)

        self._call_loop(deliver)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("the event loop is closed; nobody is left to hear of it")
