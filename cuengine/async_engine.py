"""The engine behind an async interface: it runs in a process of its own, and may die.

Text is made here, where the event loop is: a stop string ends its sample by a message, and what the
engine drew meanwhile is dropped. So are validation, seeds, and what every sample has got so far.
With that, when the process dies, another one goes on where it was: the same tokens would have come
next. Which request must not, suspicion.py says.

The process is kept by engine_keeper.py, what is known of a request by flights.py. What happens in
the process is in engine_process.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from cuengine.admission import Limits
from cuengine.config import STEP_TIMEOUT, EngineConfig, check_step_timeout
from cuengine.engine_keeper import EngineKeeper
from cuengine.engine_link import EngineLink
from cuengine.engine_view import EngineView
from cuengine.errors import (
    CuengineError,
    EngineDiedError,
    EngineStoppedError,
    RequestError,
    RequestFailedError,
)
from cuengine.flights import Flight, Roster, Stream
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import RequestDelta
from cuengine.sampling_params import RequestParams, SamplingParams
from cuengine.stats import EngineStats
from cuengine.suspicion import Suspicion
from cuengine.text_side import TextSide, load_text_side
from cuengine.wire import (
    Abort,
    Admitted,
    FinishSample,
    Launching,
    Look,
    News,
    Ready,
    Report,
    Seen,
    WireError,
)

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer

logger = logging.getLogger("cuengine")


class AsyncEngine:
    """An Engine in a process of its own; all coroutines run on the loop that first awaited one."""

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
        self._limits = Limits(ready.max_model_len, config.max_num_seqs, ready.vocab_size)
        self._processor = OutputProcessor(text.tokenizer, self._finish_sample)
        self._seeds = random.Random(config.seed)
        # What was promised to requests must hold for each engine that comes after this one.
        lasting = dataclasses.replace(
            config,
            model=str(text.folder),
            revision=None,
            max_model_len=ready.max_model_len,
            num_blocks=ready.num_blocks,
        )
        self._keeper = EngineKeeper(link, lasting, step_timeout, self)
        self._started = False
        # Requests with a reader, and whether new ones are taken.
        self._flights: dict[str, Flight] = {}
        # Who waits for a view, and how many of them the engine has been asked for.
        self._views: deque[asyncio.Future[EngineView]] = deque()
        self._num_looks = 0
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()
        # What the engine that runs has, what it says of itself, and what speaks against whom.
        self._roster = Roster()
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
        check_step_timeout(step_timeout)
        link = EngineLink()  # Python starts there while the model is found here
        try:
            text = load_text_side(config, found=link.start)
            return cls(config, text, link, link.wait_ready(), step_timeout)
        except BaseException:
            link.kill()
            link.close()
            raise

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._keeper.pid

    @property
    def failed(self) -> bool:
        """The engine could not be loaded again: nothing runs any more."""
        return self._keeper.failed

    @property
    def restarting(self) -> bool:
        """It died, and another one is being loaded; requests wait."""
        return self._keeper.restarting

    @property
    def num_restarts(self) -> int:
        """Times that it died."""
        return self._keeper.num_restarts

    async def start(self) -> None:
        """Let the engine run, if it doesn't yet; `generate` does so by itself."""
        if not self._started:
            self._started = True
            self._keeper.start()

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

    async def view(self) -> EngineView:
        """What is to be seen of the engine between two steps; totals as in `stats`.

        Raises EngineStoppedError where there is no engine: it has stopped, failed, or died.
        """
        await self.start()
        if self.failed or self.restarting or not self._accepting:
            raise EngineStoppedError(self._why_stopped())
        view: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._views.append(view)
        self._look()
        return await view

    async def drain(self) -> None:
        """Take no new requests and wait until the running ones are through."""
        self._accepting = False
        await self._idle.wait()

    async def stop(self) -> None:
        """End the engine's process; what still runs gets EngineStoppedError."""
        self._accepting = False
        await self._keeper.stop()
        self._fail_streams()
        self._fail_views()

    def _why_stopped(self) -> str:
        if self.failed:
            return "The engine has failed; its log says why. Restart it."
        if self.restarting:
            return "The engine has died, and is being started again."
        return "The engine is shutting down and takes no more requests."

    def _fail_streams(self) -> None:
        why = self._why_stopped() if self.failed else "The server stopped before the answer's end."
        for flight in self._flights.values():
            self._fail(flight, EngineStoppedError(why))

    def _look(self) -> None:
        """Ask for the views that are waited for, if there is an engine to ask."""
        while self._keeper.up and self._num_looks < len(self._views):
            self._keeper.send(Look())
            self._num_looks += 1

    def _fail_views(self) -> None:
        self._num_looks = 0
        while self._views:
            view = self._views.popleft()
            if not view.done():
                view.set_exception(EngineStoppedError(self._why_stopped()))

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

    def _submit(self, flight: Flight) -> None:
        """Hand a request over to the engine; while there is none it waits."""
        if not self._keeper.up or flight.key is not None or flight.over:
            return
        key = self._roster.next_key()
        try:
            self._keeper.send(flight.add(key))
        except WireError as error:
            self._fail(flight, RequestError(str(error)))
        else:
            self._roster.put(key, flight)

    def _withdraw(self, flight: Flight) -> None:
        """Take a request back from the engine, if it has it."""
        if flight.key is not None:
            self._keeper.send(Abort(flight.key))
            self._roster.take_off(flight)

    def _end(self, flight: Flight) -> None:
        """Nothing more will come of a request, which the engine does not have any more."""
        if not flight.over:
            flight.over = True
            self._roster.take_off(flight)
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

    def _submit_all(self) -> None:
        """See to it that all requests run, or if there are suspects, the first of them alone."""
        suspects = self._suspicion.suspects
        if suspects:
            for flight in self._roster:
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
            self._keeper.send(FinishSample(flight.key, index))

    # What the keeper calls.

    def engine_is_up(self) -> None:
        self._submit_all()
        self._look()

    def engine_is_busy(self) -> bool:
        return any(flight.promised for flight in self._roster)

    def engine_reports(self, report: Report) -> None:
        match report:
            case News():
                self._on_news(report)
            case Launching():
                self._roster.launched(report)
            case Admitted():
                flight = self._roster.find(report.key)
                if flight is not None:
                    flight.admitted = True
                    if report.error is not None:
                        self._fail(flight, report.error)
            case Seen():
                self._on_seen(report.view)

    def _on_news(self, news: News) -> None:
        self._roster.completed(news.num_steps)
        self._stats = news.stats.following(self._earlier_stats)
        outputs = []
        for output in news.outputs:
            flight = self._roster.find(output.request_id)
            failed = next((one for one in output.tokens if one.finish_reason == "error"), None)
            if flight is not None and failed is not None:
                logger.warning("Request %s fails: %s", flight.request_id, failed.stop_reason)
                self._withdraw(flight)
                self._fail(flight, RequestFailedError(str(failed.stop_reason)))
            elif flight is not None:
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

    def _on_seen(self, view: EngineView) -> None:
        def name(key: str) -> str:
            flight = self._roster.find(key)
            return f"over-{key}" if flight is None else flight.request_id

        self._num_looks -= 1
        waiting = self._views.popleft()
        if not waiting.done():  # else nobody waits any more
            waiting.set_result(view.renamed(name, view.stats.following(self._earlier_stats)))

    def engine_died(self) -> None:
        self._fail_views()
        roster = self._roster
        logger.error("The engine's process ended with %d requests in flight", len(roster))
        batch = roster.batch()
        flights = [flight for key in batch if (flight := roster.find(key)) is not None]
        guilty = self._suspicion.died(
            [flight.request_id for flight in flights],
            alone=len(batch) == 1,
            steps_completed=roster.num_steps > 0,
        )
        roster.clear()
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

    def engine_failed(self) -> None:
        self._fail_streams()
        self._fail_views()
