"""Weights laid out for products: PANEL rows of w side by side, [ceil(out / PANEL), in, PANEL].

BLAS repacks its operands in every call, which at the few rows of a decode step costs as much as the
product itself, and it has no good kernel for 2 to 16 rows. Weights don't change, so they are packed
once, on loading. The products are in products.py, which takes Numba; nothing here does, so that
weights are packed while Numba loads.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Float32, Int32
from cuengine.device.llvm import LANES
from cuengine.quantized import Bits, QuantizedMatrix, UInt8

VECTORS = 2
PANEL = LANES * VECTORS
LINE = 64
"""Bytes of a cache line, and the alignment of panels."""
_CODES_AT_ONCE = 1 << 18
"""Bytes of codes that are laid out at once."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [out_features, in_features].

    panels  float32 [ceil(out_features / PANEL), in_features, PANEL], the last one padded with 0
    """

    panels: Float32
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def rows(self, ids: Int32) -> Float32:
        """float32 [len(ids), in_features]: rows of the weight, as an embedding takes them."""
        gathered: Float32 = self.panels[ids // PANEL, :, ids % PANEL]
        return gathered

    def multiply(self, x: Float32, out: Float32) -> None:
        """The product in NumPy, for where Numba turns out not to work."""
        products = np.matmul(x, self.panels).transpose(1, 0, 2)
        out[:] = products.reshape(len(x), -1)[:, : self.out_features]


@dataclass(frozen=True, slots=True)
class NarrowMatrix:
    """A weight [out_features, in_features] of 4 or 8 bits: numbers are scale * code + offset.

    groups  uint8 [ceil(out_features / PANEL), in_features / group, group bytes]: for each group of
            columns the PANEL scales and PANEL offsets, float32, and then its codes, uint8
            [group, PANEL * bits / 8]. So products read memory from one end to the other. Of 4 bits,
            byte j of a column has the code of the panel's row j in its low half, and that of row
            LANES + j in its high half.
    """

    groups: UInt8
    out_features: int
    in_features: int
    bits: Bits

    @classmethod
    def empty(cls, like: QuantizedMatrix, arena: Arena) -> NarrowMatrix:
        """Room for that one."""
        num_bytes = 2 * 4 * PANEL + like.group * PANEL * like.bits // 8
        num_panels, num_groups = -(-like.out_features // PANEL), like.scales.shape[1]
        groups = arena.bytes(num_panels, num_groups, num_bytes)
        return cls(groups, like.out_features, like.in_features, like.bits)

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes

    @property
    def group(self) -> int:
        """Columns that share scales and offsets."""
        return self.in_features // int(self.groups.shape[1])

    @property
    def scales(self) -> Float32:
        """float32 [panels, in / group, PANEL], in place."""
        return self.groups[:, :, : 4 * PANEL].view(np.float32)

    @property
    def offsets(self) -> Float32:
        """The same."""
        return self.groups[:, :, 4 * PANEL : 8 * PANEL].view(np.float32)

    @property
    def codes(self) -> UInt8:
        """uint8 [panels, in / group, group, PANEL * bits / 8], in place."""
        num_panels, num_groups, _ = self.groups.shape
        codes = self.groups[:, :, 8 * PANEL :]
        return codes.reshape(num_panels, num_groups, self.group, -1)

    def rows(self, ids: Int32) -> Float32:
        """float32 [len(ids), in_features]: rows of the weight, as an embedding takes them."""
        panels, places = ids // PANEL, ids % PANEL
        if self.bits == 8:
            codes = self.codes[panels, :, :, places]
        else:
            both = self.codes[panels, :, :, places % LANES]
            codes = np.where(places[:, None, None] < LANES, both & 15, both >> 4)
        numbers = codes.astype(np.float32)
        numbers *= self.scales[panels, :, places][:, :, None]
        numbers += self.offsets[panels, :, places][:, :, None]
        return numbers.reshape(len(ids), -1)

    def multiply(self, x: Float32, out: Float32) -> None:
        """The product in NumPy, for where Numba turns out not to work."""
        for first in range(0, self.out_features, PANEL):
            ids = np.arange(first, min(first + PANEL, self.out_features), dtype=np.int32)
            out[:, ids] = x @ self.rows(ids).T


class Arena:
    """Memory for panels, taken from the kernel in large pieces that may lie in huge pages.

    A product reads every weight once; with pages of 4 KB, looking up addresses slows it by a tenth
    at 37 rows and by a third at one.
    """

    _PIECE = 64 << 20

    def __init__(self) -> None:
        self._free: memoryview[int] = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview[int]:
        """Memory aligned to cache lines."""
        size = -(-num_bytes // LINE) * LINE
        if size > len(self._free):
            piece = mmap.mmap(-1, max(size, self._PIECE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    piece.madvise(mmap.MADV_HUGEPAGE)
            self._free = memoryview(piece)
        taken, self._free = self._free[:size], self._free[size:]
        return taken[:num_bytes]

    def floats(self, *shape: int) -> Float32:
        """float32 of that shape, with anything in it."""
        return np.frombuffer(self.take(4 * math.prod(shape)), np.float32).reshape(shape)

    def bytes(self, *shape: int) -> UInt8:
        """uint8 of that shape, with anything in it."""
        return np.frombuffer(self.take(math.prod(shape)), np.uint8).reshape(shape)


def pack(weight: Float32, arena: Arena) -> PackedMatrix:
    """Lay out a weight float32 [out_features, in_features]; a copy of the same size."""
    panels = arena.floats(-(-len(weight) // PANEL), weight.shape[1], PANEL)
    _fill_panels(panels, weight)
    return PackedMatrix(panels, len(weight))


def pack_narrow(weight: QuantizedMatrix, arena: Arena) -> NarrowMatrix:
    """The same for a weight of 4 or 8 bits."""
    narrow = NarrowMatrix.empty(weight, arena)
    # What is in work stays in the cache, and takes no memory to speak of.
    step = max(1, _CODES_AT_ONCE // (PANEL * weight.codes.shape[1]))
    for first in range(0, len(narrow.groups), step):
        rows = weight.rows(first * PANEL, (first + step) * PANEL)
        groups = narrow.groups[first : first + step]
        _fill_narrow(replace(narrow, groups=groups, out_features=rows.out_features), rows)
    return narrow


def _fill_narrow(narrow: NarrowMatrix, weight: QuantizedMatrix) -> None:
    _fill_panels(narrow.scales, weight.scales)
    _fill_panels(narrow.offsets, weight.offsets)
    num_panels, num_groups, group, _ = narrow.codes.shape
    columns = np.empty((num_panels, weight.codes.shape[1], PANEL), np.uint8)
    _fill_panels(columns, weight.codes)
    if weight.bits == 4:
        # Each byte of a row has two columns; each of a column is to have two rows.
        left, right = columns[:, :, :LANES], columns[:, :, LANES:]
        columns = np.concatenate([left & 15 | right << 4, left >> 4 | right & 0xF0], axis=1)
    narrow.codes[:] = columns.reshape(num_panels, num_groups, group, -1)


def _fill_panels(panels: NDArray[Any], rows: NDArray[Any]) -> None:
    """panels [ceil(out / PANEL), n, PANEL] from [out, n]; 0 in rows too many."""
    whole, rest = divmod(len(rows), PANEL)
    panels[:whole] = rows[: whole * PANEL].reshape(whole, PANEL, rows.shape[1]).transpose(0, 2, 1)
    if rest:
        panels[whole] = 0
        panels[whole, :, :rest] = rows[whole * PANEL :].T
