"""Weights laid out for products: PANEL rows of w side by side, [ceil(out / PANEL), in, PANEL].

BLAS repacks its operands in every call, which at the few rows of a decode step costs as much as the
product itself, and it has no good kernel for 2 to 16 rows. Weights don't change, so they are packed
once, on loading. The products are in products.py, which takes Numba; nothing here does, so that
weights are packed while Numba loads.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cuengine.batch import Float32, Int32
from cuengine.device.llvm import LANES

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


class Arena:
    """Memory for panels, taken from the kernel in large pieces that may lie in huge pages.

    A product reads every weight once; with pages of 4 KB, looking up addresses slows it by a tenth
    at 37 rows and by a third at one.
    """

    _PIECE = 64 << 20

    def __init__(self) -> None:
        self._free: memoryview[int] = memoryview(b"")

    def take(self, num_floats: int) -> Float32:
        """float32 [num_floats], aligned to cache lines."""
        size = -(-4 * num_floats // LINE) * LINE
        if size > len(self._free):
            piece = mmap.mmap(-1, max(size, self._PIECE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    piece.madvise(mmap.MADV_HUGEPAGE)
            self._free = memoryview(piece)
        taken, self._free = self._free[:size], self._free[size:]
        return np.frombuffer(taken, np.float32, num_floats)


def pack(weight: Float32, arena: Arena) -> PackedMatrix:
    """Lay out a weight float32 [out_features, in_features]; a copy of the same size."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    panels = arena.take(num_panels * in_features * PANEL).reshape(num_panels, in_features, PANEL)
    whole = out_features // PANEL
    rows = weight[: whole * PANEL].reshape(whole, PANEL, in_features)
    panels[:whole] = rows.transpose(0, 2, 1)
    if whole < num_panels:
        panels[whole] = 0
        panels[whole, :, : out_features - whole * PANEL] = weight[whole * PANEL :].T
    return PackedMatrix(panels, out_features)
