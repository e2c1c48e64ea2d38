"""Quantized parts in safetensors: three tensors each, the arrays of a QuantizedMatrix.

The conversion of a GGUF writes them (gguf_weights.py). What is fused on loading has the same bits
and groups throughout, and lies back to back in the file, kind by kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.errors import ModelError
from cuengine.model.layout import Part
from cuengine.model.safetensors_file import Checkpoint
from cuengine.quantized import GROUP_MULTIPLE, QuantizedMatrix

KINDS = ("codes", "scales", "offsets")


def is_quantized(checkpoint: Checkpoint, part: Part) -> bool:
    return f"{part.name}.codes" in checkpoint.tensors


def tensor_names(checkpoint: Checkpoint, part: Part) -> list[str]:
    """Of the tensors that hold the part."""
    if not is_quantized(checkpoint, part):
        return [part.name]
    return [f"{part.name}.{kind}" for kind in KINDS]


def require_quantized(checkpoint: Checkpoint, part: Part) -> None:
    """Check that the part's tensors are there and fit each other. Raises ModelError."""
    rows, width = part.shape
    codes, scales, offsets = tensor_names(checkpoint, part)
    has_8_bits = checkpoint.shape(codes) == (rows, width)
    checkpoint.require(codes, (rows, width if has_8_bits else width // 2), ("U8",))
    num_groups = max(1, (*checkpoint.shape(scales), 1)[1])
    checkpoint.require(scales, (rows, num_groups), ("F32",))
    checkpoint.require(offsets, (rows, num_groups), ("F32",))
    if width % (num_groups * GROUP_MULTIPLE):
        raise ModelError(
            f"{checkpoint.folder}: tensor {scales!r} means {num_groups} groups in rows of {width}, "
            f"which are not groups of a multiple of {GROUP_MULTIPLE}"
        )


def read_quantized(checkpoint: Checkpoint, parts: Sequence[Part]) -> QuantizedMatrix:
    """The parts stacked along the first axis: views of the file where it has them so.

    Raises ModelError where they are not all of the same kind.
    """
    codes, scales, offsets = (
        _stacked(checkpoint, [f"{part.name}.{kind}" for part in parts]) for kind in KINDS
    )
    return QuantizedMatrix(codes, scales, offsets, parts[0].shape[1])


def _stacked(checkpoint: Checkpoint, names: Sequence[str]) -> NDArray[Any]:
    widths = {checkpoint.shape(name)[1:] for name in names}
    if len(widths) > 1:
        raise ModelError(
            f"{checkpoint.folder}: tensors {', '.join(map(repr, names))} differ in the length of "
            "their rows, and so cannot be stacked"
        )
    view = checkpoint.stacked_view(names)
    return np.concatenate([checkpoint.view(name) for name in names]) if view is None else view


def saved_bytes(checkpoint: Checkpoint, parts: Iterable[Part], itemsize: int) -> int:
    """How much less than `itemsize` bytes a number the parts take as they are."""
    saved = 0
    for part in parts:
        if is_quantized(checkpoint, part):
            saved += itemsize * math.prod(part.shape)
            saved -= sum(checkpoint.num_bytes(name) for name in tensor_names(checkpoint, part))
    return saved
