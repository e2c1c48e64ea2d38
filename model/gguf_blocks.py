"""GGML's block formats as codes, scales and offsets.

Of the formats whose numbers are scale * code + offset, each number comes out as the gguf package's
dequantizer makes it, to the bit. (An infinite scale, which no useful file has, can give NaN where
that gives infinity.) That takes scale * code to be exact in float32, which has 24 bits: a block's
scale in half precision has 11, times a group's own scale of up to 7 where there is one, times the
code. Where numbers are scale * (code - zero), these have no more bits: the sum is exact too.

Formats with other numbers (lattices, floating point) and rare ones are left to that dequantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuengine.batch import Float32
from cuengine.quantized import Bits, QuantizedMatrix, UInt8

Fields = tuple[UInt8, Float32, Float32]
"""Codes [blocks, items], scales [blocks, groups] and offsets, the same."""


class BlockFormat(NamedTuple):
    """How to read blocks of num_bytes each; bits and group as in QuantizedMatrix."""

    num_bytes: int
    bits: Bits
    group: int
    read: Callable[[UInt8], Fields]
    """From uint8 [blocks, num_bytes]."""

    def matrix(self, rows: UInt8) -> QuantizedMatrix:
        """From whole rows of blocks, uint8 [rows, bytes per row]."""
        num_rows = len(rows)
        # Scales may be infinite or NaN: the file is not trusted.
        with np.errstate(all="ignore"):
            codes, scales, offsets = self.read(rows.reshape(-1, self.num_bytes))
        return QuantizedMatrix.pack(
            codes.reshape(num_rows, -1),
            scales.reshape(num_rows, -1),
            offsets.reshape(num_rows, -1),
            bits=self.bits,
        )


def _fields(data: UInt8, width: int, bits: int) -> UInt8:
    """Numbers of so many bits from planes: every `width` bytes hold `width` of them in their lowest
    bits, then as many in the next ones, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = data.reshape(len(data), -1, 1, width) >> shifts & np.uint8(2**bits - 1)
    return planes.reshape(len(data), -1)


def _half(data: UInt8) -> Float32:
    """float32 [blocks, 1] of two bytes each."""
    return data.view("<f2").astype(np.float32)


def _q4_0(blocks: UInt8) -> Fields:
    scales = _half(blocks[:, :2])
    return _fields(blocks[:, 2:], 16, 4), scales, -8 * scales


def _q4_1(blocks: UInt8) -> Fields:
    return _fields(blocks[:, 4:], 16, 4), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5(high: UInt8, low: UInt8) -> UInt8:
    return _fields(low, 16, 4) | _fields(high, 1, 1) << np.uint8(4)


def _q5_0(blocks: UInt8) -> Fields:
    scales = _half(blocks[:, :2])
    return _q5(blocks[:, 2:6], blocks[:, 6:]), scales, -16 * scales


def _q5_1(blocks: UInt8) -> Fields:
    codes = _q5(blocks[:, 4:8], blocks[:, 8:])
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: UInt8) -> Fields:
    scales = _half(blocks[:, :2])
    # Signed bytes, from -128 on.
    return blocks[:, 2:] ^ np.uint8(128), scales, -128 * scales


def _q2_k(blocks: UInt8) -> Fields:
    scales = _half(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    minima = _half(blocks[:, 82:84]) * (blocks[:, :16] >> 4)
    return _fields(blocks[:, 16:80], 32, 2), scales, -minima


def _q3_k(blocks: UInt8) -> Fields:
    low, high = _fields(blocks[:, 96:104], 8, 4), _fields(blocks[:, 104:108], 4, 2)
    scales = _half(blocks[:, 108:]) * _signed(low | high << np.uint8(4), 32)
    # The third bit is set where nothing is to be subtracted.
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << np.uint8(2)
    return codes, scales, -4 * scales


def _signed(codes: UInt8, zero: int) -> Float32:
    return codes.astype(np.float32) - np.float32(zero)


def _q4_k(blocks: UInt8) -> Fields:
    return _fields(blocks[:, 16:], 32, 4), *_scales_and_minima(blocks)


def _q5_k(blocks: UInt8) -> Fields:
    high = _fields(blocks[:, 16:48], 32, 1)
    codes = _fields(blocks[:, 48:], 32, 4) | high << np.uint8(4)
    return codes, *_scales_and_minima(blocks)


def _scales_and_minima(blocks: UInt8) -> tuple[Float32, Float32]:
    """Scales and offsets of 8 groups, of Q4_K and Q5_K: 6 bits each in 12 bytes.

    The first four scales and minima have a byte each, whose two highest bits are those of the last
    four; these have their other bits, a scale and a minimum, in a byte.
    """
    scales, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([scales & 63, rest & 15 | scales >> 6 << 4], axis=1)
    minima = np.concatenate([minima & 63, rest >> 4 | minima >> 6 << 4], axis=1)
    return _half(blocks[:, :2]) * scales, -(_half(blocks[:, 2:4]) * minima)


def _q6_k(blocks: UInt8) -> Fields:
    # The widest product: 11 bits, 7 of the group's scale (-128 is a power of two), 6 of the code.
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    high = _fields(blocks[:, 128:192], 32, 2)
    codes = _fields(blocks[:, :128], 64, 4) | high << np.uint8(4)
    return codes, scales, -32 * scales


_CODEBOOK = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_CODEBOOK_CODES = np.array(_CODEBOOK).astype(np.uint8) ^ np.uint8(128)


def _iq4_nl(blocks: UInt8) -> Fields:
    scales = _half(blocks[:, :2])
    return _CODEBOOK_CODES[_fields(blocks[:, 2:], 16, 4)], scales, -128 * scales


def _iq4_xs(blocks: UInt8) -> Fields:
    low, high = _fields(blocks[:, 4:8], 1, 4), _fields(blocks[:, 2:4], 1, 2)
    # 24 bits with the code: of 6 signed bits, -32 is a power of two, and the others have 5.
    scales = _half(blocks[:, :2]) * _signed(low | high << np.uint8(4), 32)
    return _CODEBOOK_CODES[_fields(blocks[:, 8:], 16, 4)], scales, -128 * scales


BLOCK_FORMATS = {
    2: BlockFormat(18, 4, 32, _q4_0),
    3: BlockFormat(20, 4, 32, _q4_1),
    6: BlockFormat(22, 8, 32, _q5_0),
    7: BlockFormat(24, 8, 32, _q5_1),
    8: BlockFormat(34, 8, 32, _q8_0),
    10: BlockFormat(84, 4, 16, _q2_k),
    11: BlockFormat(110, 4, 16, _q3_k),
    12: BlockFormat(144, 4, 32, _q4_k),
    13: BlockFormat(176, 8, 32, _q5_k),
    14: BlockFormat(210, 8, 16, _q6_k),
    20: BlockFormat(18, 8, 32, _iq4_nl),
    23: BlockFormat(136, 8, 32, _iq4_xs),
}
"""By the number of the type, a GGMLQuantizationType."""


def dequantized(rows: UInt8, type_id: int) -> Float32:
    """float32 [rows, items] of whole rows of bytes, of any type that the gguf package knows."""
    from gguf.constants import GGMLQuantizationType  # takes as long to import as all of the rest
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        return dequantize(rows, GGMLQuantizationType(type_id))
