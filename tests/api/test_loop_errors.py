"""What the event loop reports: a line now and then where the machine is short of something, and
asyncio's own report of everything else."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from cuengine.api import loop_errors
from cuengine.api.loop_errors import LoopErrors


def no_file_left() -> dict[str, Any]:
    """As asyncio has it of a connection that it could not accept."""
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return {"message": "socket.accept() out of system resource", "exception": error}


async def test_connections_that_cannot_be_accepted_are_one_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, handle = asyncio.get_running_loop(), LoopErrors()
    now = 1000.0
    monkeypatch.setattr(loop_errors.time, "monotonic", lambda: now)
    for _ in range(5):
        handle(loop, no_file_left())
    now += 60
    handle(loop, no_file_left())
    assert len(caplog.records) == 2
    assert "Too many open files: raise the limit of open files" in caplog.text
    assert "Traceback" not in caplog.text


async def test_anything_else_is_reported_as_asyncio_does(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    LoopErrors()(loop, {"message": "a task failed", "exception": ZeroDivisionError("x")})
    LoopErrors()(loop, {"message": "something without an exception"})
    assert [record.name for record in caplog.records] == ["asyncio", "asyncio"]
    assert "ZeroDivisionError" in caplog.text
