"""A replica whose engine obeys engine_control.py, in a worker process of Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import engine_control

from cuengine import engine_link
from cuengine.ray_backend import attendance
from cuengine.ray_backend.replica import Replica


class ControlledReplica(Replica):
    async def __init__(self, *args: Any) -> None:
        engine_link.COMMAND[:] = engine_control.COMMAND
        if Path(os.environ["CUENGINE_TEST_CONTROL"], "impatient").exists():
            attendance.SECONDS_UNATTENDED = 1.0
        await super().__init__(*args)
