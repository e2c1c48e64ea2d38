"""The GGUF reader against files written byte by byte and by the gguf package, whole and damaged."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuengine.errors import ModelError
from cuengine.model.gguf import convert_gguf
from cuengine.model.gguf_file import GgufFile


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str, type_id: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value


def tensor(name: str, shape: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", type_id, offset)


def gguf(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(pairs) + b"".join(tensors)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data


def read(folder: Path, content: bytes) -> GgufFile:
    path = folder / "x.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(tmp_path: Path, version: int) -> None:
    content = gguf(
        [
            pair("u8", 0, b"\xff"),
            pair("i8", 1, b"\xff"),
            pair("u16", 2, struct.pack("<H", 65535)),
            pair("i16", 3, struct.pack("<h", -2)),
            pair("u32", 4, struct.pack("<I", 2**32 - 1)),
            pair("i32", 5, struct.pack("<i", -(2**31))),
            pair("f32", 6, struct.pack("<f", 0.5)),
            pair("bool", 7, b"\1"),
            pair("string", 8, string("Grüße 🙂")),
            pair("strings", 9, struct.pack("<IQ", 8, 3) + string("a") + string("") + string("c")),
            pair("floats", 9, struct.pack("<IQ2f", 6, 2, 1.5, -2.0)),
            pair("bools", 9, struct.pack("<IQ2B", 7, 2, 1, 0)),
            pair("none", 9, struct.pack("<IQ", 5, 0)),
            pair("u64", 10, struct.pack("<Q", 2**64 - 1)),
            pair("i64", 11, struct.pack("<q", -5)),
            pair("f64", 12, struct.pack("<d", 0.1)),
        ],
        [],
        version=version,
    )
    assert read(tmp_path, content).metadata == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -2,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "bool": True,
        "string": "Grüße 🙂",
        "strings": ["a", "", "c"],
        "floats": [1.5, -2.0],
        "bools": [True, False],
        "none": [],
        "u64": 2**64 - 1,
        "i64": -5,
        "f64": 0.1,
    }


def test_tensors_have_numpys_order_of_axes(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32)
    content = gguf([], [tensor("a", [3, 2]), tensor("b", [4], offset=32)], bytes(48))
    content = content[:-48] + data.tobytes() + bytes(8) + np.ones(4, np.float32).tobytes()
    file = read(tmp_path, content)
    assert file.tensors["a"].shape == (2, 3)
    np.testing.assert_array_equal(
        file.rows(file.tensors["a"]).view(np.float32), [[0, 1, 2], [3, 4, 5]]
    )
    np.testing.assert_array_equal(file.rows(file.tensors["b"]).view(np.float32), [[1, 1, 1, 1]])


def test_a_file_reads_as_with_the_package(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list([f"token {i}" for i in range(100)])
    random = np.random.default_rng(0)
    for index, kind in enumerate((GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0)):
        values = random.standard_normal((3, 96)).astype(np.float32)
        writer.add_tensor(f"q{index}", quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("f", random.standard_normal(5).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reference = GgufFile(path), GGUFReader(path)
    assert file.metadata["tokenizer.ggml.tokens"] == [f"token {i}" for i in range(100)]
    assert set(file.tensors) == {"q0", "q1", "f"}
    for expected in reference.tensors:
        got = file.tensors[expected.name]
        assert got.type_id == expected.tensor_type
        assert list(got.shape) == expected.shape.tolist()[::-1]
        np.testing.assert_array_equal(file.rows(got).ravel(), expected.data.view(np.uint8).ravel())


ARRAY_OF = struct.Struct("<IQ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"\x08\0\0\0\0\0\0\0{}", "not a GGUF file"),
        (b"GGUF", "it is cut short"),
        (gguf([], [], version=1), "GGUF version 1 is not supported. Supported: 2, 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "cut short"),
        (gguf([pair("a", 8, struct.pack("<Q", 2**64 - 1))], []), "promises 18446744073709551615"),
        (gguf([struct.pack("<Q", 2**40)], []), "cut short"),
        (gguf([pair("a", 8, string(b"\xff"))], []), "is not UTF-8"),
        (gguf([pair("a", 13, b"")], []), "unknown type 13"),
        (gguf([pair("a", 9, ARRAY_OF.pack(9, 1))], []), "unknown or nested"),
        (gguf([pair("a", 9, ARRAY_OF.pack(99, 1))], []), "unknown or nested"),
        (gguf([pair("a", 9, ARRAY_OF.pack(0, 2**60))], []), "at most 16777216"),
        (gguf([pair("a", 9, ARRAY_OF.pack(12, 2**24))], []), "cut short"),
        (gguf([pair("a", 9, ARRAY_OF.pack(8, 2**24))], []), "cut short"),
        (gguf([pair("a", 0, b"1"), pair("a", 0, b"1")], []), "the key 'a' is in it twice"),
        (gguf([], [tensor("a", [1])]), "cut short"),
        (gguf([], [tensor("a", [1]), tensor("a", [1])], bytes(32)), "'a' is in it twice"),
        (gguf([], [tensor("a", [])], bytes(32)), "has 0 dimensions"),
        (gguf([], [tensor("a", [1] * 5)], bytes(32)), "has 5 dimensions"),
        (gguf([], [tensor("a", [0])], bytes(32)), "of shape [0]"),
        (gguf([], [tensor("a", [33], 2)], bytes(64)), "is not made of blocks of 32"),
        (gguf([], [tensor("a", [2**63, 2**63])], bytes(32)), "cut short"),
        (gguf([], [tensor("a", [1], offset=2**64 - 32)], bytes(32)), "cut short"),
        (gguf([], [tensor("a", [1], offset=4)], bytes(32)), "lies at bytes"),
        (gguf([], [tensor("a", [1], 250)], bytes(32)), "has type 250"),
        (
            gguf([pair("general.alignment", 4, struct.pack("<I", 24))], []),
            "general.alignment=24 is not a power of two",
        ),
        (gguf([pair("general.alignment", 8, string("x"))], []), "general.alignment='x'"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, content: bytes, expected: str) -> None:
    message = refusal(lambda: read(tmp_path, content))
    assert message.startswith(str(tmp_path / "x.gguf"))
    assert expected in message


def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    pairs = [pair("a", 9, ARRAY_OF.pack(8, 2) + string("x") + string("y")), pair("b", 6, bytes(4))]
    content = gguf(pairs, [tensor("a", [3, 2])], bytes(24))
    read(tmp_path, content)
    for end in range(len(content)):
        refusal(lambda end=end: read(tmp_path, content[:end]))  # type: ignore[misc]


def small_model() -> bytes:
    """The smallest LLaMA there is, with a tokenizer's worth of metadata."""
    sizes = {
        "block_count": 1,
        "context_length": 16,
        "embedding_length": 8,
        "feed_forward_length": 8,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    pairs = [pair("general.architecture", 8, string("llama"))]
    pairs += [pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in sizes.items()]
    shapes = {
        "token_embd": [8, 8],
        "output_norm": [8],
        "blk.0.attn_norm": [8],
        "blk.0.attn_q": [8, 8],
        "blk.0.attn_k": [8, 4],
        "blk.0.attn_v": [8, 4],
        "blk.0.attn_output": [8, 8],
        "blk.0.ffn_norm": [8],
        "blk.0.ffn_gate": [8, 8],
        "blk.0.ffn_up": [8, 8],
        "blk.0.ffn_down": [8, 8],
    }
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(tensor(f"{name}.weight", shape, offset=offset))
        offset += -(-4 * int(np.prod(shape)) // 32) * 32
    return gguf(pairs, tensors, bytes(offset))


def test_the_small_model_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(small_model())
    assert (convert_gguf(tmp_path / "x.gguf", progress=False) / "model.safetensors").exists()


MODEL = small_model()
HEADER = MODEL.index(bytes(300))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(st.tuples(st.integers(4, HEADER), st.integers(0, 255)), max_size=4),
    end=st.one_of(st.just(len(MODEL)), st.integers(0, len(MODEL))),
)
def test_mutated_files_are_converted_or_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[int, int]], end: int
) -> None:
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path))
    content = bytearray(MODEL)
    for position, value in changes:
        content[position] = value
    path = tmp_path / "x.gguf"
    path.write_bytes(content[:end])
    tracemalloc.start()
    try:
        with suppress(ModelError):
            convert_gguf(path, progress=False)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
