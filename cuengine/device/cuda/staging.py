"""Host to device, in one copy: the small arrays of a step are packed into one pinned buffer.

Also the way of large ones, in pieces (`Uploader`). What the arrays mean is the callers' business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.device.cuda.runtime import DeviceArray, Event, HostArray, Runtime

_ALIGNMENT = 16
_DEPTH = 2
"""Pinned buffers in turn: one is filled while the other may still be on its way."""

_UPLOAD_BYTES = 16 * 2**20

_BYTE = np.dtype(np.uint8)


def aligned(num_bytes: int) -> int:
    """The next multiple of 16, as kernels read vectors."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Staging:
    """One pinned and one device buffer of the same layout.

        staging.start(num_bytes)
        view, address = staging.add(shape, dtype)
        view[:] = ...
        staging.send()

    The order of the calls gives the addresses. The buffer grows only where `start` asks for more
    than it has, so that graphs can hold addresses in one for which it never does.
    """

    def __init__(self, runtime: Runtime, capacity: int) -> None:
        self._runtime = runtime
        self._turn = 0
        self._used = 0
        self._allocate(aligned(capacity))

    def _allocate(self, capacity: int) -> None:
        self._device: DeviceArray = self._runtime.empty((capacity,), _BYTE)
        self._base = self._runtime.address(self._device)
        self._pinned: list[HostArray] = [
            self._runtime.pinned((capacity,), _BYTE) for _ in range(_DEPTH)
        ]
        self._copied: list[Event] = [self._runtime.event() for _ in range(_DEPTH)]
        self._capacity = capacity

    def start(self, num_bytes: int = 0) -> None:
        """Wait until a pinned buffer is free, and begin to fill it.

        num_bytes: of all arrays, each rounded up by `aligned`, where they may take more room.
        """
        if num_bytes > self._capacity:
            # What is on its way has to arrive before its buffers go.
            self._runtime.synchronize()
            self._allocate(1 << (num_bytes - 1).bit_length())
        self._turn = (self._turn + 1) % _DEPTH
        self._copied[self._turn].wait()
        self._used = 0

    def add(self, shape: tuple[int, ...], dtype: type[Any]) -> tuple[NDArray[Any], int]:
        """The next array: where to fill it in, and where kernels will find it.

        Raises ValueError where there is no room.
        """
        start = self._used
        count = 1
        for length in shape:
            count *= length
        end = start + count * np.dtype(dtype).itemsize
        if end > self._capacity:
            raise ValueError(
                f"a step's arrays take more than the {self._capacity} bytes that there are for them"
            )
        self._used = aligned(end)
        view = self._pinned[self._turn][start:end].view(dtype).reshape(shape)
        return view, self._base + start

    def put(self, array: NDArray[Any]) -> int:
        """Add an array as it is; its address."""
        view, address = self.add(array.shape, array.dtype.type)
        view[...] = array
        return address

    def put_optional(self, array: NDArray[Any] | None) -> int:
        """Address 0, a null pointer, where there is none."""
        return 0 if array is None else self.put(array)

    def device_view(self, address: int, shape: tuple[int, ...], dtype: type[Any]) -> DeviceArray:
        """The device's side of an array that was added."""
        start = address - self._base
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._device[start : start + num_bytes].view(np.dtype(dtype)).reshape(shape)

    def send(self) -> None:
        if self._used:
            self._runtime.copy_in(
                self._device[: self._used], self._pinned[self._turn][: self._used]
            )
            self._copied[self._turn].record()


class Uploader:
    """Copies arrays of any size to the device through two pinned buffers, taken in turn."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pinned: list[HostArray] = []
        self._copied: list[Event] = []
        self._turn = 0

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        """A copy in device memory. Raises DeviceMemoryError where it does not fit."""
        runtime = self._runtime
        target = runtime.empty(array.shape, array.dtype)
        source = np.ascontiguousarray(array).reshape(-1).view(_BYTE)
        flat = target.reshape(-1).view(_BYTE)
        if not self._pinned:
            self._pinned = [runtime.pinned((_UPLOAD_BYTES,), _BYTE) for _ in range(_DEPTH)]
            self._copied = [runtime.event() for _ in range(_DEPTH)]
        for start in range(0, len(source), _UPLOAD_BYTES):
            piece = source[start : start + _UPLOAD_BYTES]
            self._turn = (self._turn + 1) % _DEPTH
            self._copied[self._turn].wait()
            staged = self._pinned[self._turn][: len(piece)]
            staged[:] = piece
            runtime.copy_in(flat[start : start + len(piece)], staged)
            self._copied[self._turn].record()
        return target

    def release(self) -> None:
        """Give the pinned buffers back; the next upload makes new ones."""
        for event in self._copied:
            event.wait()
        self._pinned, self._copied = [], []
