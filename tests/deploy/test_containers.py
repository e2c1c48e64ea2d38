"""The Dockerfiles, read as measure_rootfs.sh does, which carries them out: who runs what, from
which versions, and that flags, routes and paths in them are those of the code."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import contents
import image as images
import pytest
from dockerfile import DockerfileError, Instruction, expand, parse

from cuengine.api.routes import ROUTES
from cuengine.cli.arguments import build_parser
from cuengine.config import DEFAULT_MODEL
from cuengine.paths import PREBUILT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILES = tuple(DOCKER.glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(params=FILES, ids=lambda path: path.suffix[1:])
def dockerfile(request: pytest.FixtureRequest) -> list[Instruction]:
    return parse(request.param)


def last_stage(dockerfile: list[Instruction]) -> list[Instruction]:
    begins = max(at for at, found in enumerate(dockerfile) if found.name == "FROM")
    return dockerfile[begins:]


def values(dockerfile: list[Instruction], name: str) -> list[str]:
    return [found.value for found in dockerfile if found.name == name]


def environment(dockerfile: list[Instruction]) -> dict[str, str]:
    pairs = [
        word.split("=", 1) for found in dockerfile if found.name == "ENV" for word in found.words()
    ]
    return dict(pairs)


def healthcheck(dockerfile: list[Instruction]) -> list[str]:
    (found,) = (found for found in dockerfile if found.name == "HEALTHCHECK")
    command = found.flags()[1].removeprefix("CMD ")
    return [str(word) for word in json.loads(command)]


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert {path.name for path in FILES} == {"Dockerfile.cpu", "Dockerfile.cuda"}


def test_images_run_as_a_user_with_a_number_that_is_not_root(dockerfile: list[Instruction]) -> None:
    """By number: Kubernetes cannot tell of a name that it is not root."""
    (user,) = values(last_stage(dockerfile), "USER")
    uid, gid = map(int, user.split(":"))
    assert uid >= 10000
    assert gid >= 10000
    assert any(f"useradd --uid {uid} " in run for run in values(last_stage(dockerfile), "RUN"))
    names = [found.name for found in last_stage(dockerfile)]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :]


def test_all_python_comes_from_the_one_script_and_what_builds_stays_in_its_stage(
    dockerfile: list[Instruction],
) -> None:
    runs = values(dockerfile, "RUN")
    assert not [run for run in runs if re.search(r"\bpip[3]? ", run)]
    assert any("deploy/docker/install.sh" in run for run in runs)
    shipped = values(last_stage(dockerfile), "FROM") + values(last_stage(dockerfile), "COPY")
    assert shipped == ["base", "--from=build /opt/cuengine /opt/cuengine"]
    assert not any(
        "venv" in run or "install.sh" in run for run in values(last_stage(dockerfile), "RUN")
    )


def test_images_hold_no_compiler(dockerfile: list[Instruction]) -> None:
    installed = {
        word
        for run in values(dockerfile, "RUN")
        for words in re.findall(r"apt-get install -y --no-install-recommends ([^&;]+)", run)
        for word in words.split()
    }
    assert installed <= {"ca-certificates", "libgomp1", "python3", "python3-venv"}
    assert not any(
        "apt-get install" in run and "--no-install-recommends" not in run
        for run in values(dockerfile, "RUN")
    )


def test_only_the_cpu_s_image_has_openmp_and_names_a_cpu() -> None:
    cpu, cuda = (parse(DOCKER / f"Dockerfile.{kind}") for kind in ("cpu", "cuda"))
    assert any("libgomp1" in run for run in values(cpu, "RUN"))
    assert not any("libgomp1" in run for run in values(cuda, "RUN"))
    # What kernels are compiled with in one stage is what they are looked for with in the other.
    (compiling,) = (run for run in values(cpu, "RUN") if "compile --device cpu" in run)
    assert 'NUMBA_CPU_NAME="$CPU" NUMBA_CPU_FEATURES= ' in compiling
    assert environment(cpu)["NUMBA_CPU_NAME"] == "$CPU"
    assert environment(cpu)["NUMBA_CPU_FEATURES"] == ""
    assert not any(name.startswith("NUMBA") for name in environment(cuda))


def test_kernels_are_written_where_the_engine_looks_for_them(dockerfile: list[Instruction]) -> None:
    folder = environment(dockerfile)[PREBUILT_VARIABLE]
    (compiling,) = (run for run in values(dockerfile, "RUN") if "cuengine compile" in run)
    assert f"--out {folder}" in compiling
    assert folder.startswith("/opt/cuengine/")


def test_what_is_written_at_run_time_is_in_the_one_folder_that_is_a_volume(
    dockerfile: list[Instruction],
) -> None:
    found = environment(dockerfile)
    assert found["CUENGINE_CACHE"] == "/cache"
    assert found["HF_HOME"].startswith("/cache/")
    assert any("--home-dir /cache --create-home" in run for run in values(dockerfile, "RUN"))


def test_the_command_is_one_that_the_command_line_takes(dockerfile: list[Instruction]) -> None:
    (entrypoint,) = (found.words() for found in dockerfile if found.name == "ENTRYPOINT")
    (command,) = (found.words() for found in dockerfile if found.name == "CMD")
    assert entrypoint[0] in PROJECT["scripts"]
    arguments = build_parser().parse_args([*entrypoint[1:], *command])
    assert (arguments.host, arguments.model) == ("0.0.0.0", DEFAULT_MODEL)
    assert values(dockerfile, "EXPOSE") == [str(arguments.port)]
    # Whoever gives a model and flags of their own keeps the rest, and their flags hold.
    theirs = build_parser().parse_args(
        [*entrypoint[1:], "a/model", "--port", "9", "--device", "cpu"]
    )
    assert (theirs.model, theirs.port, theirs.device) == ("a/model", 9, "cpu")


def docker_runs() -> list[list[str]]:
    """The words of each `docker run` in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("docker run ")]


def test_every_docker_run_of_the_readme_is_one_that_the_command_line_takes() -> None:
    commands = set()
    for words in docker_runs():
        (at,) = (at for at, word in enumerate(words) if word.startswith("cuengine:c"))
        instructions = parse(DOCKER / f"Dockerfile.{words[at].removeprefix('cuengine:')}")
        (entrypoint,), (command,) = (
            [found.words() for found in instructions if found.name == name]
            for name in ("ENTRYPOINT", "CMD")
        )
        if "--entrypoint" in words[:at]:
            entrypoint, command = [words[words.index("--entrypoint") + 1]], []
        typed = [*entrypoint, *(words[at + 1 :] or command)]
        assert typed[0] in PROJECT["scripts"]
        commands.add(build_parser().parse_args(typed[1:]).command)
    assert commands == {"serve", "generate"}


def test_no_docker_run_of_the_readme_shows_a_server_without_a_key_to_other_machines() -> None:
    ports = [words[words.index("-p") + 1] for words in docker_runs() if "serve" not in words]
    published = [port for port in ports if ":" in port]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_compile_line_is_one_that_the_command_line_takes(
    dockerfile: list[Instruction],
) -> None:
    (run,) = (run for run in values(dockerfile, "RUN") if "cuengine compile" in run)
    words = re.search(r"cuengine (compile [^&;]+)", run)
    assert words is not None
    flags = "--arch sm_80,sm_90 --dtype bfloat16 --head-dim 64,128"
    arguments = build_parser().parse_args(shlex.split(words[1].replace("$COMPILE", flags)))
    assert arguments.out == Path("/opt/cuengine/kernels")


def test_the_healthcheck_asks_a_route_that_says_whether_the_server_is_worth_keeping(
    dockerfile: list[Instruction],
) -> None:
    command = " ".join(healthcheck(dockerfile))
    (method, path) = re.findall(r"request\('(\w+)', '([^']+)'\)", command)[0]
    assert (method, path) in {(route.method, route.path) for route in ROUTES}
    assert path == "/health"
    assert f", {values(dockerfile, 'EXPOSE')[0]}," in command


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_healthcheck_fails_where_the_route_does(
    dockerfile: list[Instruction], status: int, code: int, tmp_path: Path
) -> None:
    fake = (
        "class HTTPConnection:\n"
        "    def __init__(self, *a, **b): pass\n"
        "    def request(self, *a): pass\n"
        f"    def getresponse(self): return type('Answer', (), {{'status': {status}}})\n"
    )
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "__init__.py").touch()
    (tmp_path / "http" / "client.py").write_text(fake)
    command = [sys.executable, *healthcheck(dockerfile)[1:]]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == code


def test_what_is_copied_is_there_and_dockerignore_lets_it_through(
    dockerfile: list[Instruction],
) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    for copied in values(dockerfile, "COPY"):
        if copied.startswith("--from"):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists()
            assert any(
                source == rule[1:] or source.startswith(f"{rule[1:]}/")
                for rule in rules
                if rule.startswith("!")
            ), source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = packages["tool"]["setuptools"]["package-dir"].values()
    copied = " ".join(values(dockerfile, "COPY"))
    assert all(f"{folder} /src/{folder}" in copied for folder in folders)
    assert any(fnmatch.fnmatch("model/__pycache__", rule.replace("**", "*")) for rule in rules)


def pins() -> dict[str, str]:
    lines = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_version_is_pinned_and_none_is_pytorch_s() -> None:
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *extras["cpu"], *extras["cuda12"], *extras["cuda13"]]
    names = {re.split(r"[<>=~\[;]", line)[0].replace("_", "-") for line in required}
    assert names <= pins().keys()
    assert not [name for name in pins() if re.search(r"torch|triton|tensorflow|jax", name)]
    assert "-c /src/deploy/docker/constraints.txt" in (DOCKER / "install.sh").read_text()


def test_extras_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    cpu, cuda = (values(parse(DOCKER / f"Dockerfile.{kind}"), "ARG") for kind in ("cpu", "cuda"))
    assert "EXTRA=cpu" in cpu
    assert "CUDA=12" in cuda
    assert {"cpu", "cuda12", "cuda13"} <= extras.keys()


# What reads and measures them


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    return path


def test_lines_that_go_on_are_one_instruction_and_comments_are_none(tmp_path: Path) -> None:
    found = parse(
        written(tmp_path, '# a\nFROM x AS y\nRUN a \\\n    # b\n    && c\n\nCMD ["d e", "f"]\n')
    )
    assert [(one.name, one.value, one.line) for one in found] == [
        ("FROM", "x AS y", 2),
        ("RUN", "a && c", 3),
        ("CMD", '["d e", "f"]', 7),
    ]
    assert found[2].words() == ["d e", "f"]


@pytest.mark.parametrize("text", ["FROM x\nADD a b\n", "FROM x\nRUN\n", "FROM x\nRUN a \\\n"])
def test_what_cannot_be_carried_out_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(DockerfileError, match="Dockerfile:2: "):
        parse(written(tmp_path, text))


def test_variables_have_values_or_are_refused() -> None:
    assert expand("a$B-${C}", {"B": "1", "C": "2"}, "here") == "a1-2"
    with pytest.raises(DockerfileError, match=r"here: \$D"):
        expand("$D", {}, "here")


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """carried_out(path, given): the image, and each RUN with its variables; nothing is run."""

    def build(
        path: Path, given: dict[str, str]
    ) -> tuple[images.Image, list[tuple[str, dict[str, str]]]]:
        runs = []

        def note(builder: images.Builder, image: images.Image, command: str) -> None:
            runs.append((command, image.environment | image.arguments))
            (image.root / "opt/cuengine").mkdir(parents=True, exist_ok=True)

        monkeypatch.setattr(images.Builder, "_run", note)
        monkeypatch.setattr(images.Builder, "_debian", lambda builder, suite, root: root.mkdir())
        return images.Builder(ROOT, tmp_path, None).build(path, given), runs

    return build


def test_the_dockerfiles_are_carried_out_with_their_arguments(carried_out: Any) -> None:
    image, runs = carried_out(DOCKER / "Dockerfile.cpu", {"EXTRA": "", "CPU": "x86-64-v4"})
    (installing,) = (variables for command, variables in runs if "install.sh" in command)
    assert (installing["EXTRA"], installing["CPU"]) == ("", "x86-64-v4")
    assert image.environment["NUMBA_CPU_NAME"] == "x86-64-v4"
    assert image.user == "10001:10001"
    assert image.healthcheck[0] == "python3"
    assert image.command == [DEFAULT_MODEL]
    assert image.root.name == "last"


def test_what_a_build_copies_has_no_bytecode(carried_out: Any, tmp_path: Path) -> None:
    carried_out(DOCKER / "Dockerfile.cpu", {})
    assert (tmp_path / "build/src/cuengine/block_pool.py").exists()
    assert not list((tmp_path / "build/src").rglob("__pycache__"))


def test_sizes_are_apparent_bytes_by_package_and_sum_up_to_all(tmp_path: Path) -> None:
    root = tmp_path / "root"
    info = root / "var/lib/dpkg/info"
    site = root / "opt/cuengine/lib/python3.13/site-packages"
    record = site / "thing-1.dist-info"
    for folder in (info, record, root / "usr/lib", site / "thing"):
        folder.mkdir(parents=True)
    (info / "libc6:amd64.list").write_text("/lib/libc.so\n")
    (info / "libgomp1:amd64.list").write_text("/lib\n/lib/libgomp.so\n")
    (info / "python3.list").write_text("/usr/lib/start.py\n")
    (info / "python3.13.list").write_text("/usr/lib/real.py\n")
    (root / "usr/lib/libc.so").write_bytes(b"x" * 5000)
    (root / "usr/lib/libgomp.so").write_bytes(b"x" * 3000)
    (root / "usr/lib/start.py").write_bytes(b"x" * 10)
    (root / "usr/lib/real.py").write_bytes(b"x" * 700)
    (root / "usr/lib/again.so").hardlink_to(root / "usr/lib/libc.so")
    (site / "thing/code.py").write_bytes(b"x" * 2000)
    (record / "METADATA").write_text("Name: thing\n")
    (record / "RECORD").write_text("thing/code.py,,\n../../../bin/gone,,\n")
    image = images.Image(root, base_packages=frozenset({"libc6"}))
    found = contents.sizes(image)
    assert found["thing"] == 2000
    assert found["Debian, base"] >= 5000
    assert found["Debian, libgomp1"] == 3000
    assert (found["Debian, python3"], found["Debian, python3.13"]) == (10, 700)
    du = subprocess.run(
        ["du", "-s", "--apparent-size", "--block-size=1", root], capture_output=True, check=True
    )
    assert found.total() == int(du.stdout.split()[0]) - root.stat().st_size


@pytest.mark.parametrize(
    "name", ["gcc", "x86_64-linux-gnu-gcc-14", "cc", "g++", "clang-19", "ptxas"]
)
def test_a_compiler_is_found(tmp_path: Path, name: str) -> None:
    for folder in ("usr/bin", "usr/sbin", "usr/local/bin", "opt/cuengine/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for harmless in ("python3", "cuengine", "pip", "basename", "dash"):
        (tmp_path / "usr/bin" / harmless).touch()
    image = images.Image(tmp_path)
    assert contents.unwanted(image) == []
    (tmp_path / "usr/bin" / name).touch()
    assert contents.unwanted(image) == [f"usr/bin/{name}"]
