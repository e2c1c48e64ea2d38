"""Work beside other work: its result, its error, and that nobody waits for it to begin."""

from __future__ import annotations

import threading
import time

import pytest

from cuengine.beside import Beside


def test_work_goes_on_until_its_result_is_wanted() -> None:
    go, began = threading.Event(), threading.Event()

    def work() -> int:
        began.set()
        go.wait()
        return 7

    beside = Beside(work)
    assert began.wait(10)
    go.set()
    assert beside.result() == 7
    assert beside.result() == 7


def test_an_error_is_raised_where_the_result_is_wanted() -> None:
    beside = Beside({}.popitem)
    for _ in range(2):
        with pytest.raises(KeyError):
            beside.result()


def test_nothing_goes_on_after_its_context() -> None:
    done = []
    with pytest.raises(ValueError, match="elsewhere"), Beside(lambda: done.append(time.sleep(0.2))):
        raise ValueError("elsewhere")
    assert done == [None]
