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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Float32, Int32
from cuengine.device.llvm import LANES
from cuengine.quantized import QuantizedMatrix, UInt8

VECTORS = 2
PANEL = LANES * VECTORS
LINE = 64
"""Bytes of a cache line, and the alignment of panels."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [out_features, in_features].

    panels  float32 [ceil(out_features / PANEL), in_features, PANEL], the last one padded with 0
    """

    panels: Float32
    out_features: int

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

    codes    uint8 [ceil(out_features / PANEL), in_features, PANEL * bits / 8]; of 4 bits, byte j
             has the code of the panel's row j in its low half, and that of LANES + j in its high
    scales   float32 [ceil(out_features / PANEL), in_features / group, PANEL], 0 in rows too many
    offsets  the same
    """

    codes: UInt8
    scales: Float32
    offsets: Float32
    out_features: int

    def rows(self, ids: Int32) -> Float32:
        """float32 [len(ids), in_features]: rows of the weight, as an embedding takes them."""
        panels, places = ids // PANEL, ids % PANEL
        if self.codes.shape[2] == PANEL:
            codes = self.codes[panels, :, places]
        else:
            high = places // LANES
            codes = (
                self.codes[panels, :, places % LANES] >> (4 * high[:, None]).astype(np.uint8) & 15
            )
        scales, offsets = self.scales[panels, :, places], self.offsets[panels, :, places]
        return _numbers(codes, scales, offsets, axis=1)

    def multiply(self, x: Float32, out: Float32) -> None:
        """The product in NumPy, for where Numba turns out not to work."""
        for panel, packed in enumerate(self.codes):
            codes = packed
            if packed.shape[1] != PANEL:
                codes = np.concatenate([packed & 15, packed >> 4], axis=1)
            weight = _numbers(codes, self.scales[panel], self.offsets[panel], axis=0)
            columns = out[:, panel * PANEL : (panel + 1) * PANEL]
            columns[:] = (x @ weight)[:, : columns.shape[1]]


def _numbers(codes: UInt8, scales: Float32, offsets: Float32, *, axis: int) -> Float32:
    """float32: what codes stand for. axis: that of the input, along which groups lie."""
    group = codes.shape[axis] // scales.shape[axis]
    numbers = codes.astype(np.float32)
    numbers *= np.repeat(scales, group, axis)
    numbers += np.repeat(offsets, group, axis)
    return numbers


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
    num_panels, width = -(-weight.out_features // PANEL), weight.in_features
    num_groups = weight.scales.shape[1]
    codes = arena.bytes(num_panels, width, PANEL * weight.bits // 8)
    scales, offsets = (arena.floats(num_panels, num_groups, PANEL) for _ in range(2))
    _fill_panels(scales, weight.scales)
    _fill_panels(offsets, weight.offsets)
    if weight.bits == 8:
        _fill_panels(codes, weight.codes)
    else:
        # The halves of a panel's rows, each of the halves of a row.
        half = width // 2
        panels = np.empty((num_panels, half, PANEL), np.uint8)
        _fill_panels(panels, weight.codes)
        low, high = panels[:, :, :LANES], panels[:, :, LANES:]
        np.bitwise_or(low & 15, high << 4, out=codes[:, :half])
        np.bitwise_or(low >> 4, high & 0xF0, out=codes[:, half:])
    return NarrowMatrix(codes, scales, offsets, weight.out_features)


def _fill_panels(panels: NDArray[Any], rows: NDArray[Any]) -> None:
    """panels [ceil(out / PANEL), n, PANEL] from [out, n]; 0 in rows too many."""
    whole, rest = divmod(len(rows), PANEL)
    panels[:whole] = rows[: whole * PANEL].reshape(whole, PANEL, rows.shape[1]).transpose(0, 2, 1)
    if rest:
        panels[whole] = 0
        panels[whole, :, :rest] = rows[whole * PANEL :].T
