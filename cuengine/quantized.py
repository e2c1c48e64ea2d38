"""Weights of 4 or 8 bits, between a checkpoint that has them and a device that keeps them so.

Every number is scale * code + offset, with a scale and an offset for each group of neighbours in a
row. Most of GGUF's block formats are of this kind, whatever order they keep their bits in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Float32

Bits = Literal[4, 8]
UInt8 = NDArray[np.uint8]

GROUP_MULTIPLE = 4
"""A group is a multiple of that: kernels take as many columns at once."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight [out_features, in_features].

    codes    uint8 [out, in * bits / 8]; of 4 bits, byte i of a row has the code of column i in its
             low half and that of column in / 2 + i in its high half
    scales   float32 [out, in / group]
    offsets  the same

    scale * code is exact in float32: a number takes one rounding, that of the sum, so that a fused
    multiply-add and two operations make the same of it.
    """

    codes: UInt8
    scales: Float32
    offsets: Float32
    in_features: int

    @classmethod
    def pack(
        cls, codes: UInt8, scales: Float32, offsets: Float32, *, bits: Bits
    ) -> QuantizedMatrix:
        """From codes uint8 [out, in] of at most that many bits. `in` is even."""
        in_features = codes.shape[1]
        if bits == 4:
            half = in_features // 2
            codes = codes[:, :half] | codes[:, half:] << np.uint8(4)
        return cls(codes, scales, offsets, in_features)

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def bits(self) -> Bits:
        return 8 if self.codes.shape[1] == self.in_features else 4

    @property
    def group(self) -> int:
        """Neighbours in a row that share a scale and an offset."""
        return self.in_features // int(self.scales.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Rows [start, stop), in place."""
        part = slice(start, stop)
        return QuantizedMatrix(
            self.codes[part], self.scales[part], self.offsets[part], self.in_features
        )

    def unpacked_codes(self) -> UInt8:
        """uint8 [out, in]: one code a byte. The codes themselves where they have 8 bits."""
        if self.bits == 8:
            return self.codes
        return np.concatenate([self.codes & 15, self.codes >> 4], axis=1)

    def dequantize(self) -> Float32:
        """float32 [out, in]."""
        shape = (self.out_features, -1, self.group)
        numbers = self.unpacked_codes().reshape(shape).astype(np.float32)
        numbers *= self.scales[:, :, None]
        numbers += self.offsets[:, :, None]
        return numbers.reshape(self.out_features, self.in_features)

    def widened(self, bits: Bits, group: int) -> QuantizedMatrix:
        """The same numbers with codes of at least as many bits, in groups that divide these."""
        if (bits, group) == (self.bits, self.group):
            return self
        times = self.group // group
        scales, offsets = (np.repeat(a, times, axis=1) for a in (self.scales, self.offsets))
        return QuantizedMatrix.pack(self.unpacked_codes(), scales, offsets, bits=bits)
