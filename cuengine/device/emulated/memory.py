"""What kernels may touch: arrays, with a shadow that says how each of their bytes is.

memory = Memory()
pointer = memory.add(array, "out")        its address
memory.poison(array[3:], UNDEFINED)       an error to read it before it is written
memory.poison(array[:, 5], NO_ACCESS)     an error to touch it; any view will do
memory.shadow(array)[blocks] = NO_ACCESS  the same by index
memory.require_written(array)             an error if some of it is still undefined
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cuengine.errors import CuengineError

NO_ACCESS, UNDEFINED = 1, 2
Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

ROW = np.dtype([("base", "u8"), ("size", "u8"), ("shadow", "u8")])
"""Allocation of runtime.c."""


class KernelFault(CuengineError):
    """A kernel did what a GPU may hide: where, which thread, which address."""


class Allocation(NamedTuple):
    """array: kept alive; None where somebody else does. shadow: uint8 [bytes]."""

    array: Array | None
    shadow: Bytes
    name: str


def address_of(array: Array) -> int:
    """Of its first element."""
    return int(array.__array_interface__["data"][0])


class Memory:
    """Allocations by address. They do not overlap; a view is found in what it views."""

    def __init__(self) -> None:
        self.allocations: dict[int, Allocation] = {}
        """To be read; changed by `add`, `add_bytes` and `remove`."""
        self._bases: list[int] = []
        self._table: tuple[npt.NDArray[Any], int] | None = None

    def add(self, array: Array, name: str = "array") -> int:
        """Its address. The array is kept until `remove`."""
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous: kernels see addresses, not strides")
        base = address_of(array)
        self._add(base, Allocation(array, np.zeros(array.nbytes, np.uint8), name))
        return base

    def add_bytes(self, address: int, size: int, name: str) -> Bytes:
        """Memory that the caller keeps until `remove`. Returns its shadow."""
        shadow = np.zeros(size, np.uint8)
        self._add(address, Allocation(None, shadow, name))
        return shadow

    def _add(self, base: int, allocation: Allocation) -> None:
        if base not in self.allocations:
            insort(self._bases, base)
        self.allocations[base] = allocation
        self._table = None

    def remove(self, address: int) -> None:
        """What was added at this address. Raises KeyError if nothing was."""
        del self.allocations[address]
        self._bases.pop(bisect_left(self._bases, address))
        self._table = None

    def find(self, address: int, size: int) -> tuple[int, Allocation] | None:
        """Base of the allocation that these bytes lie in, and it."""
        index = bisect_right(self._bases, address) - 1
        if index >= 0:
            base = self._bases[index]
            found = self.allocations[base]
            if address + size <= base + len(found.shadow):
                return base, found
        return None

    def address(self, view: Array) -> int:
        """Of a view of what was added. Raises ValueError for anything else."""
        self.shadow(view)
        return address_of(view)

    def shadow(self, view: Array) -> Bytes:
        """uint8 [*view.shape, itemsize], to be read and written: how the bytes of a view are.

        0 where they are fine, NO_ACCESS, or UNDEFINED. The view may have any positive strides.
        Raises ValueError where it is not in one allocation.
        """
        start = address_of(view)
        last = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        found = self.find(start, last + view.itemsize) if view.size else None
        if view.size == 0:
            return np.zeros((*view.shape, view.itemsize), np.uint8)
        if found is None or min(view.strides, default=0) < 0:
            raise ValueError("not in an allocation")
        base, allocation = found
        return np.lib.stride_tricks.as_strided(
            allocation.shadow[start - base :],
            (*view.shape, view.itemsize),
            (*view.strides, 1),
        )

    def poison(self, view: Array, how: int = UNDEFINED) -> None:
        """Marks what a view has of an allocation; 0 lifts it. Raises ValueError."""
        if view.flags.c_contiguous and view.size:
            start = address_of(view)
            if (found := self.find(start, view.nbytes)) is None:
                raise ValueError("not in an allocation")
            base, allocation = found
            allocation.shadow[start - base : start - base + view.nbytes] = how
        else:
            self.shadow(view)[...] = how

    def require_written(self, view: Array, name: str = "") -> None:
        """Raises KernelFault where a view has bytes that no kernel has written, or may touch."""
        left = self.shadow(view).any(axis=-1)
        if not left.any():
            return
        found = self.find(address_of(view), 1)
        first = tuple(int(n) for n in np.unravel_index(int(left.argmax()), left.shape))
        raise KernelFault(
            f"{name or (found[1].name if found else 'array')}: {int(left.sum())} of {left.size} "
            f"elements were never written, the first at {first}"
        )

    def table(self) -> tuple[npt.NDArray[Any], int]:
        """ROW [allocations], sorted by base, and its address."""
        if self._table is None:
            shadows = [self.allocations[base].shadow for base in self._bases]
            table = np.zeros(len(shadows), ROW)
            table["base"] = self._bases
            table["size"] = [len(shadow) for shadow in shadows]
            table["shadow"] = [address_of(shadow) for shadow in shadows]
            self._table = table, address_of(table)
        return self._table

    def describe(self, address: int) -> str:
        """Which allocation an address is in, or follows."""
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return "below every allocation"
        base = self._bases[index]
        _, shadow, name = self.allocations[base]
        return f"byte {address - base} of {name}, which has {len(shadow)}"
