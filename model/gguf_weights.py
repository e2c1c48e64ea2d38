"""A GGUF's tensors as the model.safetensors of a converted folder.

Matrices whose type has a block format (gguf_blocks.py) stay in 4 or 8 bits: a part NAME of
layout.py is then three tensors, as quantized_tensors.py reads them.

    NAME.codes    U8 [out, in * bits / 8]
    NAME.scales   F32 [out, in / group]
    NAME.offsets  F32 [out, in / group]

All others are one tensor NAME: F16 and BF16 as they are, the rest, and every vector, in float32.
The parts of a group that the loader fuses are stored alike, and what it stacks lies back to back in
the file and aligned, so that loading maps it in place.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cuengine.counted import counted
from cuengine.errors import ModelError
from cuengine.model.config import ModelConfig
from cuengine.model.gguf_blocks import BLOCK_FORMATS, dequantized
from cuengine.model.gguf_file import GgufFile, GgufTensor
from cuengine.model.layout import Part, all_groups
from cuengine.model.quantized_tensors import KINDS
from cuengine.quantized import Bits

logger = logging.getLogger(__name__)

ROPE_DIVISORS = "rope_freqs.weight"

_CHUNK_NUMBERS = 8 * 2**20
_ALIGNMENT = 64

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FLOATS = {0: "F32", 1: "F16", 30: "BF16"}
"""Types that safetensors has too, by their numbers in GGUF."""
_ITEM_SIZES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}


class _Codes(NamedTuple):
    """How a quantized group is stored."""

    bits: Bits
    group: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Parts that are stored alike: with codes, or as tensors of a dtype of safetensors.

    sources  the GGUF tensor of each; None for a bias that is to be zero
    """

    parts: Sequence[Part]
    sources: Sequence[GgufTensor | None]
    form: _Codes | str


class _Tensor(NamedTuple):
    """A tensor of the file that is written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return _ITEM_SIZES[self.dtype] * math.prod(self.shape)


def write_weights(path: Path, gguf: GgufFile, config: ModelConfig, *, progress: bool) -> None:
    """Write all weights that the config means, some megabytes at a time.

    Raises ModelError where tensors are missing, of another shape or too many, and before writing
    where the disk has too little room.
    """
    groups = [_group(gguf, parts) for parts in all_groups(config)]
    _refuse_unknown_tensors(gguf, groups)
    # Those with items of two bytes at the end: what follows them may be at no multiple of four, as
    # is all that follows others; codes come in rows of multiples of 16 bytes.
    groups.sort(key=lambda group: group.form in ("F16", "BF16"))
    tensors = dict(item for group in groups for item in _tensors(group))
    total = sum(tensor.num_bytes for tensor in tensors.values())
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise ModelError(
            f"{path.parent.parent}: {total / 1e9:.2f} GB are needed there for the converted model "
            f"and {free / 1e9:.2f} GB are free. Set CUENGINE_CACHE to a folder on another disk"
        )
    what = f"Converting {gguf.path.name}: {total / 1e6:.0f} MB of weights"
    logger.info("%s", what)
    say(f"{what} …", progress)
    bar = tqdm(
        total=total,
        desc=f"Converting {gguf.path.name}",
        unit="B",
        unit_scale=True,
        disable=not (progress and sys.stderr.isatty()),
    )
    with bar, path.open("wb") as file:
        output = _Output(file, tensors, bar)
        for group in groups:
            for part, source in zip(group.parts, group.sources, strict=True):
                _write_part(output, gguf, part, source, group.form, _row_order(part, config))
        file.flush()
        os.fsync(file.fileno())


def say(text: str, progress: bool) -> None:
    """A line for whoever reads a log; in a terminal there is a bar."""
    if progress and not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


# What becomes of each tensor ----------------------------------------------------------------------


def _group(gguf: GgufFile, parts: Sequence[Part]) -> _Group:
    sources = [_source(gguf, part) for part in parts]
    form: _Codes | str = "F32"
    if len(parts[0].shape) == 2:
        types = {source.type_id for source in sources if source}
        formats = [BLOCK_FORMATS[type_id] for type_id in types if type_id in BLOCK_FORMATS]
        if len(formats) == len(types):
            # What fits the most demanding of them, known before any is read.
            form = _Codes(max(f.bits for f in formats), min(f.group for f in formats))
        elif len(types) == 1:
            form = _FLOATS.get(types.pop(), "F32")
    return _Group(parts, sources, form)


def _source(gguf: GgufFile, part: Part) -> GgufTensor | None:
    """The GGUF tensor that a checkpoint's comes from; None for a bias that is to be zero."""
    stem, _, suffix = part.name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
        index, _, stem = stem.removeprefix("model.layers.").partition(".")
        prefix = f"blk.{index}."
    name = f"{prefix}{_NAMES[stem]}.{suffix}"
    tensor = gguf.tensors.get(name)
    if tensor is None and suffix == "bias":
        return None
    if tensor is None:
        raise ModelError(f"{gguf.path}: tensor {name!r} is missing; the metadata ask for it")
    if tensor.shape != part.shape:
        raise ModelError(
            f"{gguf.path}: tensor {name!r} has shape {list(tensor.shape)} where the metadata mean "
            f"{list(part.shape)}"
        )
    return tensor


def _refuse_unknown_tensors(gguf: GgufFile, groups: Sequence[_Group]) -> None:
    used = {source.name for group in groups for source in group.sources if source}
    unknown = [name for name in gguf.tensors if name not in used | {ROPE_DIVISORS}]
    if unknown:
        raise ModelError(
            f"{gguf.path}: has {counted(len(unknown), 'tensor')} that no LLaMA model has, such as "
            f"{unknown[0]!r}"
        )


def _tensors(group: _Group) -> Iterator[tuple[str, _Tensor]]:
    """Names and tensors of a group, in the order of the file."""
    form = group.form
    if isinstance(form, str):
        for part in group.parts:
            yield part.name, _Tensor(form, part.shape)
        return
    for kind in KINDS:
        for part in group.parts:
            rows, columns = part.shape
            if kind == "codes":
                tensor = _Tensor("U8", (rows, columns * form.bits // 8))
            else:
                tensor = _Tensor("F32", (rows, columns // form.group))
            yield f"{part.name}.{kind}", tensor


# Writing ------------------------------------------------------------------------------------------


class _Output:
    """A safetensors file with a place for each tensor, to be filled in any order."""

    def __init__(self, file: IO[bytes], tensors: Mapping[str, _Tensor], bar: tqdm[Any]) -> None:
        self._file = file
        self._bar = bar
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {}
        offset = 0
        for name, tensor in tensors.items():
            end = offset + tensor.num_bytes
            header[name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [offset, end],
            }
            self._starts[name] = offset
            offset = end
        text = json.dumps(header).encode()
        # Spaces, so that the data begin on a cache line.
        padded = text.ljust(-(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8)
        file.write(len(padded).to_bytes(8, "little") + padded)
        self._data_start = 8 + len(padded)

    def put(self, name: str, row: int, values: NDArray[Any]) -> None:
        """Write a tensor's rows from `row` on, all of the same number of bytes."""
        row_bytes = values.nbytes // len(values)
        self._file.seek(self._data_start + self._starts[name] + row * row_bytes)
        self._file.write(np.ascontiguousarray(values).data)
        self._bar.update(values.nbytes)


def _write_part(
    output: _Output,
    gguf: GgufFile,
    part: Part,
    source: GgufTensor | None,
    form: _Codes | str,
    order: NDArray[np.intp] | None,
) -> None:
    if source is None:
        output.put(part.name, 0, np.zeros(part.shape, np.float32))
        return
    rows = gguf.rows(source)
    if len(part.shape) == 1:
        vector = dequantized(rows, source.type_id).ravel()
        output.put(part.name, 0, vector if order is None else vector[order])
        return
    step = max(1, _CHUNK_NUMBERS // part.shape[1])
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step] if order is None else rows[order[start : start + step]]
        if isinstance(form, _Codes):
            matrix = BLOCK_FORMATS[source.type_id].matrix(chunk).widened(*form)
            for kind in KINDS:
                output.put(f"{part.name}.{kind}", start, getattr(matrix, kind))
        elif form == _FLOATS.get(source.type_id):
            output.put(part.name, start, chunk)
        else:
            output.put(part.name, start, dequantized(chunk, source.type_id))
    gguf.release(source)


def _row_order(part: Part, config: ModelConfig) -> NDArray[np.intp] | None:
    """Which row of the GGUF tensor each row of the checkpoint's is, where they differ: in q and k.

    llama.cpp rotates neighbours (2i, 2i + 1), transformers (i, i + head_dim / 2), so llama.cpp's
    converter interleaves the two halves of each head (`LlamaModel.permute`).
    """
    if "self_attn.q_proj" not in part.name and "self_attn.k_proj" not in part.name:
        return None
    rows = np.arange(part.shape[0]).reshape(-1, config.head_dim // 2, 2)
    return rows.swapaxes(1, 2).ravel()
