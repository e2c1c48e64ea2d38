"""A replica whose engine obeys engine_control.py, in a worker process of Ray."""

from __future__ import annotations

from typing import Any

import engine_control

from cuengine import engine_link
from cuengine.ray_backend.replica import Replica


class ControlledReplica(Replica):
    async def __init__(self, *args: Any) -> None:
        engine_link.COMMAND[:] = engine_control.COMMAND
        await super().__init__(*args)
