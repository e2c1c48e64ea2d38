"""A model folder for engines that read no quantized tensors as a converted GGUF has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from cuengine.model.config import read_model_config
from cuengine.model.layout import all_parts
from cuengine.model.quantized_tensors import is_quantized, read_quantized
from cuengine.model.safetensors_file import Checkpoint


def float32_folder(folder: Path) -> Path:
    """The model with all its weights in float32, beside the folder and made once.

    The folder itself where nothing in it is quantized.
    """
    checkpoint = Checkpoint(folder)
    if not any(name.endswith(".codes") for name in checkpoint.tensors):
        return folder
    target = folder.with_name(f"{folder.name}-float32")
    if not target.is_dir():
        weights = {
            part.name: read_quantized(checkpoint, [part]).dequantize()
            if is_quantized(checkpoint, part)
            else checkpoint.view(part.name).astype(np.float32)
            for part in all_parts(read_model_config(folder))
        }
        temporary = target.with_name(f"{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(folder, temporary, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(target)
    return target
