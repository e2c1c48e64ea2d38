"""The engine behind an async interface: it runs in a process of its own, and may die.

Text is made here, where the event loop is: a stop string ends its sample by a message, and what the
engine drew meanwhile is dropped. So are validation, seeds, and what every sample has got so far.
With that, when the process dies, another one goes on where it was: the same tokens would have come
next. Which request must not, suspicion.py says.

Loading is in loading.py, the process in engine_link.py and engine_process.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuengine.admission import Limits
from cuengine.config import STEP_TIMEOUT, EngineConfig
from cuengine.engine_link import EngineLink
from cuengine.errors import (
    ConfigError,
    CuengineError,
    EngineDiedError,
    EngineStoppedError,
    RequestError,
)
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import EngineOutput, RequestDelta
from cuengine.sampling_params import BeamSearchParams, RequestParams, SamplingParams
from cuengine.sequence import Progress
from cuengine.stats import EngineStats
from cuengine.suspicion import Suspicion
from cuengine.text_side import TextSide, load_text_side
from cuengine.wire import (
    Abort,
    Add,
    AddBeams,
    Admitted,
    FinishSample,
    Launching,
    News,
    Ready,
    Report,
    WireError,
)

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer

logger = logging.getLogger("cuengine")

PAUSES = (0.0, 2.0, 10.0)
"""Seconds before each try to load the engine again; after the last it has failed for good."""

Stream = asyncio.Queue[RequestDelta | CuengineError]


@dataclass(slots=True, eq=False)
class _Flight:
    """A request from its submission until its reader has left.

    outputs   what the engine drew for each sample (not of a beam search); None for a finished one
    key       names it in the process that runs; None while it has to wait
    admitted  that process has it in its queue
    over      nothing more will come
    """

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    priority: int
    cache_salt: str | None
    outputs: list[list[int] | None]
    stream: Stream
    num_cached_tokens: int = 0
    key: str | None = None
    admitted: bool = False
    over: bool = False

    def record(self, output: EngineOutput) -> None:
        if isinstance(self.params, BeamSearchParams):
            return  # it comes all at once, and that is its end
        if not any(self.outputs):
            self.num_cached_tokens = output.num_cached_tokens
        for token in output.tokens:
            tokens = self.outputs[token.index]
            if tokens is not None:
                tokens.append(token.token_id)
            if token.finish_reason is not None:
                self.outputs[token.index] = None

    def add(self, key: str) -> Add | AddBeams:
        """What has the engine begin with it, or go on."""
        params, salt = self.params, self.cache_salt
        if isinstance(params, BeamSearchParams):
            return AddBeams(key, self.prompt_token_ids, params, self.priority, salt)
        progress = None
        if any(tokens is None or tokens for tokens in self.outputs):
            progress = Progress(self.outputs, self.num_cached_tokens)
        return Add(key, self.prompt_token_ids, params, self.priority, salt, progress)


class AsyncEngine:
    """An Engine in a process of its own; all coroutines run on the loop that first awaited one.

    failed        the engine could not be loaded again: nothing runs any more
    restarting    it died, and another one is being loaded; requests wait
    num_restarts  times that it died
    """

    def __init__(
        self,
        config: EngineConfig,
        text: TextSide,
        link: EngineLink,
        ready: Ready,
        step_timeout: float,
    ) -> None:
        self.config = config
        self.model_name: str = text.name
        self.model_config: ModelConfig = text.model_config
        self.max_model_len = ready.max_model_len
        self.tokenizer: Tokenizer | None = text.tokenizer
        self.chat_template: ChatTemplate | None = text.chat_template
        self.generation_defaults: GenerationDefaults = text.generation_defaults
        self.failed = False
        self.num_restarts = 0
        # What was promised to requests must hold for each engine that comes after this one.
        self._engine_config = dataclasses.replace(
            config,
            model=str(text.folder),
            revision=None,
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
        )
        self._limits = Limits(ready.max_model_len, config.max_num_seqs, ready.vocab_size)
        self._processor = OutputProcessor(text.tokenizer, self._finish_sample)
        self._seeds = random.Random(config.seed)
        self._step_timeout = step_timeout
        self._link = link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        # Requests with a reader, and whether new ones are taken.
        self._flights: dict[str, _Flight] = {}
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()
        # What the process that runs has, and does.
        self._keys = map(str, itertools.count())
        self._by_key: dict[str, _Flight] = {}
        self._launches: deque[Launching] = deque()
        self._num_steps = 0
        self._last_news = 0.0
        self._stats = self._earlier_stats = EngineStats(
            num_blocks=ready.num_blocks, num_free_blocks=ready.num_blocks
        )
        self._suspicion = Suspicion()

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, step_timeout: float = STEP_TIMEOUT
    ) -> AsyncEngine:
        """Find, fetch and load the model; returns when the engine is loaded.

        step_timeout  seconds after which a step is taken for hung, and the engine for dead; 0: none

        Raises ModelError and ConfigError.
        """
        if not 0 <= step_timeout < float("inf"):
            raise ConfigError(
                f"step_timeout={step_timeout!r} is not a number of seconds, 0 or more"
            )
        link = EngineLink()  # Python starts there while the model is found here
        try:
            text = load_text_side(config, found=link.start)
            return cls(config, text, link, link.wait_ready(), step_timeout)
        except BaseException:
            link.close()
            raise

    @property
    def restarting(self) -> bool:
        return self._loop is not None and not (self._link.attached or self.failed or self._stopping)

    async def start(self) -> None:
        """Let the engine run, if it doesn't yet; `generate` does so by itself."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._step_timeout:
                self._spawn_task(self._watch_steps())
            self._spawn_task(self._attach())

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
        flight = _Flight(
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
        if not self._suspicion.suspects:
            self._submit(flight)
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

    def stats(self) -> EngineStats:
        """As of the last step; totals count from the first engine's start."""
        return self._stats

    async def drain(self) -> None:
        """Take no new requests and wait until the running ones are through."""
        self._accepting = False
        await self._idle.wait()

    async def stop(self) -> None:
        """End the engine's process; what still runs gets EngineStoppedError."""
        self._accepting = False
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ended()
        self._fail_streams()

    def _why_stopped(self) -> str:
        if self.failed:
            return "The engine has failed; its log says why. Restart it."
        return "The engine is shutting down and takes no more requests."

    def _fail_streams(self) -> None:
        for flight in self._flights.values():
            self._fail(flight, EngineStoppedError(self._why_stopped()))

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    def _submit(self, flight: _Flight) -> None:
        """Hand a request over to the engine; while there is none it waits."""
        if not self._link.attached or flight.key is not None or flight.over:
            return
        if not self._by_key:
            self._last_news = asyncio.get_running_loop().time()
        key = next(self._keys)
        try:
            self._link.send(flight.add(key))
        except WireError as error:
            self._fail(flight, RequestError(str(error)))
            return
        flight.key = key
        self._by_key[key] = flight

    def _withdraw(self, flight: _Flight) -> None:
        """Take a request back from the engine, if it has it."""
        if flight.key is not None:
            self._link.send(Abort(flight.key))
            self._forget_key(flight)

    def _forget_key(self, flight: _Flight) -> None:
        if flight.key is not None:
            del self._by_key[flight.key]
        flight.key, flight.admitted = None, False

    def _end(self, flight: _Flight) -> None:
        """Nothing more will come of a request, which the engine does not have any more."""
        if not flight.over:
            flight.over = True
            self._forget_key(flight)
            self._processor.abort(flight.request_id)
            self._clear(flight)

    def _fail(self, flight: _Flight, error: CuengineError) -> None:
        if not flight.over:
            flight.stream.put_nowait(error)
            self._end(flight)

    def _clear(self, flight: _Flight) -> None:
        """A request has got a token, or is over: if it ran alone, it is another one's turn."""
        suspects = self._suspicion.suspects
        self._suspicion.clear(flight.request_id)
        if flight.request_id in suspects:
            self._submit_all()

    def _submit_all(self) -> None:
        """See to it that all requests run, or if there are suspects, the first of them alone."""
        suspects = self._suspicion.suspects
        if suspects:
            for flight in list(self._by_key.values()):
                if flight.request_id != suspects[0]:
                    self._withdraw(flight)
            self._submit(self._flights[suspects[0]])
        else:
            for flight in list(self._flights.values()):
                self._submit(flight)

    def _finish_sample(self, request_id: str, index: int) -> None:
        """Its text has come to a stop string."""
        flight = self._flights[request_id]
        flight.outputs[index] = None
        if flight.key is not None:
            self._link.send(FinishSample(flight.key, index))

    # What the engine's process reports.

    async def _attach(self) -> None:
        """Talk to a process whose engine is loaded, and hand it everything that is in flight."""
        link = self._link
        await link.attach(self._on_report, lambda: self._on_lost(link))
        self._submit_all()

    def _on_report(self, report: Report) -> None:
        self._last_news = asyncio.get_running_loop().time()
        match report:
            case News():
                self._on_news(report)
            case Launching():
                self._launches.append(report)
            case Admitted():
                flight = self._by_key.get(report.key)
                if flight is not None:
                    flight.admitted = True
                    if report.error is not None:
                        self._fail(flight, report.error)

    def _on_news(self, news: News) -> None:
        self._num_steps = news.num_steps
        self._stats = news.stats.following(self._earlier_stats)
        while len(self._launches) > 1 and self._launches[1].step <= self._num_steps + 1:
            self._launches.popleft()
        outputs = []
        for output in news.outputs:
            flight = self._by_key.get(output.request_id)
            if flight is not None:
                output.request_id = flight.request_id
                flight.record(output)
                outputs.append(output)
        for delta in self._processor.process(outputs):
            flight = self._flights[delta.request_id]
            flight.stream.put_nowait(delta)
            if delta.finished:
                self._end(flight)
        if self._suspicion:
            for output in outputs:
                self._clear(self._flights[output.request_id])

    # When the engine's process ends, or hangs.

    def _on_lost(self, link: EngineLink) -> None:
        if self._stopping:
            return
        self.num_restarts += 1
        batch = self._batch()
        names = [self._by_key[key].request_id for key in batch if key in self._by_key]
        guilty = self._suspicion.died(
            names, alone=len(batch) == 1, steps_completed=self._num_steps > 0
        )
        logger.error(
            "The engine's process %d ended with %d requests in flight; another one is started",
            link.pid,
            len(self._by_key),
        )
        for flight in list(self._by_key.values()):
            self._forget_key(flight)
        self._launches.clear()
        self._num_steps = 0
        self._stats = self._earlier_stats = self._stats.after_the_end()
        for name in guilty:
            logger.error("Request %s is refused: the engine died when it ran alone", name)
            self._fail(
                self._flights[name],
                EngineDiedError(
                    "The engine died more than once while it worked on this request alone. It is "
                    "not tried again."
                ),
            )
        if self._suspicion.suspects:
            logger.warning("%d requests run one at a time now", len(self._suspicion.suspects))
        self._spawn_task(self._restart())

    def _batch(self) -> set[str]:
        """Whom the engine may have been at work on, by their keys: those of steps that it has
        begun and not completed, and those that were on their way into its queue.
        """
        launches = self._launches
        while len(launches) > 1 and launches[1].step <= self._num_steps + 1:
            launches.popleft()
        batch = {key for launch in launches for key in launch.keys}
        return batch | {key for key, flight in self._by_key.items() if not flight.admitted}

    async def _restart(self) -> None:
        """Load the engine again."""
        logger.error("It %s", await self._ended())
        for pause in PAUSES:
            await asyncio.sleep(pause)
            try:
                self._link = EngineLink()
                self._link.start(self._engine_config)
                await asyncio.to_thread(self._link.wait_ready)
            except (CuengineError, OSError) as error:
                logger.error("The engine cannot be loaded again: %s", error)
                await self._ended()
                continue
            logger.warning(
                "Process %d takes over, with %d requests", self._link.pid, len(self._flights)
            )
            await self._attach()
            return
        self.failed = True
        logger.error("The engine has failed for good; running requests are lost")
        self._fail_streams()

    async def _ended(self) -> str:
        link = self._link
        link.close()
        return await asyncio.to_thread(link.wait_ended)

    async def _watch_steps(self) -> None:
        """End a process that has work and reports nothing for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._step_timeout / 4)
            waits = any(flight.admitted for flight in self._by_key.values())
            if waits and loop.time() - self._last_news > self._step_timeout:
                logger.error(
                    "A step takes longer than %g s: the engine's process %d hangs, and is ended",
                    self._step_timeout,
                    self._link.pid,
                )
                self._link.kill()
                self._last_news = loop.time()
