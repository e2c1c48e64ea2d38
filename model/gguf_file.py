"""Reading a GGUF file: metadata and where each tensor lies. Nothing in the file is trusted.

Written here rather than taken from the `gguf` package because its reader needs seconds for the
vocabulary of a real model. What the values mean is gguf.py's business, what tensors hold
gguf_blocks.py's; the sizes of types come from the package.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_MAX_DIMENSIONS = 4
# Each becomes a Python object: enough for any vocabulary, and a bound on what a file can claim.
_MAX_ARRAY_ITEMS = 2**24
_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value types by number; bool, string and array apart.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape as NumPy has it, slowest axis first; type_id numbers a GGMLQuantizationType.

    offset and num_bytes say where its bytes lie in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


class GgufFile:
    """A mapped GGUF file.

    metadata  keys to plain Python values; arrays are lists
    tensors   by name

    Raises ModelError where the file is damaged, cut short, or of an unknown version or byte order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise ModelError(f"{path}: not a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        reader = _Reader(path, self._map)
        _check_version(reader)
        num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            if key in self.metadata:
                raise reader.error(f"the key {key!r} is in it twice")
            self.metadata[key] = reader.value(reader.scalar("I"))
        self.tensors = _read_tensors(reader, num_tensors, self.metadata)

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's bytes in place: uint8 [rows, bytes per row]; one row if it is a vector."""
        data = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def release(self, tensor: GgufTensor) -> None:
        """Give back the memory of pages that are not needed again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)


class _Reader:
    """A position in the file that cannot leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = len(MAGIC)

    def error(self, message: str) -> ModelError:
        # A hostile name can be long.
        return ModelError(f"{self.path}: damaged GGUF file: {message[:400]}")

    def take(self, size: int) -> int:
        """Move on by `size` bytes; returns where they begin."""
        start = self.position
        if size > len(self.data) - start:
            raise self.error(
                f"byte {start} promises {size} more, but {len(self.data)} are all; it is cut short"
            )
        self.position = start + size
        return start

    def scalar(self, code: str) -> Any:
        layout = struct.Struct(f"<{code}")
        return layout.unpack_from(self.data, self.take(layout.size))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"the string at byte {start} is not UTF-8") from None

    def value(self, type_id: int) -> Any:
        if type_id == _ARRAY:
            return self.array()
        if type_id == _STRING:
            return self.string()
        if type_id == _BOOL:
            return bool(self.scalar("B"))
        if type_id not in _SCALARS:
            raise self.error(f"the value before byte {self.position} has unknown type {type_id}")
        return self.scalar(_SCALARS[type_id])

    def array(self) -> list[Any]:
        type_id, count = self.scalar("I"), self.scalar("Q")
        if count > _MAX_ARRAY_ITEMS:
            raise self.error(f"an array of {count} items; at most {_MAX_ARRAY_ITEMS} are allowed")
        if type_id == _STRING:
            read: Callable[[], str] = self.string
            return [read() for _ in range(count)]
        code = "?" if type_id == _BOOL else _SCALARS.get(type_id)
        if code is None:
            raise self.error(f"an array of items of type {type_id}, which is unknown or nested")
        layout = np.dtype(code).newbyteorder("<")
        start = self.take(count * layout.itemsize)
        items: list[Any] = np.frombuffer(self.data, layout, count, start).tolist()
        return items


def _check_version(reader: _Reader) -> None:
    version = reader.scalar("I")
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ModelError(f"{reader.path}: a big-endian GGUF file; only little-endian is supported")
    raise ModelError(
        f"{reader.path}: GGUF version {version} is not supported. Supported: "
        f"{', '.join(map(str, VERSIONS))}"
    )


def _read_tensors(reader: _Reader, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    from gguf.constants import GGML_QUANT_SIZES  # takes as long to import as all of the rest

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.error(f"general.alignment={alignment!r} is not a power of two")

    described = []
    for _ in range(count):
        name = reader.string()
        num_dimensions = reader.scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise reader.error(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([reader.scalar("Q") for _ in range(num_dimensions)]))
        described.append((name, shape, reader.scalar("I"), reader.scalar("Q")))

    data_start = -(-reader.position // alignment) * alignment
    sizes = {int(key): value for key, value in GGML_QUANT_SIZES.items()}
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in described:
        if name in tensors:
            raise reader.error(f"tensor {name!r} is in it twice")
        if type_id not in sizes:
            raise ModelError(
                f"{reader.path}: tensor {name!r} has type {type_id}, which the installed gguf "
                "package does not know. A newer one may: pip install -U gguf"
            )
        block_items, block_bytes = sizes[type_id]
        if 0 in shape or shape[-1] % block_items:
            raise reader.error(
                f"tensor {name!r} of shape {list(shape)} is not made of blocks of {block_items}"
            )
        start = data_start + offset
        num_bytes = math.prod(shape) // block_items * block_bytes
        if offset % alignment or start + num_bytes > len(reader.data):
            raise reader.error(
                f"tensor {name!r} lies at bytes {start} to {start + num_bytes} of "
                f"{len(reader.data)}; it may be cut short"
            )
        tensors[name] = GgufTensor(name, shape, type_id, start, num_bytes)
    return tensors
