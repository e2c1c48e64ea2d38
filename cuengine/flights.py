"""Requests between their submission and their end, and which of them the engine that runs has.

What is kept of each is all that another engine needs to go on with it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cuengine.errors import CuengineError
from cuengine.outputs import EngineOutput, RequestDelta
from cuengine.sampling_params import BeamSearchParams, RequestParams
from cuengine.sequence import Progress
from cuengine.wire import Add, AddBeams, Launching

Stream = asyncio.Queue[RequestDelta | CuengineError]


@dataclass(slots=True, eq=False)
class Flight:
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

    @property
    def promised(self) -> bool:
        """The engine that has it will report soon. (Compiling a grammar may take long.)"""
        if self.admitted or isinstance(self.params, BeamSearchParams):
            return True
        return self.params.structured_outputs is None


class Roster:
    """The requests that one engine has, by the keys that it knows them by, and what it is at.

    num_steps  that it has completed, as far as is known here
    """

    def __init__(self) -> None:
        self._keys = map(str, itertools.count())
        self._flights: dict[str, Flight] = {}
        self._launches: deque[Launching] = deque()
        self.num_steps = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def find(self, key: str) -> Flight | None:
        """None for one that has been taken off."""
        return self._flights.get(key)

    def next_key(self) -> str:
        return next(self._keys)

    def put(self, key: str, flight: Flight) -> None:
        flight.key = key
        self._flights[key] = flight

    def take_off(self, flight: Flight) -> None:
        if flight.key is not None:
            del self._flights[flight.key]
        flight.key, flight.admitted = None, False

    def launched(self, report: Launching) -> None:
        self._launches.append(report)
        self._forget_completed()

    def completed(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._forget_completed()

    def _forget_completed(self) -> None:
        launches = self._launches
        while len(launches) > 1 and launches[1].step <= self.num_steps + 1:
            launches.popleft()

    def batch(self) -> list[str]:
        """Whom the engine may be at work on, by their keys: those of steps that it has begun and
        not completed, and those that are on their way into its queue.
        """
        batch = dict.fromkeys(key for launch in self._launches for key in launch.keys)
        batch |= dict.fromkeys(key for key, f in self._flights.items() if not f.admitted)
        return list(batch)

    def clear(self) -> None:
        """The engine is gone. (Keys are not used again: what it said may still be on its way.)"""
        for flight in self:
            self.take_off(flight)
        self._launches.clear()
        self.num_steps = 0
