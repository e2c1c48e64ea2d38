"""Models of a real one's shape with random weights, from no file: the same ones for every engine.

A tensor is a window into one pool of random bfloat16 numbers, which repeats; where it begins
follows from the tensor's name. Needs NumPy only, for the process that has PyTorch.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_2_7B: dict[str, Any] = LLAMA_3_8B | {
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
TINY: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}

_PERIOD = 2**24 + 43
_SCALE = 0.02
_ONE = 0x3F80


class Pool:
    """bfloat16 numbers as their bits; seed: of all weights."""

    def __init__(self, seed: int) -> None:
        numbers = np.random.default_rng(seed).standard_normal(_PERIOD, np.float32) * np.float32(
            _SCALE
        )
        self._bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)

    def tensor(self, name: str, shape: Sequence[int]) -> NDArray[np.uint16]:
        """Its bits; ones for the weights of norms, which are the vectors."""
        if len(shape) == 1:
            return np.full(tuple(shape), _ONE, np.uint16)
        size = math.prod(shape)
        values = np.empty(size, np.uint16)
        start, filled = zlib.crc32(name.encode()) % _PERIOD, 0
        while filled < size:
            count = min(_PERIOD - start, size - filled)
            values[filled : filled + count] = self._bits[start : start + count]
            filled += count
            start = 0
        return values.reshape(tuple(shape))


@contextmanager
def random_checkpoint(config: dict[str, Any], seed: int, folder: Path) -> Iterator[Path]:
    """A model folder that the loader finds these weights in, as long as this lasts."""
    import ml_dtypes

    from cuengine.model import loader

    pool = Pool(seed)

    class RandomCheckpoint:
        """What loader.py asks of a checkpoint's files."""

        def __init__(self, folder: Path) -> None:
            self.tensors: dict[str, Any] = {}
            self.shapes: dict[str, tuple[int, ...]] = {}

        def require(self, name: str, shape: tuple[int, ...]) -> None:
            self.shapes[name] = shape

        def stacked_view(self, names: Sequence[str]) -> NDArray[Any] | None:
            return self.view(names[0]) if len(names) == 1 else None

        def view(self, name: str) -> NDArray[Any]:
            return pool.tensor(name, self.shapes[name]).view(ml_dtypes.bfloat16)

        def release(self, name: str) -> None:
            """Nothing is mapped."""

    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    real = loader.Checkpoint
    loader.Checkpoint = RandomCheckpoint  # type: ignore[assignment, misc]
    try:
        yield folder
    finally:
        loader.Checkpoint = real  # type: ignore[misc]
