"""From checkpoint to device weights: fusing, conversion, memory, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from quantized_matrices import random_quantized
from safetensors.numpy import load_file, save_file

from cuengine import LLM, SamplingParams
from cuengine.device.cpu import CpuDevice
from cuengine.device.packed import NarrowMatrix
from cuengine.errors import ModelError
from cuengine.model.config import ModelConfig, read_model_config
from cuengine.model.layout import all_parts
from cuengine.model.llama import LlamaWeights
from cuengine.model.loader import load_weights, require_memory, weight_bytes
from cuengine.model.quantized_tensors import KINDS
from cuengine.model.rope import cos_sin_table
from cuengine.quantized import Bits, QuantizedMatrix


@dataclass
class FakeDevice(CpuDevice):
    """A device of any dtype and size that keeps what it is given as it is, and remembers it."""

    dtype: str = "float32"
    free: int = 2**40
    uploads: list[NDArray[Any]] = field(default_factory=list)

    def free_memory(self) -> int:
        return self.free

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        self.uploads.append(array)
        return array

    def upload_matrix(self, array: NDArray[Any]) -> NDArray[Any]:
        return self.upload(array)


def load(folder: Path, device: Any = None, config: ModelConfig | None = None) -> LlamaWeights:
    return load_weights(
        folder,
        config or read_model_config(folder),
        device or FakeDevice(),
        max_model_len=96,
        progress=False,
    )


def tensors_of(folder: Path) -> dict[str, NDArray[Any]]:
    """The checkpoint as the safetensors package reads it, in float32."""
    result = {}
    for path in folder.glob("*.safetensors"):
        result |= {name: x.astype(np.float32) for name, x in load_file(path).items()}
    return result


def write_model(folder: Path, dtype: str = "F32", **changes: int) -> ModelConfig:
    """A model of zeros, its tensors in the order of layout.py; the file itself is sparse."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, **sizes})
    )
    config = read_model_config(folder)
    header, offset = {}, 0
    for part in all_parts(config):
        end = offset + int(np.prod(part.shape)) * {"F32": 4, "BF16": 2}[dtype]
        shape = list(part.shape)
        header[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return config


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["bias", "gqa_default", "linear_rope", "mqa_headdim"])
def test_matrices_are_fused_in_order_and_taken_up_to_float32(
    tiny_model: Callable[[str], Path], name: str
) -> None:
    """Single and sharded files, three dtypes, with and without biases, tied and untied."""
    folder = tiny_model(name)
    expected, config, weights = tensors_of(folder), read_model_config(folder), load(folder)

    def check(got: NDArray[Any], *names: str) -> None:
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, np.concatenate([expected[name] for name in names]))

    check(weights.embedding, "model.embed_tokens.weight")
    check(weights.norm, "model.norm.weight")
    if config.tie_word_embeddings:
        assert weights.lm_head is weights.embedding
    else:
        check(weights.lm_head, "lm_head.weight")
    np.testing.assert_array_equal(weights.cos_sin, cos_sin_table(config, 96))
    assert len(weights.layers) == 3
    for index, layer in enumerate(weights.layers):
        attention = [f"model.layers.{index}.self_attn.{x}_proj" for x in "qkvo"]
        mlp = [f"model.layers.{index}.mlp.{x}_proj" for x in ("gate", "up", "down")]
        check(layer.input_norm, f"model.layers.{index}.input_layernorm.weight")
        check(layer.post_norm, f"model.layers.{index}.post_attention_layernorm.weight")
        check(layer.qkv, *(f"{x}.weight" for x in attention[:3]))
        check(layer.o, f"{attention[3]}.weight")
        check(layer.gate_up, *(f"{x}.weight" for x in mlp[:2]))
        check(layer.down, f"{mlp[2]}.weight")
        if config.attention_bias:
            assert layer.qkv_bias is not None
            check(layer.qkv_bias, *(f"{x}.bias" for x in attention[:3]))
            check(layer.o_bias, f"{attention[3]}.bias")
            check(layer.gate_up_bias, *(f"{x}.bias" for x in mlp[:2]))
            check(layer.down_bias, f"{mlp[2]}.bias")
        else:
            assert layer.qkv_bias is layer.o_bias is layer.gate_up_bias is layer.down_bias is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_reach_a_device_in_its_own_dtype(
    tiny_model: Callable[[str], Path], dtype: str
) -> None:
    device = FakeDevice(dtype=dtype)
    weights = load(tiny_model("gqa_default"), device)
    assert {array.dtype.name for array in device.uploads} == {dtype, "float32"}
    assert weights.cos_sin.dtype == np.float32
    expected = tensors_of(tiny_model("gqa_default"))["model.norm.weight"]
    np.testing.assert_array_equal(weights.norm, expected.astype(weights.norm.dtype))


def test_fused_matrices_that_lie_in_the_file_as_needed_are_used_in_place(tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = load(tmp_path)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.input_norm):
            assert not matrix.flags.owndata
            assert matrix.flags.c_contiguous
    assert not weights.embedding.flags.owndata


def test_leftover_rotary_frequencies_are_ignored_silently_and_other_tensors_with_a_warning(
    tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny_model("linear_rope")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    assert not caplog.records
    tensors["model.vision.weight"] = np.zeros(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    assert "ignoring 1 tensor that" in caplog.text
    assert "model.vision.weight" in caplog.text


def test_a_missing_tensor_and_a_wrong_shape_are_refused_by_name(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("gqa_default")
    config = read_model_config(folder)
    with_bias = replace(config, attention_bias=True)
    message = refusal(lambda: load(folder, config=with_bias))
    assert "'model.layers.0.self_attn.q_proj.bias' is missing" in message
    message = refusal(lambda: load(folder, config=replace(config, num_layers=4)))
    assert "'model.layers.3.input_layernorm.weight' is missing" in message
    message = refusal(lambda: load(folder, config=replace(config, vocab_size=257)))
    assert "'model.embed_tokens.weight' has shape [256, 64]" in message
    assert "[257, 64]" in message


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    config = write_model(tmp_path)
    tensors = {part.name: np.zeros(part.shape, np.float32) for part in all_parts(config)}
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].astype(np.int8)}, tmp_path / "model.safetensors")
    message = refusal(lambda: load(tmp_path))
    assert name in message
    assert "dtype I8" in message


# Quantized tensors --------------------------------------------------------------------------------


def write_quantized(
    folder: Path, *, bits: Bits = 4, group: int = 16, **replaced: NDArray[Any]
) -> dict[str, NDArray[np.float32]]:
    """Every matrix of write_model's in codes; returns the numbers of all, in float32.

    replaced  tensors of layer 0's up_proj to write instead, by kind
    """
    config = write_model(folder)
    tensors: dict[str, NDArray[Any]] = {}
    numbers = {}
    for seed, part in enumerate(all_parts(config)):
        if len(part.shape) == 1:
            tensors[part.name] = numbers[part.name] = np.ones(part.shape, np.float32)
            continue
        matrix, _ = random_quantized(*part.shape, bits=bits, group=group, seed=seed)
        numbers[part.name] = matrix.dequantize()
        for kind in KINDS:
            tensors[f"{part.name}.{kind}"] = getattr(matrix, kind)
    for kind, tensor in replaced.items():
        tensors[f"model.layers.0.mlp.up_proj.weight.{kind}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    return numbers


class QuantizedDevice(FakeDevice):
    keeps_quantized = True

    def upload_matrix(self, weight: Any) -> Any:
        return weight


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 32)])
@pytest.mark.parametrize("keeps", [True, False])
def test_quantized_parts_are_fused_and_keep_their_bits_where_the_device_does(
    tmp_path: Path, bits: Bits, group: int, keeps: bool
) -> None:
    numbers = write_quantized(tmp_path, bits=bits, group=group)
    weights = load(tmp_path, QuantizedDevice() if keeps else FakeDevice())
    layer = "model.layers.1.self_attn"
    expected = np.concatenate([numbers[f"{layer}.{x}_proj.weight"] for x in "qkv"])
    for got, expected_numbers in (
        (weights.layers[1].qkv, expected),
        (weights.layers[1].o, numbers[f"{layer}.o_proj.weight"]),
        (weights.embedding, numbers["model.embed_tokens.weight"]),
    ):
        assert isinstance(got, QuantizedMatrix) == keeps
        if keeps:
            assert (got.bits, got.group) == (bits, group)
        as_floats = got.dequantize() if keeps else got
        np.testing.assert_array_equal(as_floats, expected_numbers)
    assert weights.norm.dtype == np.float32


def test_quantized_weights_reach_other_devices_in_their_dtype(tmp_path: Path) -> None:
    numbers = write_quantized(tmp_path)
    weights = load(tmp_path, FakeDevice(dtype="bfloat16"))
    assert weights.layers[0].down.dtype.name == "bfloat16"
    expected = numbers["model.layers.0.mlp.down_proj.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(weights.layers[0].down, expected)


def test_logits_from_codes_are_those_from_their_numbers_to_the_last_bit(tmp_path: Path) -> None:
    """In a decode step of few rows, and in a prompt of many; codes in Numba, numbers, too."""
    pytest.importorskip("numba", reason="codes are multiplied in Numba")
    write_quantized(tmp_path)
    prompts = [list(range(3, 3 + length)) for length in (2, 5, 40)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)

    def answers(keeps: bool) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            if not keeps:
                as_floats = CpuDevice.__init__

                def init(device: CpuDevice) -> None:
                    as_floats(device)
                    device.keeps_quantized = False

                patch.setattr(CpuDevice, "__init__", init)
            llm = LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, max_model_len=64)
        found = isinstance(llm.engine.runner.model.weights.embedding, NarrowMatrix)  # type: ignore[attr-defined]
        assert found == keeps
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    assert answers(True) == answers(False)


@pytest.mark.parametrize(
    ("replaced", "what"),
    [
        ({"codes": np.zeros((64, 12), np.uint8)}, "up_proj.weight.codes' has shape [64, 12]"),
        ({"codes": np.zeros((64, 16), np.int8)}, "dtype I8"),
        (
            {x: np.zeros((64, 3), np.float32) for x in ("scales", "offsets")},
            "3 groups in rows of 32",
        ),
        ({"scales": np.zeros((64, 16), np.float32)}, "up_proj.weight.offsets' has shape"),
        ({"scales": np.zeros((64, 0), np.float32)}, "up_proj.weight.scales' has shape [64, 0]"),
        ({"scales": np.zeros(64, np.float32)}, "up_proj.weight.scales' has shape [64]"),
        ({"offsets": np.zeros((64, 2), np.float16)}, "dtype F16"),
        (
            {x: np.zeros((64, 4), np.float32) for x in ("scales", "offsets")},
            "differ in the length of their rows",
        ),
    ],
)
def test_quantized_tensors_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, replaced: dict[str, NDArray[Any]], what: str
) -> None:
    write_quantized(tmp_path, **replaced)
    assert what in refusal(lambda: load(tmp_path, QuantizedDevice()))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_codes_beside_floats_in_what_is_fused_are_refused(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    part = f"model.layers.0.mlp.{name}.weight"
    for kind in KINDS:
        del tensors[f"{part}.{kind}"]
    tensors[part] = np.zeros((64, 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert f"'{part}.codes'" in refusal(lambda: load(tmp_path, QuantizedDevice()))


def test_a_model_is_refused_by_what_its_codes_need_where_they_stay_codes(tmp_path: Path) -> None:
    write_quantized(tmp_path, bits=4, group=16)
    table = 96 * 8 * 4
    vectors = 5 * 32  # norms: two in each of two layers, and the last
    codes = (PARAMETERS - vectors) // 2 + (PARAMETERS - vectors) // 16 * 8
    needed = codes + 4 * vectors + table
    load(tmp_path, QuantizedDevice(free=needed))
    for device in (QuantizedDevice(free=needed - 1), FakeDevice(free=4 * PARAMETERS + table - 1)):
        assert "its weights need" in refusal(lambda device=device: load(tmp_path, device))


# Memory -----------------------------------------------------------------------------------------

# Counted by hand for write_model's sizes: embedding and lm_head 64 * 32 each, norm 32, and per
# layer q 32 * 32, k and v 16 * 32 each, o 32 * 32, gate, up and down 64 * 32 each, norms 32 each.
PARAMETERS = 2 * 2048 + 32 + 2 * (1024 + 2 * 512 + 1024 + 3 * 2048 + 2 * 32)


def test_weight_bytes_counts_every_parameter_once(tmp_path: Path) -> None:
    config = write_model(tmp_path)
    assert weight_bytes(config, 2) == 2 * PARAMETERS


def test_tied_weights_count_once(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("mqa_headdim")
    total = sum(x.size for x in tensors_of(folder).values())
    assert weight_bytes(read_model_config(folder), 4) == 4 * total


def test_a_model_that_cannot_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_model(tmp_path)
    table = 96 * 8 * 4
    load(tmp_path, FakeDevice(free=4 * PARAMETERS + table))
    device = FakeDevice(free=4 * PARAMETERS + table - 1)
    assert "its weights need" in refusal(lambda: load(tmp_path, device))
    assert device.uploads == []


def test_the_refusal_says_what_is_needed_and_what_is_free() -> None:
    device = FakeDevice(free=3 * 2**30)
    message = refusal(lambda: require_memory(7 * 2**29, device, "big"))
    assert message.startswith("big: its weights need 3.50 GiB in float32 and 3.00 GiB are free")


# Resident memory in a process of its own: now (VmRSS), and at most (VmHWM).
MEASURE = """
import re, sys
from pathlib import Path
import numpy as np
from cuengine.device.cpu import CpuDevice
from cuengine.model.config import read_model_config
from cuengine.model.loader import load_weights

def memory(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

folder = Path(sys.argv[1])
device = CpuDevice()
# Waits for the kernels: loading them takes memory too, compiling them more.
device.rms_norm(np.ones((1, 8), np.float32), np.ones(8, np.float32), 1e-5)
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
before = memory("VmRSS")
if sys.argv[2] == "in place":
    device.upload_matrix = device.upload
weights = load_weights(
    folder, read_model_config(folder), device, max_model_len=128, progress=False
)
print(memory("VmHWM") - before)
"""


LARGE = {
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "vocab_size": 16384,
}


@pytest.mark.parametrize("bits", [4, 8])
def test_peak_memory_is_at_most_the_codes_and_the_largest_matrix_s(
    tmp_path: Path, bits: Bits
) -> None:
    pytest.importorskip("numba", reason="codes are multiplied in Numba")
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux, for /proc/self/status")
    tensors: dict[str, NDArray[Any]] = {}
    for part in all_parts(write_model(tmp_path, **LARGE)):
        if len(part.shape) == 1:
            tensors[part.name] = np.ones(part.shape, np.float32)
            continue
        rows, width = part.shape
        tensors[f"{part.name}.codes"] = np.ones((rows, width * bits // 8), np.uint8)
        for kind in ("scales", "offsets"):
            tensors[f"{part.name}.{kind}"] = np.ones((rows, width // 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    final = sum(tensor.nbytes for tensor in tensors.values())
    matrix = "model.embed_tokens.weight"
    largest = sum(tensors[f"{matrix}.{kind}"].nbytes for kind in KINDS)
    in_work = 2 * 2**20  # codes that are laid out at once, and what a huge page has too much
    del tensors
    command = [sys.executable, "-c", MEASURE, str(tmp_path), "packed"]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert final * 0.9 < peak <= final + largest + in_work


@pytest.mark.parametrize(
    ("dtype", "how"), [("F32", "in place"), ("F32", "packed"), ("BF16", "packed")]
)
def test_peak_memory_is_at_most_the_weights_and_the_largest_tensor(
    tmp_path: Path, dtype: str, how: str
) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux, for /proc/self/status")
    config = write_model(tmp_path, dtype, **LARGE)
    final = weight_bytes(config, 4)
    largest = 16384 * 512 * 4
    assert final > 8 * largest  # so that a second copy of everything could not hide
    command = [sys.executable, "-c", MEASURE, str(tmp_path), how]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if (dtype, how) == ("F32", "in place"):
        assert peak < final / 8
    else:
        assert final * 0.9 < peak <= final + largest
