"""measure_rootfs.sh, run for what it says about its arguments and about machines that lack
something, and for what it leaves behind. What it makes of a Dockerfile: test_containers.py."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import arguments
import pytest
from start import compiled_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "measure_rootfs.sh"
NEEDED = ("bash", "sh", "dirname", "readlink", "id", "mktemp", "rm", "unshare", "ip")


def run(*typed: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *typed],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for $PATH with what the script calls; debootstrap in it always fails."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in NEEDED:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    fake(folder, "python3", f'exec {sys.executable} "$@"')
    fake(folder, "debootstrap", "exit 1")
    return folder


def fake(tools: Path, name: str, does: str) -> None:
    (tools / name).unlink(missing_ok=True)
    (tools / name).write_text(f"#!/bin/sh\n{does}\n")
    (tools / name).chmod(0o755)


def test_the_scripts_can_be_read_by_a_shell() -> None:
    assert SCRIPT.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    subprocess.run(["sh", "-n", ROOT / "deploy/docker/install.sh"], check=True)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ((), "required: image"),
        (("gpu",), "invalid choice: 'gpu'"),
        (("cpu", "--build-arg", "CPU"), "--build-arg CPU: is not NAME=VALUE"),
        (
            ("cpu", "--build-arg", "SPEED=1"),
            "--build-arg SPEED=1: Dockerfile.cpu has no ARG SPEED, only CPU, EXTRA",
        ),
        (("cuda", "--build-arg", "CPU=x86-64-v3"), "Dockerfile.cuda has no ARG CPU, only COMPILE,"),
        (("cpu", "--build-arg", "=1"), "--build-arg =1: Dockerfile.cpu has no ARG"),
        (("cpu", "--limit", "much"), "'much' is not a number of MiB above 0"),
        (("cpu", "--limit", "nan"), "'nan' is not a number of MiB above 0"),
        (("cpu", "--limit", "-1"), "argument --limit"),
        (("cpu", "--cache", "/dev/null"), "--cache /dev/null: /dev/null is no folder"),
        (("cpu", "--cache", "/dev/null/x"), "--cache /dev/null/x: /dev/null is no folder"),
        (("cpu", "--cache", "x" * 300), "File name too long"),
        (("cpu", "--scratch", "/etc"), "unrecognized arguments: --scratch /etc"),
        (("cpu", "--build", "CPU=x"), "unrecognized arguments: --build"),
    ],
)
def test_wrong_arguments_are_one_line_on_any_machine(
    tools: Path, typed: tuple[str, ...], says: str
) -> None:
    (tools / "debootstrap").unlink()
    done = run(*typed, PATH=str(tools))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("measure_rootfs.sh: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_needs_neither_root_nor_tools(tools: Path) -> None:
    (tools / "debootstrap").unlink()
    fake(tools, "id", "echo 1000")
    done = run("--help", PATH=str(tools))
    assert (done.returncode, done.stderr) == (0, "")
    assert "--build-arg NAME=VALUE" in done.stdout


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    with pytest.raises(SystemExit, match="2"):
        arguments.read(["cpu", "--cache", str(tmp_path / "none" / "deep")])
    assert f": {tmp_path} cannot be written (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "does", "says"),
    [
        ("python3", "exit 1", "needs Python 3.11 or newer, as python3"),
        ("id", "echo 1000", "needs root, for chroot and mounts"),
        ("debootstrap", None, "needs debootstrap (Debian: apt-get install debootstrap "),
        ("unshare", None, "needs unshare (Debian: apt-get install debootstrap util-linux "),
    ],
)
def test_what_a_machine_lacks_is_one_line_and_status_77(
    tools: Path, name: str, does: str | None, says: str
) -> None:
    if name != "id":
        fake(tools, "id", "echo 0")
    if does is None:
        (tools / name).unlink()
    else:
        fake(tools, name, does)
    done = run("cpu", PATH=str(tools))
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith(f"measure_rootfs.sh: {says}")
    assert done.stderr.count("\n") == 1


def test_a_scratch_folder_that_cannot_be_made_is_one_line(tools: Path, tmp_path: Path) -> None:
    fake(tools, "id", "echo 0")
    done = run("cpu", PATH=str(tools), TMPDIR=str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr == (
        f"measure_rootfs.sh: no folder can be made in {tmp_path / 'none'}; TMPDIR names another "
        "place\n"
    )


def test_the_script_leaves_nothing_behind_where_it_fails(tools: Path, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, as the script does")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = Path("/proc/self/mounts").read_text()
    done = run("cpu", PATH=f"{tools}:{os.environ['PATH']}", TMPDIR=str(scratch))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "measure_rootfs.sh: status 1 of: debootstrap --variant=minbase trixie "
    )
    assert "Traceback" not in done.stderr
    assert list(scratch.iterdir()) == []
    assert Path("/proc/self/mounts").read_text() == before


@pytest.mark.parametrize(
    ("flags", "architectures"),
    [
        ("", []),
        ("--arch sm_80,sm_90 --dtype bfloat16", ["sm_80", "sm_90"]),
        ("--head-dim 64 --arch=sm_90", ["sm_90"]),
    ],
)
def test_the_architectures_that_kernels_were_built_for_are_those_of_the_flags(
    flags: str, architectures: list[str]
) -> None:
    assert compiled_for(flags) == architectures
