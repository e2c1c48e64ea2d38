"""Where operations put their results: one buffer for each, as large as the largest step needs.

They are allocated at first use, in the run that measures how much memory is left, and stay where
they are: graphs hold their addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuengine.device.cuda.runtime import DeviceArray, Runtime


class Buffers:
    """Matrices by name and width."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._buffers: dict[tuple[str, int], DeviceArray] = {}

    def get(
        self, name: str, rows: int, width: int, dtype: np.dtype[Any], *, capacity: int
    ) -> DeviceArray:
        """[rows, width] to be written, of a buffer with `capacity` rows.

        The same memory at every call. Raises ValueError for more rows than the capacity, and
        DeviceMemoryError.
        """
        buffer = self._buffers.get((name, width))
        if buffer is None:
            buffer = self._runtime.empty((capacity, width), dtype)
            self._buffers[name, width] = buffer
        if rows > len(buffer):
            raise ValueError(f"{name}: {rows} rows; this device was made for at most {len(buffer)}")
        result = buffer[:rows]
        self._runtime.discard(result)
        return result
