"""Every kernel compiles, with no GPU, for the architectures it is meant for; none spills, none asks
for more than a multiprocessor has.

The slim grid runs always; all variants run in `make accept`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from cuengine.cli.main import main
from cuengine.device import kernel_cache
from cuengine.device.attention_launch import decode_launch, prefill_launch
from cuengine.device.emulated.program import assemble
from cuengine.device.emulated.ptx import parse
from cuengine.device.kernel_cache import OPTIONS, compile_program, get_kernels
from cuengine.device.kernel_variants import (
    DTYPES,
    HEAD_DIMS,
    Program,
    programs,
    uses_tensor_cores,
)
from cuengine.device.nvrtc import CompiledProgram, Nvrtc, NvrtcError, find_nvrtc
from cuengine.paths import kernel_source_dir

SHARED_LIMIT = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99,
    90: 227, 100: 227, 101: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
"""KiB of shared memory that one block may ask for: CUDA programming guide, table of technical
specifications per compute capability."""

HOT = ("paged_attention_decode", "paged_attention_prefill", "rotary_cache", "norm", "sampling")


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of one kernel."""

    kernel: str
    registers: int
    static_shared: int
    spills: int


def nvrtc_of(major: int) -> Nvrtc:
    try:
        return find_nvrtc(major)
    except NvrtcError:
        pytest.skip(f"needs NVRTC {major}")


@functools.cache
def compile_and_measure(nvrtc: Nvrtc, program: Program, architecture: int) -> list[Usage]:
    """Once for each program: most are the same for all head sizes of a dtype, or for all dtypes."""
    path = kernel_source_dir() / program.source
    compiled = nvrtc.compile(
        path.read_text(),
        path,
        architecture=architecture,
        options=(*OPTIONS, "--ptxas-options=-v"),
        expressions=program.expressions,
    )
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        compiled.log,
        flags=re.DOTALL,
    )
    usages = []
    for kernel, stores, loads, registers, rest in found:
        shared = re.search(r"(\d+) bytes smem", rest)
        usages.append(
            Usage(kernel, int(registers), int(shared[1]) if shared else 0, int(stores) + int(loads))
        )
    measured = {usage.kernel for usage in usages}
    assert set(compiled.names.values()) <= measured, "ptxas reported on fewer kernels than asked"
    # The emulator knows every instruction: it stops at one that it does not.
    module = parse(compiled.ptx.decode())
    for kernel in module.kernels.values():
        assemble(kernel, {v.name: 0 for v in (*module.variables, *kernel.variables)})
    return usages


def check(nvrtc: Nvrtc, dtype: str, head_dim: int, architecture: int, *only: str) -> None:
    tensor_cores = uses_tensor_cores(dtype, architecture)
    itemsize = 4 if dtype == "float32" else 2
    dynamic = {
        "paged_attention_decode": decode_launch(head_dim, itemsize, tensor_cores=tensor_cores),
        "paged_attention_prefill": prefill_launch(head_dim, itemsize, tensor_cores=tensor_cores),
    }
    for program in programs(dtype, head_dim, architecture):
        name = program.source.removesuffix(".cu")
        if only and name not in only:
            continue
        launch = dynamic.get(name)
        for usage in compile_and_measure(nvrtc, program, architecture):
            where = f"{usage.kernel} for sm_{architecture}"
            assert usage.registers <= 255
            if name in HOT and head_dim <= 128 and "plain" not in usage.kernel:
                assert usage.spills == 0, f"{where} spills {usage.spills} bytes"
            # Registers of a multiprocessor: 65536, for blocks of up to 1024 threads.
            threads = launch.threads if launch else 1024 if name in ("norm", "sampling") else 256
            assert usage.registers * threads <= 65536, where
            shared = usage.static_shared + (launch.shared_bytes if launch else 0)
            assert shared <= SHARED_LIMIT[architecture] * 1024, f"{where} wants {shared} bytes"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_compiles_for_sm_80(dtype: str) -> None:
    check(nvrtc_of(12), dtype, 128, 80)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_compiles_for_every_head_size(head_dim: int) -> None:
    check(nvrtc_of(12), "bfloat16", head_dim, 80, *HOT[:3])


@pytest.mark.parametrize("architecture", [70, 90, 100, 120])
def test_hot_kernels_compile_for_other_architectures(architecture: int) -> None:
    check(nvrtc_of(12), "float16", 128, architecture, *HOT)


@pytest.mark.parametrize("architecture", [75, 90, 120])
def test_hot_kernels_compile_with_cuda_13(architecture: int) -> None:
    check(nvrtc_of(13), "bfloat16", 128, architecture, *HOT)


@pytest.mark.accept
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("major", "architecture"),
    [
        *((12, architecture) for architecture in (70, 75, 80, 86, 89, 90, 100, 120)),
        *((13, architecture) for architecture in (75, 80, 90, 100, 120)),
    ],
)
def test_every_variant_compiles(major: int, architecture: int, dtype: str, head_dim: int) -> None:
    check(nvrtc_of(major), dtype, head_dim, architecture)


def test_attention_runs_on_tensor_cores_from_sm_80_on_for_16_bit_types() -> None:
    def prefill(dtype: str, architecture: int) -> str:
        return next(
            program.expressions[0]
            for program in programs(dtype, 128, architecture)
            if program.source == "paged_attention_prefill.cu"
        )

    assert prefill("bfloat16", 80) == "paged_attention_prefill<bf16, 128>"
    assert prefill("float16", 120) == "paged_attention_prefill<fp16, 128>"
    assert prefill("float16", 75) == "paged_attention_prefill_plain<fp16, 128>"
    assert prefill("float32", 90) == "paged_attention_prefill_plain<fp32, 128>"
    nvrtc = nvrtc_of(12)
    path = kernel_source_dir() / "paged_attention_prefill.cu"
    ptx = nvrtc.compile(
        path.read_text(),
        path,
        architecture=80,
        options=OPTIONS,
        expressions=("paged_attention_prefill<bf16, 64>",),
    ).ptx.decode()
    for instruction in ("mma.sync.aligned.m16n8k16", "ldmatrix.sync", "cp.async.cg.shared.global"):
        assert instruction in ptx
    assert str(path) in ptx, "line information names the source"


def test_an_error_in_a_kernel_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.cu"
    with pytest.raises(NvrtcError, match=r"broken\.cu\(2\).*undefined_name"):
        nvrtc_of(12).compile(
            'extern "C" __global__ void broken(int* x) {\n    *x = undefined_name;\n}\n',
            path,
            architecture=80,
            options=OPTIONS,
        )


def test_a_program_is_compiled_once_and_again_when_a_header_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = nvrtc_of(12)
    sources = tmp_path / "cuda"
    (sources / "include").mkdir(parents=True)
    (sources / "answer.cu").write_text(
        '#include "include/value.cuh"\nextern "C" __global__ void answer(int* x) { *x = VALUE; }\n'
    )
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "cache"))
    program = Program("answer", "answer.cu")
    cubins = []
    for index, value in enumerate((42, 42, 43)):
        # The hash of a folder is kept for the process: a changed header is another process's.
        kernel_cache.source_hash.cache_clear()
        monkeypatch.setattr(kernel_cache, "kernel_source_dir", lambda: sources)
        (sources / "include" / "value.cuh").write_text(f"#define VALUE {value}\n")
        kernels = compile_program(nvrtc, program, 80)
        if index == 0:
            made = kernels.cubin.stat().st_mtime_ns
        cubins.append(kernels.cubin)
    kernel_cache.source_hash.cache_clear()
    assert cubins[0] == cubins[1]
    assert cubins[0].stat().st_mtime_ns == made
    assert cubins[2] != cubins[0]
    assert "43" in (cubins[2].with_suffix(".ptx")).read_text()


def test_kernels_built_ahead_are_used_without_nvrtc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvrtc_of(12)
    out = tmp_path / "kernels"
    arguments = ["--arch", "sm_80", "--head-dim", "64", "--dtype", "bfloat16", "--cuda", "12"]
    assert main(["compile", *arguments, "--out", str(out)]) == 0
    assert "sm_80: 8 programs" in capsys.readouterr().out

    def missing(major: int | None = None) -> Nvrtc:
        raise NvrtcError("no NVRTC here")

    monkeypatch.setattr("cuengine.device.kernel_cache.find_nvrtc", missing)
    monkeypatch.setenv("CUENGINE_KERNELS", str(out))
    for program in programs("bfloat16", 64, 80):
        # sm_80's code runs on sm_86 as well.
        kernels = get_kernels(program, 86)
        assert kernels.cubin.read_bytes()[:4] == b"\x7fELF"
        assert set(kernels.names) == set(program.expressions)
    with pytest.raises(NvrtcError, match="no NVRTC here"):
        get_kernels(programs("bfloat16", 64, 90)[0], 90)
    record = next(out.glob("norm*.json"))
    record.write_text(json.dumps({**json.loads(record.read_text()), "sources": "others"}))
    with pytest.raises(NvrtcError, match="no NVRTC here"):
        get_kernels(programs("bfloat16", 64, 80)[0], 80)
    assert all(os.stat(path).st_mode & 0o444 == 0o444 for path in out.iterdir())


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$CUENGINE_KERNELS with one program for sm_80, and no NVRTC: nothing is compiled here."""

    def missing(major: int | None = None) -> Nvrtc:
        raise NvrtcError("no NVRTC here")

    monkeypatch.setattr("cuengine.device.kernel_cache.find_nvrtc", missing)
    monkeypatch.setenv("CUENGINE_KERNELS", str(tmp_path))
    record = {"sources": kernel_cache.source_hash(kernel_cache.kernel_source_dir()), "names": {}}
    (tmp_path / "answer.sm_80.json").write_text(json.dumps(record))
    (tmp_path / "answer.sm_80.cubin").write_bytes(b"\x7fELF...")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("answer.sm_80.json", b"{", "answer.sm_80.json: not used: JSONDecodeError"),
        ("answer.sm_80.json", b"[]", "not used: TypeError"),
        ("answer.sm_80.json", b"{}", "not used: KeyError"),
        ("answer.sm_80.json", b"\xff", "not used: UnicodeDecodeError"),
        ("answer.sm_80.cubin", b"", "answer.sm_80.cubin is no cubin"),
        ("answer.sm_80.cubin", bytes(8), "answer.sm_80.cubin is no cubin"),
        ("answer.sm_80.cubin", None, "answer.sm_80.cubin is missing"),
    ],
)
def test_damaged_kernels_are_not_used_and_named(
    built: Path, name: str, content: bytes | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program("answer", "answer.cu")
    assert get_kernels(program, 80).cubin == built / "answer.sm_80.cubin"
    if content is None:
        (built / name).unlink()
    else:
        (built / name).write_bytes(content)
    with pytest.raises(NvrtcError, match="no answer for sm_80"):
        get_kernels(program, 80)
    assert says in caplog.text


def test_where_nothing_was_built_for_this_gpu_it_is_said_what_was(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NvrtcError) as refused:
        get_kernels(Program("answer", "answer.cu"), 90)
    said = str(refused.value)
    assert said.startswith(f"CUENGINE_KERNELS={built} has no answer for sm_90 ")
    assert "(it has files for sm_80)" in said
    assert said.endswith("no NVRTC here")
    monkeypatch.setenv("CUENGINE_KERNELS", str(built / "none"))
    with pytest.raises(NvrtcError, match=r"cuengine \(No such file or directory\), and it cannot"):
        get_kernels(Program("answer", "answer.cu"), 80)


def test_kernels_that_cannot_be_written_are_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiles:
        version = (12, 9)

        def compile(self, *_: object, **__: object) -> CompiledProgram:
            return CompiledProgram(b"", b"", {}, "")

    (tmp_path / "file").touch()
    program = programs("float32", 64, 80)[0]
    with pytest.raises(NvrtcError, match=r"file: compiled kernels .* Name another folder"):
        compile_program(Compiles(), program, 80, tmp_path / "file")  # type: ignore[arg-type]
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(NvrtcError, match=r"Not a directory\. Set CUENGINE_CACHE"):
        compile_program(Compiles(), program, 80)  # type: ignore[arg-type]


def test_compile_refuses_an_architecture_that_nvrtc_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvrtc_of(12)
    assert main(["compile", "--arch", "sm_10", "--cuda", "12", "--out", str(tmp_path)]) == 2
    assert "sm_10" in capsys.readouterr().err
