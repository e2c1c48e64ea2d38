"""How much work a server takes on: requests at once, and prompts that wait for their first token.

What is over a limit is refused at once, with 429 and when to try again: a client that is told can
go elsewhere, one in an endless queue cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cuengine.api.errors import ApiError
from cuengine.counted import counted

RETRY_AFTER_SECONDS = 2


class Limits:
    """concurrent  requests that generate, from before their body is read to their answer's end
    waiting     prompts that the engine has and that have brought no token yet
    """

    def __init__(self, max_concurrent: int, max_waiting: int) -> None:
        self._max_concurrent = max_concurrent
        self._max_waiting = max_waiting
        self.concurrent = 0
        self.waiting = 0

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """Raises ApiError 429 where as many run as may."""
        if self.concurrent >= self._max_concurrent:
            raise _refusal(f"{counted(self.concurrent, 'request')} at once")
        self.concurrent += 1
        try:
            yield
        finally:
            self.concurrent -= 1

    def check_queue(self) -> None:
        """Raises ApiError 429 where as many prompts wait as may."""
        if self.waiting >= self._max_waiting:
            raise _refusal(f"{counted(self.waiting, 'prompt')} waiting for a first token")

    @contextmanager
    def one_prompt(self) -> Iterator[Waiting]:
        waiting = Waiting(self)
        try:
            yield waiting
        finally:
            waiting.over()


class Waiting:
    """One prompt's place in the queue, given up with its first token or at its end."""

    __slots__ = ("_limits",)

    def __init__(self, limits: Limits) -> None:
        self._limits: Limits | None = limits
        limits.waiting += 1

    def over(self) -> None:
        if self._limits is not None:
            self._limits.waiting -= 1
            self._limits = None


def _refusal(why: str) -> ApiError:
    return ApiError(
        429,
        f"The server is busy: {why}, which is as many as it takes. Try again later.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
    )
