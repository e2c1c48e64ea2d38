"""Work that goes on in a thread of its own until its result is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """Calls `work` in a thread that does not outlive the process.

    It pays where work, or what is done beside it, lets go of the GIL: I/O, NumPy on large arrays.
    As a context: leaving it waits for the work.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

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
