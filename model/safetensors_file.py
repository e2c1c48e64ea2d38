"""Safetensors files as memory maps: headers read and checked, tensors as views into the file.

Written here rather than taken from the `safetensors` package because that one copies every tensor
it is asked for; a view lets weights in the wanted dtype be used in place, straight from the page
cache. Nothing in a header is trusted. Which tensors a model needs is layout.py's business.

The format: 8 bytes of header length, little endian; a JSON header of that length with each tensor's
dtype, shape and byte range; then the data. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuengine.errors import ModelError
from cuengine.model.json_file import read_json_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# The limit of the reference implementation.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 8

_ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [start, end) of its file. dtype as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file. Raises ModelError where it is damaged, truncated or not safetensors at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.entries = _read_header(path, file.fileno())
                # Private and writable, so that arrays are no different from any other; nothing
                # writes to them, so that no page is ever copied.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None

    def view(self, entry: TensorEntry) -> NDArray[Any]:
        """The tensor in place, as an array of its own dtype; valid as long as it is referenced."""
        flat = np.frombuffer(
            self._map, _NUMPY_DTYPES[entry.dtype], math.prod(entry.shape), entry.start
        )
        return flat.reshape(entry.shape)

    def release(self, entry: TensorEntry) -> None:
        """Give back the memory of pages that were only read to be converted."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
            if entry.end > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)


class Checkpoint:
    """The safetensors of a model folder, single or sharded: every tensor's file and entry."""

    def __init__(self, folder: Path) -> None:
        """Read the headers. Raises ModelError, naming a missing or damaged file."""
        self.folder = folder
        self.tensors: dict[str, tuple[SafetensorsFile, TensorEntry]] = {}
        if (folder / SINGLE_NAME).exists():
            self._add(SafetensorsFile(folder / SINGLE_NAME))
        elif (folder / INDEX_NAME).exists():
            self._open_shards()
        else:
            raise ModelError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is in it")

    def _open_shards(self) -> None:
        weight_map = _read_index(self.folder / INDEX_NAME)
        for shard in sorted(set(weight_map.values())):
            path = self.folder / shard
            if not path.exists():
                held = sum(name == shard for name in weight_map.values())
                raise ModelError(
                    f"{path}: missing. The index in {INDEX_NAME} names it; {held} tensors are in it"
                )
            self._add(SafetensorsFile(path))
        for name, shard in weight_map.items():
            if name not in self.tensors or self.tensors[name][0].path.name != shard:
                raise ModelError(
                    f"{self.folder / shard}: tensor {name!r} is missing, which {INDEX_NAME} places "
                    "in it"
                )

    def _add(self, file: SafetensorsFile) -> None:
        for name, entry in file.entries.items():
            if name in self.tensors:
                raise ModelError(
                    f"{file.path}: tensor {name!r} is also in {self.tensors[name][0].path.name}"
                )
            self.tensors[name] = (file, entry)

    def shape(self, name: str) -> tuple[int, ...]:
        """() for a tensor that is not there."""
        return self.tensors[name][1].shape if name in self.tensors else ()

    def num_bytes(self, name: str) -> int:
        _, entry = self.tensors[name]
        return entry.end - entry.start

    def require(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = _FLOATS) -> None:
        """Check that a tensor is there with this shape and one of these dtypes."""
        if name not in self.tensors:
            raise ModelError(
                f"{self.folder}: tensor {name!r} is missing from its {len(self.tensors)} tensors; "
                "the model's config.json asks for it"
            )
        file, entry = self.tensors[name]
        if entry.dtype not in dtypes:
            raise ModelError(
                f"{file.path}: tensor {name!r} has dtype {entry.dtype}, as quantized checkpoints "
                f"do, which is not supported. Supported: {', '.join(dtypes)}"
            )
        if entry.shape != tuple(shape):
            raise ModelError(
                f"{file.path}: tensor {name!r} has shape {list(entry.shape)} where config.json "
                f"means {list(shape)}"
            )

    def view(self, name: str) -> NDArray[Any]:
        file, entry = self.tensors[name]
        return file.view(entry)

    def stacked_view(self, names: Sequence[str]) -> NDArray[Any] | None:
        """Tensors stacked along the first axis, in place: None unless they lie back to back."""
        first_file, first = self.tensors[names[0]]
        end, rows = first.end, first.shape[0]
        for name in names[1:]:
            file, entry = self.tensors[name]
            if file is not first_file or entry.start != end or entry.dtype != first.dtype:
                return None
            end, rows = entry.end, rows + entry.shape[0]
        view = first_file.view(TensorEntry(first.dtype, (rows, *first.shape[1:]), first.start, end))
        return view if view.flags.aligned else None

    def release(self, name: str) -> None:
        file, entry = self.tensors[name]
        file.release(entry)


def _read_header(path: Path, descriptor: int) -> dict[str, TensorEntry]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ModelError(
            f"{path}: not a safetensors file, or cut short: {size} bytes, whose first 8 promise a "
            f"header of {length}"
        )
    try:
        header = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: damaged header: {' '.join(str(error).split())}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: damaged header: a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries = {
        name: _entry(path, name, value, data_start, size - data_start)
        for name, value in header.items()
    }
    _refuse_overlaps(path, entries, data_start, size)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise ValueError(f"{twice!r} is in it twice")
    return result


def _entry(path: Path, name: str, value: Any, data_start: int, data_size: int) -> TensorEntry:
    def damaged(what: str) -> ModelError:
        return ModelError(f"{path}: tensor {name[:200]!r}: {what[:300]}")

    if not isinstance(value, dict):
        raise damaged("its entry in the header is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise damaged(f"dtype {dtype!r} is unknown")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise damaged(f"shape {shape!r} is not a list of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise damaged(f"data_offsets {offsets!r} are not two offsets")
    start, end = offsets
    if not start <= end <= data_size:
        raise damaged(
            f"data_offsets {offsets!r} lie outside the file's {data_size} bytes of data; it may be "
            "cut short"
        )
    if math.prod(shape) * _ITEM_SIZES[dtype] != end - start:
        raise damaged(f"{end - start} bytes do not hold shape {shape!r} in {dtype}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _refuse_overlaps(
    path: Path, entries: dict[str, TensorEntry], data_start: int, size: int
) -> None:
    """Tensors must cover the data without gap or overlap, as the format demands."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            what = "overlaps another tensor" if entry.start < position else "follows a gap"
            raise ModelError(f"{path}: tensor {name!r} {what} in the file's data")
        position = entry.end
    if position != size:
        raise ModelError(
            f"{path}: {size - position} bytes follow the last tensor; the file is damaged"
        )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: has no weight_map from tensor names to files")
    for name, shard in weight_map.items():
        # A plain name: nothing that leads out of the folder.
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or any(part in shard for part in ("/", "\\", "\0"))
        ):
            raise ModelError(
                f"{path}: tensor {name!r} is placed in {shard!r}, which is not the plain name of a "
                ".safetensors file in this folder"
            )
    return weight_map
