"""Random weights of 4 and 8 bits, for tests."""

from __future__ import annotations

import numpy as np

from cuengine.quantized import Bits, QuantizedMatrix


def random_quantized(
    rows: int, width: int, *, bits: Bits, group: int, seed: int = 0
) -> tuple[QuantizedMatrix, np.ndarray]:
    """With half-precision scales and offsets, as GGUF has them; and its numbers in float64."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 1 << bits, (rows, width), dtype=np.uint8)
    scales, offsets = (
        draw.standard_normal((rows, width // group)).astype(np.float16).astype(np.float32)
        for _ in range(2)
    )
    wide_scales, wide_offsets = (np.repeat(a.astype(float), group, 1) for a in (scales, offsets))
    matrix = QuantizedMatrix.pack(codes, scales, offsets, bits=bits)
    return matrix, codes * wide_scales + wide_offsets
