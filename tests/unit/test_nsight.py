"""deploy/nsight: kernels and ranges that it names exist, and its scripts call what there is."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cuengine.cli.arguments import build_parser
from cuengine.device.attention_launch import decode_launch, num_splits
from cuengine.profiling import work

ROOT = Path(__file__).resolve().parents[2]
NSIGHT = ROOT / "deploy" / "nsight"
PAGE = (NSIGHT / "README.md").read_text(encoding="utf-8")


@cache
def kernels() -> set[str]:
    """Names of all __global__ functions in cuda/."""
    found = set()
    for path in (ROOT / "cuda").glob("*.cu"):
        for declaration in path.read_text(encoding="utf-8").split("__global__")[1:]:
            found.add(kernel_name(declaration))
    return found


def kernel_name(declaration: str) -> str:
    """What stands before the parameters, with launch bounds in between."""
    bounds = re.match(r"\s*(?:void\s*)?__launch_bounds__\(", declaration)
    at = bounds.end() if bounds else 0
    depth = 1 if bounds else 0
    while depth:
        depth += {"(": 1, ")": -1}.get(declaration[at], 0)
        at += 1
    name = re.search(r"(\w+)\s*\(", declaration[at:])
    assert name is not None, declaration[:200]
    return name[1]


@cache
def ranges() -> set[str]:
    """Names given to `.range(...)` in the product; what varies in a name is N."""
    return {
        name
        for folder in ("cuengine", "model")
        for path in (ROOT / folder).rglob("*.py")
        for name in range_names(ast.parse(path.read_text(encoding="utf-8")))
    }


def range_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="range"), args=[ast.Constant(value=str(name))]):
                yield name
            case ast.Call(func=ast.Attribute(attr="range"), args=[ast.JoinedStr(values=parts)]):
                yield "".join(p.value if isinstance(p, ast.Constant) else "N" for p in parts)


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_sources_are_read_right() -> None:
    assert {"rms_norm", "paged_attention_decode", "copy_blocks", "sample_tokens"} <= kernels()
    assert {"step", "forward", "layer N", "copy-out"} <= ranges()


def test_the_page_lists_the_kernels_that_there_are() -> None:
    listed = section("Names to filter by").partition("Those with")[0].partition(":\n")[2]
    assert set(re.findall(r"`(\w+)`", listed)) == kernels()


def test_the_page_lists_the_ranges_that_there_are_as_they_nest() -> None:
    block = section("Names to filter by").partition("```\n")[2].partition("```")[0]
    listed = dict(re.match(r"( *)(\S+(?: N)?)", line).groups()[::-1] for line in block.splitlines())
    assert set(listed) == ranges()
    outermost = {name for name, indent in listed.items() if not indent}
    assert outermost == {"step"}
    assert [name for name, indent in listed.items() if len(indent) > 2] == ["layer N"]


def test_whatever_is_filtered_by_exists() -> None:
    files = [*NSIGHT.iterdir(), ROOT / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    patterns = re.findall(r"--kernel-name regex:(\S+)", text)
    patterns += [f"^{name}$" for name in re.findall(r"kernel\.sh ([a-z_]+) MODEL", text)]
    assert len(patterns) >= 4
    for pattern in patterns:
        assert any(re.search(pattern, kernel) for kernel in kernels()), pattern
    paths = re.findall(r"--nvtx-include '([^']+)/'", text)
    paths += re.findall(r"--(?:filter-nvtx|nvtx-capture)=([\w-]+)", text)
    assert {"step", "forward", "forward/layer 0"} <= set(paths)
    for path in paths:
        for name in path.split("/"):
            assert re.sub(r"\d+", "N", name) in ranges(), path


def run(script: str, tmp_path: Path, *arguments: str) -> list[list[str]]:
    """What a script calls, with nsys and ncu replaced by what writes its arguments down."""
    log = tmp_path / "log"
    for tool in ("nsys", "ncu"):
        fake = tmp_path / tool
        fake.write_text(f'#!/bin/sh\nprintf "%s\\n" {tool} "$@" --end >> {log}\n')
        fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([NSIGHT / script, *arguments], check=True, env=environment, cwd=tmp_path)
    calls: list[list[str]] = [[]]
    for line in log.read_text().splitlines():
        if line == "--end":
            calls.append([])
        else:
            calls[-1].append(line)
    return calls[:-1]


def command_in(call: list[str]) -> list[str]:
    return call[call.index("cuengine") + 1 :]


def test_the_kernel_script_profiles_one_kernel_of_a_profile(tmp_path: Path) -> None:
    flags = ("--batch", "64", "--context", "4096", "--steps", "2")
    measured, shown = run("kernel.sh", tmp_path, "paged_attention_decode", "m", *flags)
    assert "regex:^paged_attention_decode" in measured
    args = build_parser().parse_args(command_in(measured))
    assert (args.command, args.model, args.device) == ("profile", "m", "cuda")
    assert (args.batch, args.context, args.steps, args.enforce_eager) == (64, 4096, 2, True)
    assert shown[:3] == ["ncu", "--import", "paged_attention_decode.ncu-rep"]


def test_the_server_script_records_a_server(tmp_path: Path) -> None:
    recorded, shown = run("server.sh", tmp_path, "m", "--max-num-seqs", "8")
    assert "--output=server" in recorded
    args = build_parser().parse_args(command_in(recorded))
    assert (args.command, args.model, args.device, args.max_num_seqs) == ("serve", "m", "cuda", 8)
    assert shown[:2] == ["nsys", "stats"]
    assert shown[-1] == "server.nsys-rep"


def test_the_kernel_script_says_how_it_is_used() -> None:
    done = subprocess.run([NSIGHT / "kernel.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kernel.sh KERNEL MODEL" in done.stderr


@pytest.mark.parametrize("script", ["server.sh", "kernel.sh"])
def test_scripts_can_be_started(script: str) -> None:
    assert os.access(NSIGHT / script, os.X_OK)


def test_the_figures_that_are_called_counted_are_what_is_counted() -> None:
    batch, context, heads, kv_heads, dim = 64, 4096, 32, 8, 128
    counted = work.paged_attention([1] * batch, [context] * batch, heads, kv_heads, dim, 16, 2)
    launch = decode_launch(dim, 2, tensor_cores=True)
    tiles = -(-(heads // kv_heads) // launch.rows)
    splits = num_splits(kv_heads * tiles * batch, context, 132)
    microseconds = [counted.num_bytes / rate * 1e6 for rate in (3.35e12, 4.8e12)]
    for figure in (
        f"{kv_heads * tiles} x {batch} x {splits}, {launch.threads}",
        f"{launch.shared_bytes:,} byte",
        f"{counted.num_bytes:,} byte at least",
        f"{2 * 2 * kv_heads * dim * batch * context:,}",
        "{:.0f} us at best on an H100, {:.0f} us on an H200".format(*microseconds),
        f"{counted.operations / counted.num_bytes:.0f} operations a byte",
    ):
        assert figure in PAGE
