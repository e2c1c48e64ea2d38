"""Work that goes on in a thread of its own until its result is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")

_starting = threading.Lock()
"""The size of stacks is one setting for all threads."""


class Beside(Generic[T]):
    """Calls `work` in a thread that does not outlive the process.

    It pays where work, or what is done beside it, lets go of the GIL: I/O, NumPy on large arrays.
    As a context: leaving it waits for the work.

    stack_bytes  of the thread's stack, of which only what is used takes memory; 0: as usual
    """

    def __init__(self, work: Callable[[], T], *, stack_bytes: int = 0) -> None:
        self._work = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        with _starting:
            before = threading.stack_size(stack_bytes)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """What work returned, waited for. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
