"""The requests that one replica has, and the stream of each; messages.py says what is in it.

The engine is behind `send` and `on_report`; its process is replica.py's business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from cuengine.engine_view import EngineView
from cuengine.outputs import EngineOutput
from cuengine.ray_backend.messages import HEARTBEAT, Taken, Unfinished, server_of
from cuengine.stats import EngineStats
from cuengine.wire import (
    Abort,
    Add,
    AddBeams,
    Admitted,
    Command,
    FinishSample,
    Look,
    News,
    Report,
    Seen,
    frame,
)

ITEMS_A_SECOND = 500
"""In all streams of a replica: Ray takes about a millisecond for each, here and where it is heard.
With more tokens than that, each item has several; the first one and the last wait for nobody.
"""


@dataclass(slots=True, eq=False)
class _Answer:
    """What is to be said about a request.

    server    that it is from
    promised  the engine will report of it soon (compiling a grammar may take long)
    given_up  nobody listens any more
    """

    server: str
    unfinished: Unfinished
    promised: bool
    given_up: bool = False
    admitted: Admitted | None = None
    outputs: list[EngineOutput] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.news.set()
        if self.given_up or not self.unfinished:
            self.over.set()


class Answers:
    """stats  of the engine, as of its last step"""

    def __init__(self, replica: str, num_blocks: int, send: Callable[[Command], None]) -> None:
        self._replica = replica
        self._send = send
        self._answers: dict[str, _Answer] = {}
        self._views: deque[asyncio.Future[EngineView]] = deque()
        # When each server was last told something, in any stream.
        self._last_told: dict[str, float] = {}
        self._num_steps = 0
        self.stats = EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def busy(self) -> bool:
        """The engine has something to report in a while, if all is well."""
        return any(a.promised and bool(a.unfinished) for a in self._answers.values())

    async def stream(self, command: Add | AddBeams) -> AsyncGenerator[bytes, None]:
        """Closing it, or cancelling who waits for it, aborts the request."""
        promised = isinstance(command, AddBeams) or command.params.structured_outputs is None
        server = server_of(command.key)
        answer = self._answers[command.key] = _Answer(server, Unfinished(command), promised)
        now = asyncio.get_running_loop().time
        next_item = 0.0
        try:
            self._send(command)
            self._last_told[server] = now()
            yield frame(Taken(self._replica))
            while answer.unfinished or answer.news.is_set():
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await answer.news.wait()
                except TimeoutError:
                    # One stream's sign of life does for all: there may be a thousand that wait.
                    if now() - self._last_told[server] >= 0.75 * HEARTBEAT:
                        self._last_told[server] = now()
                        yield b""
                    continue
                if (pause := next_item - now()) > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            await answer.over.wait()
                if answer.given_up:
                    return
                answer.news.clear()
                self._last_told[server] = now()
                if answer.outputs:
                    next_item = now() + self.stats.num_running / ITEMS_A_SECOND
                yield self._collect(answer)
        finally:
            del self._answers[command.key]
            if answer.unfinished:
                self._send(Abort(command.key))

    def _collect(self, answer: _Answer) -> bytes:
        frames = b""
        if answer.admitted is not None:
            frames += frame(answer.admitted)
            answer.admitted = None
        if answer.outputs:
            frames += frame(News(answer.outputs, self.stats, self._num_steps))
            answer.outputs = []
        return frames

    def finish(self, key: str, index: int) -> None:
        """A sample's text has come to a stop string."""
        answer = self._answers.get(key)
        if answer is not None:
            self._send(FinishSample(key, index))
            answer.unfinished.finish(index)
            answer.wake()

    def give_up(self, server: str) -> int:
        """It is gone: abort all that it had running. Returns how many requests these are."""
        answers = [answer for answer in self._answers.values() if answer.server == server]
        for answer in answers:
            answer.given_up = True
            answer.wake()
        return len(answers)

    async def view(self) -> EngineView:
        view: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._views.append(view)
        self._send(Look())
        return await view

    def on_report(self, report: Report) -> None:
        """What the engine says."""
        match report:
            case News():
                self.stats, self._num_steps = report.stats, report.num_steps
                for output in report.outputs:
                    answer = self._answers.get(output.request_id)
                    if answer is not None:
                        answer.outputs.append(output)
                        answer.unfinished.drawn(output.tokens)
                        answer.wake()
            case Admitted():
                answer = self._answers.get(report.key)
                if answer is not None:
                    answer.promised = True
                    answer.admitted = report
                    if report.problem is not None:
                        answer.unfinished.refuse()
                    answer.wake()
            case Seen():
                view = self._views.popleft()
                if not view.done():  # else nobody waits any more
                    view.set_result(report.view)
