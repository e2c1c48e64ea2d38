"""Reading safetensors in place, and files that are damaged or hostile: one clear line, no crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from cuengine.errors import ModelError
from cuengine.model.safetensors_file import Checkpoint, SafetensorsFile

SAMPLE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2.0], np.float16),
    "c": np.array([[0.5], [3.0]], ml_dtypes.bfloat16),
}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header, whatever it says; `length` lies about the header's size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_of_every_float_dtype_are_read_as_the_package_wrote_them(tmp_path: Path) -> None:
    save_file(SAMPLE, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(SAMPLE)
    for name, expected in SAMPLE.items():
        got = checkpoint.view(name)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_the_tiny_models_read_the_same_as_with_the_package(
    tiny_model: Callable[[str], Path],
) -> None:
    for name in ("bias", "linear_rope", "mqa_headdim"):
        checkpoint = Checkpoint(tiny_model(name))
        seen = set()
        for path in tiny_model(name).glob("*.safetensors"):
            for key, expected in load_file(path).items():
                np.testing.assert_array_equal(checkpoint.view(key), expected)
                seen.add(key)
        assert seen == set(checkpoint.tensors)


def test_a_view_is_the_file_itself_and_writing_to_it_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(SAMPLE, path)
    before = path.read_bytes()
    view = Checkpoint(tmp_path).view("a")
    assert not view.flags.owndata
    view[:] = 9
    assert path.read_bytes() == before


def test_tensors_that_lie_back_to_back_are_stacked_without_a_copy(tmp_path: Path) -> None:
    data = np.arange(15, dtype=np.float32)
    header = {
        "q": entry([2, 3], [0, 24]),
        "k": entry([1, 3], [24, 36]),
        "v": entry([2, 3], [36, 60]),
    }
    text = json.dumps(header).encode()
    write(tmp_path / "model.safetensors", text.ljust(-(-len(text) // 8) * 8), data.tobytes())
    checkpoint = Checkpoint(tmp_path)
    stacked = checkpoint.stacked_view(["q", "k", "v"])
    assert stacked is not None
    assert not stacked.flags.owndata
    np.testing.assert_array_equal(stacked, data.reshape(5, 3))
    assert checkpoint.stacked_view(["k", "q"]) is None
    assert checkpoint.stacked_view(["q", "v"]) is None


def test_stacking_in_place_is_left_where_the_file_is_not_aligned(tmp_path: Path) -> None:
    text = json.dumps({"q": entry([1, 1], [0, 4])}).encode()
    odd = text.ljust(-(-len(text) // 8) * 8 + 1)
    write(tmp_path / "model.safetensors", odd, np.float32(7).tobytes())
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.stacked_view(["q"]) is None
    assert checkpoint.view("q")[0, 0] == 7


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (b"{{", b"", "damaged header"),
        (b"[1]", b"", "damaged header: a list"),
        (b"\xff\xff", b"", "damaged header"),
        (b"[" * 5000, b"", "damaged header"),
        (b'{"a": 1, "a": 2}', b"", "'a' is in it twice"),
        ({"a": 5}, b"", "is not an object"),
        ({"a": entry([1], [0, 4], "F4")}, bytes(4), "dtype 'F4' is unknown"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4), "dtype None is unknown"),
        ({"a": entry([-1], [0, 4])}, bytes(4), "shape [-1]"),
        ({"a": entry([True], [0, 4])}, bytes(4), "shape [True]"),
        ({"a": entry([1] * 9, [0, 4])}, bytes(4), "at most 8 sizes"),
        ({"a": entry([2**62, 2**62], [0, 4])}, bytes(4), "do not hold shape"),
        ({"a": entry([2**70], [0, 4])}, bytes(4), "shape"),
        ({"a": entry([1], [0, 4, 8])}, bytes(4), "are not two offsets"),
        ({"a": entry([1], [0, "4"])}, bytes(4), "are not two offsets"),
        ({"a": entry([1], [-4, 0])}, bytes(4), "are not two offsets"),
        ({"a": entry([1], [4, 0])}, bytes(4), "lie outside"),
        ({"a": entry([2], [0, 8])}, bytes(4), "may be cut short"),
        ({"a": entry([2], [0, 4])}, bytes(4), "do not hold shape [2] in F32"),
        (
            {"a": entry([2], [0, 8]), "b": entry([2], [4, 12])},
            bytes(12),
            "tensor 'b' overlaps another",
        ),
        ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, bytes(12), "'b' follows a gap"),
        ({"a": entry([1], [0, 4])}, bytes(12), "8 bytes follow the last tensor"),
    ],
)
def test_a_damaged_header_is_one_clear_line(
    tmp_path: Path, header: Any, data: bytes, expected: str
) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    message = refusal(lambda: SafetensorsFile(path))
    assert message.startswith(str(path))
    assert expected in message


@pytest.mark.parametrize("length", [0, 1, 17, 10**8 + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused_before_reading(
    tmp_path: Path, length: int
) -> None:
    path = write(tmp_path / "x.safetensors", b"{}", bytes(6), length)
    assert "not a safetensors file, or cut short" in refusal(lambda: SafetensorsFile(path))


@pytest.mark.parametrize("content", [b"", b"1234567", b"GGUF1234"])
def test_other_files_are_not_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert "not a safetensors file" in refusal(lambda: SafetensorsFile(path))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "cannot be read" in refusal(lambda: Checkpoint(tmp_path))


def test_a_folder_without_safetensors_names_what_is_looked_for(tmp_path: Path) -> None:
    assert "neither model.safetensors nor" in refusal(lambda: Checkpoint(tmp_path))


# Shards -----------------------------------------------------------------------------------------


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    save_file({"a": SAMPLE["a"]}, tmp_path / "one.safetensors")
    save_file({"b": SAMPLE["b"], "c": SAMPLE["c"]}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    checkpoint = Checkpoint(tmp_path)
    for name, expected in SAMPLE.items():
        np.testing.assert_array_equal(checkpoint.view(name), expected)


def test_a_missing_shard_is_named_with_what_it_holds(tmp_path: Path) -> None:
    save_file({"a": SAMPLE["a"]}, tmp_path / "one.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    message = refusal(lambda: Checkpoint(tmp_path))
    assert f"{tmp_path / 'two.safetensors'}: missing" in message
    assert "2 tensors are in it" in message


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    save_file({"a": SAMPLE["a"]}, tmp_path / "one.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert "tensor 'b' is missing" in refusal(lambda: Checkpoint(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file(SAMPLE, tmp_path / "one.safetensors")
    save_file({"b": SAMPLE["b"]}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    assert "tensor 'b' is also in one.safetensors" in refusal(lambda: Checkpoint(tmp_path))


@pytest.mark.parametrize(
    "shard",
    [
        "../one.safetensors",
        "/etc/one.safetensors",
        "sub/one.safetensors",
        "..\\one.safetensors",
        "one.safetensors\0",
        "one.bin",
        "..",
        5,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, shard: Any) -> None:
    save_file(SAMPLE, tmp_path / "one.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index(folder, {"a": shard})
    assert "is not the plain name" in refusal(lambda: Checkpoint(folder))


@pytest.mark.parametrize("weight_map", [None, [], {}, "one.safetensors"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    index(tmp_path, weight_map)
    assert "has no weight_map" in refusal(lambda: Checkpoint(tmp_path))


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(b"\x00{")
    assert "not valid JSON" in refusal(lambda: Checkpoint(tmp_path))


# What a model requires --------------------------------------------------------------------------


def test_a_required_tensor_must_be_there_in_its_shape_and_a_float_dtype(tmp_path: Path) -> None:
    save_file({**SAMPLE, "q": np.zeros((2, 2), np.int32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.require("a", (2, 3))
    assert "tensor 'd' is missing" in refusal(lambda: checkpoint.require("d", (2,)))
    message = refusal(lambda: checkpoint.require("a", (3, 2)))
    assert "has shape [2, 3] where config.json means [3, 2]" in message
    message = refusal(lambda: checkpoint.require("q", (2, 2)))
    assert "has dtype I32, as quantized checkpoints do" in message


# Mutations --------------------------------------------------------------------------------------


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_files_are_read_or_refused_and_never_crash(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "model.safetensors"
    save_file(SAMPLE, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(ModelError):
        checkpoint = Checkpoint(tmp_path)
        for name, (_, found) in checkpoint.tensors.items():
            checkpoint.require(name, found.shape)
            checkpoint.view(name).sum()
