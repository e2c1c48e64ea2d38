"""From a model folder to the weights of a `Llama` on a device.

Fuses q, k, v and gate, up, converts to the device's dtype and uploads, one matrix at a time. Where
a fused matrix already lies in the file in the right dtype, as the GGUF conversion writes it, the
device is given a view of the file, and decides itself whether to copy it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cuengine.counted import counted
from cuengine.device.interface import Array, Device
from cuengine.errors import ModelError
from cuengine.model.config import ModelConfig
from cuengine.model.layout import Part, all_parts, layer_groups, outer_parts
from cuengine.model.llama import LayerWeights, LlamaWeights
from cuengine.model.quantized_tensors import (
    is_quantized,
    read_quantized,
    require_quantized,
    saved_bytes,
    tensor_names,
)
from cuengine.model.rope import cos_sin_table
from cuengine.model.safetensors_file import Checkpoint
from cuengine.quantized import QuantizedMatrix

logger = logging.getLogger(__name__)

_DEQUANTIZED_AT_ONCE = 2**20
"""Numbers; some megabytes in float32, which stay in a cache."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def load_weights(
    folder: Path, config: ModelConfig, device: Device, *, max_model_len: int, progress: bool
) -> LlamaWeights:
    """Load the weights; positions up to max_model_len get their cosines and sines.

    Needs at most the weights in the device's dtype plus the largest tensor. Raises ModelError where
    a file or tensor is missing or damaged, and before loading where the weights cannot fit.
    """
    checkpoint = _open_checked(folder, config)
    dtype = _DTYPES[device.dtype]
    table_bytes = 4 * max_model_len * config.head_dim
    needed = weight_bytes(config, dtype.itemsize) + table_bytes
    if device.keeps_quantized:
        needed -= saved_bytes(checkpoint, all_parts(config), dtype.itemsize)
    require_memory(needed, device, str(folder))

    def load(parts: Sequence[Part]) -> Array:
        fused: NDArray[Any] | QuantizedMatrix
        if any(is_quantized(checkpoint, part) for part in parts):
            fused = read_quantized(checkpoint, parts)
            if not device.keeps_quantized:
                fused = _dequantized(fused, dtype)
        else:
            fused = _fused(checkpoint, parts, dtype)
        if isinstance(fused, QuantizedMatrix) or fused.ndim == 2:
            array = device.upload_matrix(fused)
        else:
            array = device.upload(fused)
        if array is not fused:
            for part in parts:
                for name in tensor_names(checkpoint, part):
                    checkpoint.release(name)
        return array

    outer = {field: load([part]) for field, part in outer_parts(config).items()}
    layers = [
        LayerWeights(**{field: load(parts) for field, parts in layer_groups(config, index).items()})
        # Shown only where loading takes a while.
        for index in tqdm(
            range(config.num_layers),
            desc="Loading weights",
            unit="layer",
            disable=not (progress and sys.stderr.isatty()),
            delay=1.0,
            leave=False,
        )
    ]
    return LlamaWeights(
        embedding=outer["embedding"],
        layers=layers,
        norm=outer["norm"],
        lm_head=outer.get("lm_head", outer["embedding"]),
        cos_sin=device.upload(cos_sin_table(config, max_model_len)),
    )


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raises ModelError as load_weights does for a missing or damaged file or tensor."""
    _open_checked(folder, config)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights at `itemsize` bytes each; tied ones count once."""
    return itemsize * sum(math.prod(part.shape) for part in all_parts(config))


def require_memory(needed: int, device: Device, model: str) -> None:
    """Raise ModelError where the device has less than `needed` bytes free."""
    free = device.free_memory()
    if needed > free:
        raise ModelError(
            f"{model}: its weights need {_gib(needed)} in {device.dtype} and {_gib(free)} are free "
            f"on {device.name}. Free some memory, or use a smaller model"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _open_checked(folder: Path, config: ModelConfig) -> Checkpoint:
    """The folder's tensors, after a check that all that the config means are there."""
    checkpoint = Checkpoint(folder)
    parts = all_parts(config)
    for part in parts:
        if is_quantized(checkpoint, part):
            require_quantized(checkpoint, part)
        else:
            checkpoint.require(part.name, part.shape)
    known = {name for part in parts for name in tensor_names(checkpoint, part)} | {"lm_head.weight"}
    unknown = [
        name
        for name in checkpoint.tensors
        # Older checkpoints store the rotary frequencies, which follow from the config.
        if name not in known and not name.endswith("rotary_emb.inv_freq")
    ]
    if unknown:
        logger.warning(
            "%s: ignoring %s that a %s has no use for, such as %s",
            folder,
            counted(len(unknown), "tensor"),
            config.architecture,
            unknown[0],
        )
    return checkpoint


def _fused(checkpoint: Checkpoint, parts: Sequence[Part], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The parts stacked along the first axis: a view of the file where it has them so."""
    view = checkpoint.stacked_view([part.name for part in parts])
    if view is not None and view.dtype == dtype:
        return view
    del view
    rows = sum(part.shape[0] for part in parts)
    fused = np.empty((rows, *parts[0].shape[1:]), dtype)
    row = 0
    for part in parts:
        end = row + part.shape[0]
        np.copyto(fused[row:end], checkpoint.view(part.name), casting="unsafe")
        # Now, not when all is fused: the file's pages count as this process's memory too.
        checkpoint.release(part.name)
        row = end
    return fused


def _dequantized(matrix: QuantizedMatrix, dtype: np.dtype[Any]) -> NDArray[Any]:
    numbers = np.empty((matrix.out_features, matrix.in_features), dtype)
    # Some megabytes at a time: float32 may be twice what dtype takes.
    step = max(1, _DEQUANTIZED_AT_ONCE // matrix.in_features)
    for start in range(0, matrix.out_features, step):
        rows = matrix.rows(start, start + step)
        numbers[start : start + step] = rows.dequantize()
    return numbers
