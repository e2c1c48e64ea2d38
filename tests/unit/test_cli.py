"""The command line without a model: flags, exit codes, `info`, and how chat keeps its history."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import io
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cuengine.api.settings import ServerSettings
from cuengine.cli import info, pull, serve
from cuengine.cli.arguments import (
    UsageError,
    build_parser,
    engine_config,
    sampling_params,
)
from cuengine.cli.chat import Chat
from cuengine.cli.flags import in_flags
from cuengine.cli.log import JsonLines
from cuengine.cli.main import main
from cuengine.cli.values import (
    as_memory_size,
    count,
    format_memory,
    format_size,
    memory_size,
    number,
    port,
    whole,
)
from cuengine.config import DEFAULT_MODEL
from cuengine.device.nvrtc import NvrtcError, find_nvrtc
from cuengine.errors import RequestError
from cuengine.model import builtin
from cuengine.model.builtin import BUILTIN_MODELS
from cuengine.model.generation_config import GenerationDefaults
from cuengine.outputs import RequestDelta, SequenceDelta
from cuengine.sampling_params import SamplingParams


def _usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that wrong usage brings, with exit code 2."""
    try:
        code: object = main(argv)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 1_000_000),
        ("512MB", 512_000_000),
        ("2GiB", 2_147_483_648),
        ("2g", 2_147_483_648),
        ("1.5 KiB", 1536),
        ("3kb", 3000),
    ],
)
def test_sizes_in_memory(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "2XB", "1e9", "nan", "2 G B"])
def test_what_is_no_size_in_memory(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2GiB"):
        memory_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98 MB"),
        (999_600_000, "1.0 GB"),
        (2_500_000_000_000_000, "2500 TB"),
    ],
)
def test_sizes_are_shown_with_two_or_three_digits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_flags_reach_the_engine_s_settings() -> None:
    flags = (
        "some/model --revision v1 --block-size 32 --max-model-len 99 --max-num-seqs 7 "
        "--max-num-batched-tokens 64 --kv-cache-memory 1KiB --no-enable-prefix-caching "
        "--chat-template t.jinja --seed 5 --device cpu --dtype float32 "
        '--speculative-config {"method":"ngram","num_speculative_tokens":3}'
    )
    config = engine_config(build_parser().parse_args(["serve", *flags.split()]))
    assert (config.model, config.revision, config.block_size) == ("some/model", "v1", 32)
    assert (config.max_model_len, config.max_num_seqs) == (99, 7)
    assert (config.max_num_batched_tokens, config.kv_cache_memory) == (64, 1024)
    assert config.enable_prefix_caching is False
    assert (config.chat_template, config.seed) == ("t.jinja", 5)
    speculation = config.speculation()
    assert speculation is not None
    assert (speculation.method, speculation.num_speculative_tokens) == ("ngram", 3)


def test_a_speculative_config_that_cannot_be_used_is_wrong_usage() -> None:
    args = build_parser().parse_args(["serve", "--speculative-config", '{"method": "ngram"}'])
    with pytest.raises(UsageError, match="num_speculative_tokens is missing"):
        engine_config(args)


def test_without_flags_the_built_in_model_is_meant() -> None:
    for command in ("serve", "chat", "profile", "pull"):
        assert build_parser().parse_args([command]).model == "smollm2-135m"


def test_a_flag_beats_the_model_s_own_defaults_and_those_beat_ours() -> None:
    parser = build_parser()
    model = GenerationDefaults(temperature=0.2, top_k=40)
    plain = sampling_params(parser.parse_args(["generate", "-p", "x"]), model)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.2, 1.0, 40)
    flags = ["generate", "-p", "x", "--temperature", "0", "--stop", "a", "--stop", "b"]
    given = sampling_params(parser.parse_args(flags), model)
    assert (given.temperature, given.top_k, given.stop) == (0, 40, ["a", "b"])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "required: COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("serve --port 70000", "'70000' is not a port"),
        ("serve --block-size 7", "invalid choice: 7"),
        ("serve --kv-cache-memory lots", "'lots' is not a size in memory"),
        ("serve --max-num-seqs 0", "--max-num-seqs 0 is not a whole number from 1 to 2147483647"),
        ("serve --device tpu", "invalid choice: 'tpu'"),
        ("serve --mod x", "unrecognized arguments: --mod"),
        (
            "serve --data-parallel-size 2",
            "--data-parallel-size 2 needs --data-parallel-backend ray",
        ),
        ("compile --device cpu --out /dev/null", "--out /dev/null: cannot be made a folder"),
        ("serve --ray-address auto", "--ray-address auto needs --data-parallel-backend ray"),
        ("serve --ray-replica-cpus 1", "--ray-replica-cpus 1 needs --data-parallel-backend ray"),
        ("serve --ray-prefix-margin 8", "--ray-prefix-margin 8 needs --data-parallel-backend ray"),
        (
            "serve --data-parallel-backend ray --ray-address ray://h:10001",
            "--ray-address ray://h:10001 is for Ray's client, which cannot serve. Give HOST:6379",
        ),
        (
            "serve --data-parallel-backend ray --ray-address=10.0.0.1",
            "--ray-address 10.0.0.1 is neither auto nor HOST:PORT",
        ),
        ("serve --data-parallel-backend mp", "invalid choice: 'mp'"),
        (
            "serve --data-parallel-backend ray --data-parallel-size 0",
            "--data-parallel-size 0 is not",
        ),
        (
            "serve --data-parallel-backend ray --data-parallel-size 3 --max-data-parallel-size 2",
            "--max-data-parallel-size 2 is not a number of engines from --data-parallel-size 3 to",
        ),
        ("serve --data-parallel-backend ray --ray-replica-cpus -1", "--ray-replica-cpus -1 is not"),
        ("generate", "required: -p/--prompt"),
        (
            "generate -p x --max-tokens many",
            ": argument --max-tokens: 'many' is not a whole number",
        ),
        ("generate -p x --temperature hot", ": argument --temperature: 'hot' is not a number ("),
        ("serve --block-size 7x", ": argument --block-size: '7x' is not a whole number ("),
        ("generate -p x --temperature -1", ": --temperature -1 is not a number from 0 to 100"),
        ("generate -p x --max-tokens 0", ": --max-tokens 0 is not an integer from 1 to"),
        ("generate -p x --system y", "--system needs --chat"),
        ("profile --steps 0", "'0' is not a whole number from 1 to 2147483647"),
        ("profile --max-num-seqs 4", "unrecognized arguments: --max-num-seqs"),
        ("compile --out x", "--device cuda needs --arch"),
        ("compile --arch sm_90", "--device cuda needs --out"),
        ("compile --device cpu --arch sm_90", "--arch is for --device cuda"),
        ("compile --device cpu --head-dim 64", "--head-dim is for --device cuda"),
        ("compile --device tpu", "invalid choice: 'tpu'"),
        ("chat --top-p 2", ": --top-p 2 is not a number above 0 and at most 1"),
        ("serve --root-path=/a/ --uds x", ": --root-path /a/ is not a path"),
        ("serve --max-body-size=3GiB", ": --max-body-size 3GiB is not from 1 to 2147483647 bytes"),
        ("serve --ssl-keyfile k.pem", "needs a certificate: --ssl-certfile is missing"),
        ("chat --speculative-config 3", ": --speculative-config: 3 is not a JSON object"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in _usage_error(command.split(), capsys)


COMMANDS = {"serve": [], "chat": [], "generate": ["-p", "x"], "pull": [], "profile": [],
            "compile": ["--arch", "sm_80", "--out", "x"]}  # fmt: skip


@pytest.mark.parametrize("command", [*COMMANDS, "info"])
@pytest.mark.parametrize(
    "wrong", ["--nonsense", "--nonsense=1", "--log-level=loud", "one two", "--nonsense one two"]
)
def test_wrong_usage_of_a_command_names_that_command_s_help(
    command: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what argparse leaves to the parser of all commands."""
    error = _usage_error([command, *COMMANDS.get(command, []), *wrong.split()], capsys)
    assert error.startswith(f"cuengine {command}: ")
    assert error.endswith(f" (see cuengine {command} --help)\n")
    assert wrong.rpartition(" ")[2].partition("=")[0] in error


def test_wrong_usage_before_a_command_names_the_help_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = _usage_error(["--nonsense", "info"], capsys)
    assert error == "cuengine: unrecognized arguments: --nonsense (see cuengine --help)\n"


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompt is empty" in _usage_error(["generate", "-p", ""], capsys)


def _flags(command: str, wanted: Callable[[argparse.Action], bool]) -> list[str]:
    """A command's flags, spelled in full, and "" for MODEL, where `wanted` holds."""
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return [
        next((flag for flag in action.option_strings if flag.startswith("--")), "")
        for action in commands[command]._actions
        if action.nargs != 0 and action.choices is None and wanted(action)
    ]


NUMERIC = (whole, number, memory_size, port, count)
NUMBERS = [
    (command, flag)
    for command in COMMANDS
    for flag in _flags(command, lambda action: action.type in NUMERIC)
]


@pytest.mark.parametrize(("command", "flag"), NUMBERS)
@pytest.mark.parametrize("value", ["nan", "-inf", "1e999", "-3", "9" * 23, "9" * 5000, ""])
def test_a_number_that_no_flag_takes_is_wrong_usage_with_the_flag_and_its_value(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every flag with a number."""
    if value == "9" * 23 and flag.endswith("-timeout"):
        return  # a very long time
    if value == "-3" and flag in ("--seed",):
        return
    error = _usage_error([command, *COMMANDS[command], f"{flag}={value}"], capsys)
    assert flag in error
    assert value in error or len(value) > 80
    assert len(error) < 500
    assert "_" not in error.replace("__", "")
    assert "invalid" not in error
    if value in ("nan", "-3", "9" * 23) and "is not a whole number (see" not in error:
        assert re.search(r"from|above|or more|to 65535", error)


def test_there_are_flags_with_numbers_and_with_texts() -> None:
    assert {"--step-timeout", "--seed", "--port", "--kv-cache-memory"} <= {f for _, f in NUMBERS}
    assert {"--uds", "--api-key", "--stop", "--out", "--revision", ""} <= {f for _, f in TEXTS}


TEXTS = [
    (command, flag)
    for command in COMMANDS
    for flag in _flags(command, lambda action: action.type not in NUMERIC)
    if flag not in ("--root-path", "--prompt")  # "": none; that of a prompt is below
]


@pytest.mark.parametrize(("command", "flag"), TEXTS)
def test_an_empty_text_is_wrong_usage_with_the_flag(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every flag with a text, and of MODEL."""
    argument = f"{flag}=" if flag else ""
    error = _usage_error([command, *COMMANDS[command], argument], capsys)
    assert (flag or "MODEL") in error
    assert "empty" in error or "not one of" in error or "is not a list" in error


@pytest.mark.parametrize(
    ("command", "flag"),
    [(command, flag) for command, flag in TEXTS if flag not in ("--head-dim", "--dtype")],
)
def test_a_text_that_is_not_utf_8_is_wrong_usage_with_the_flag(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Python hands over an argument with the byte FF in it."""
    argument = f"{flag}=a\udcff" if flag else "a\udcff"
    error = _usage_error([command, *COMMANDS[command], argument], capsys)
    assert (flag or "MODEL") in error
    assert r"a\udcff" in error
    assert "not UTF-8" in error or "is not a list" in error


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("at most 8, or give kv_cache_memory=377487361 or a gpu_memory_utilization above 0.9.",
         "at most 8, or give --kv-cache-memory 361MiB or a --gpu-memory-utilization above 0.9."),
        ("max_model_len=9000 is more (now max_num_seqs=64)",
         "--max-model-len 9e3 is more (now --max-num-seqs 64)"),
        ("it has a port, and /a/max_num_seqs.py", "it has a port, and /a/max_num_seqs.py"),
        ("cors_origins: '*' and num_blocks=3", "--allowed-origins: '*' and num_blocks=3"),
    ],
)  # fmt: skip
def test_errors_name_flags_with_values_as_people_write_them(message: str, said: str) -> None:
    argv = ["serve", "--max-model-len=1", "--max-model-len", "9e3"]
    args = build_parser().parse_args(["serve"])
    args.max_model_len = 9000
    assert in_flags(message, args, argv) == said


def test_memory_is_shown_in_powers_of_1024() -> None:
    assert format_memory(2**30 * 15.61) == "16 GiB"
    assert format_memory(2**20 * 1.5) == "1.5 MiB"
    assert format_memory(1023) == "1023 B"
    for size in (1, 1024, 5_000_000, 2**31 + 1, 2**40):
        assert size <= memory_size(as_memory_size(size)) < size + 2**20


README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_every_flag_of_serve_is_in_the_readmes_table() -> None:
    parts = README.split("| flag | default | what |")[1:]
    table = "".join(part.partition("\n\n")[0] for part in parts)
    (commands,) = (a.choices for a in build_parser()._actions if a.choices and a.dest == "command")
    flags = [flag for a in commands["serve"]._actions for flag in a.option_strings]  # type: ignore[index]
    missing = [
        flag
        for flag in flags
        if flag not in ("-h", "--help") and not flag.startswith("--no-")
        and f"`{flag}`" not in table and f"`--no-{flag[2:]}`" not in table
        and f"`--[no-]{flag[2:]}`" not in table
    ]  # fmt: skip
    assert not missing


def test_a_prompt_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # As Python hands over an argument with the byte FF in it.
    assert "not UTF-8" in _usage_error(["generate", "-p", "a\udcff"], capsys)


def test_an_unknown_log_level_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUENGINE_LOG", "loud")
    assert "CUENGINE_LOG='loud'" in _usage_error(["info"], capsys)


@pytest.mark.parametrize(
    ("flags", "terminal", "told"), [("", True, True), ("", False, False), ("warning", True, False)]
)
def test_what_lets_a_first_start_wait_is_told_at_a_terminal(
    flags: str, terminal: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling the CPU's kernels takes most of a minute, and commands log warnings only."""
    monkeypatch.delenv("CUENGINE_LOG", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    kernels = logging.getLogger("cuengine.device.numba_setup")
    before = kernels.level
    try:
        main(["pull", "./nowhere", *([f"--log-level={flags}"] if flags else [])])
        assert kernels.isEnabledFor(logging.INFO) == told
        assert not logging.getLogger("cuengine").isEnabledFor(logging.INFO)
    finally:
        kernels.setLevel(before)


def test_a_name_too_long_for_a_path_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "a" * 5000]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "File name too long" in error
    assert len(error) < 1000


def test_every_flag_says_what_it_is_for_and_what_it_is_without() -> None:
    (commands,) = (a.choices for a in build_parser()._actions if a.choices and a.dest == "command")
    for name, command in commands.items():  # type: ignore[union-attr]
        for action in command._actions:
            text = action.help or ""
            assert len(text) > 5, f"{name}: {action.option_strings}"
            if action.default not in (None, False, 0, 0.0, "", []) and action.dest != "help":
                assert "default" in text, f"{name}: {action.option_strings}: {text}"


def test_help_says_what_compile_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    (line,) = re.findall(r"^ +compile +(.*(?:\n {8,}.*)*)", capsys.readouterr().out, re.MULTILINE)
    assert "CUDA" in line
    assert "CPU" in line


def test_serve_names_a_model_that_is_not_there_and_not_the_port_that_is_in_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "./nowhere", "--port", str(port)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("cuengine: ./nowhere: no such folder")
        assert str(port) not in error


@pytest.mark.parametrize("command", ["serve --port 0", "chat", "profile", "pull", "generate -p x"])
def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    assert main([name, "./nowhere", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cuengine: ./nowhere: no such folder")
    assert captured.err.count("\n") == 1


def test_cuengine_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUENGINE_DEBUG", "1")
    with pytest.raises(Exception, match="no such folder"):
        main(["pull", "./nowhere"])


def test_an_error_that_nobody_expected_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(pull, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["pull"])


def test_ctrl_c_is_exit_code_130_and_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "run", interrupted)
    assert main(["pull"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys\n"
        "from cuengine.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'aiohttp', 'tokenizers', 'asyncio', 'numba', 'tqdm'}\n"
        "print(heavy & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "set()\n"
    assert "--kv-cache-memory" in done.stdout


# -- info


def test_info_tells_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for wanted in ("version", "python", "platform", "cpu", "memory", "auto takes", "blas", "numba"):
        assert wanted in text
    assert "smollm2-135m" in text


def test_info_as_json_has_the_cache_and_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "deep" / "file").write_bytes(bytes(2500))
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path))
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cache"] == {"folder": str(tmp_path), "models/": "2.5 kB"}
    assert facts["cuengine"]["version"]


def test_the_download_of_the_default_model_has_one_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BUILTIN_MODELS[DEFAULT_MODEL]
    size = f"a download of {format_size(model.wheel_size)}"
    assert size in README
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin.importlib.metadata, "distribution", _no_distribution)
    assert size in info._builtin_models()[model.name]


def _no_distribution(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_info_has_no_section_that_looks_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in os.environ:
        if info.ENVIRONMENT.fullmatch(name):
            monkeypatch.delenv(name)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "environment: -" in lines
    for line, following in itertools.pairwise([*lines, ""]):
        assert not line.endswith(":") or following.startswith("  ")


def test_what_to_install_is_a_command_for_who_has_a_clone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One way of saying it, with extras that there are."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    for major, extra in ((None, "cuda13"), (12, "cuda12"), (13, "cuda13")):
        with pytest.raises(
            NvrtcError, match=rf"pip install '\.\[{extra}\]' in cuengine's checkout$"
        ):
            find_nvrtc.__wrapped__(major)
    root = Path(__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for folder in ("cuengine", "api", "model"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "'cuengine[" not in text, path
            assert {*re.findall(r"how_to_install\(f?['\"](\w+)['\"]", text)} <= extras.keys()


def test_info_shows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-1")
    monkeypatch.setenv("CUENGINE_API_KEY", "hush-2")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:hush-3@example.org/hub")
    monkeypatch.setenv("UNRELATED", "hush-4")
    facts = info.collect()
    assert "hush" not in json.dumps(facts)
    assert facts["environment"]["HF_TOKEN"] == "(set)"
    assert facts["environment"]["HF_ENDPOINT"] == "https://...@example.org/hub"


def test_info_survives_a_machine_without_proc_numba_and_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_library(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr(info, "_read", lambda path: "")
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(info.ctypes, "CDLL", no_library)
    assert main(["info"]) == 0
    assert "not installed" in capsys.readouterr().out


# -- chat's history, on an engine that answers what it is told; a letter is a token


class _Engine:
    max_model_len = 100

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.prompts: list[str] = []
        self.tokenizer = SimpleNamespace(encode=self.encode)
        self.chat_template = SimpleNamespace(render=self.render)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{message['role'][0]}:{message['content']};" for message in messages)

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, *, request_id: str
    ) -> AsyncIterator[RequestDelta]:
        self.prompts.append("".join(map(chr, prompt_token_ids)))
        answer = self.answers.pop(0)
        for index, piece in enumerate(answer):
            if isinstance(piece, BaseException):
                raise piece
            last = index == len(answer) - 1
            yield RequestDelta(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sequences=[SequenceDelta(0, piece, [1], finish_reason="stop" if last else None)],
            )


def _chat(answers: list[Any], system: str | None = None) -> tuple[Chat, _Engine]:
    engine = _Engine(answers)
    return Chat(cast(Any, engine), SamplingParams(max_tokens=10), system), engine


async def test_chat_sends_the_whole_conversation_and_prints_the_answer_as_it_comes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat, engine = _chat([["he", "llo"], ["bye"], ["new"]], system="S")
    await chat.answer("a")
    assert capsys.readouterr().out == "hello\n"
    await chat.answer("b")
    assert engine.prompts == ["s:S;u:a;", "s:S;u:a;a:hello;u:b;"]
    chat.reset()
    await chat.answer("c")
    assert engine.prompts[-1] == "s:S;u:c;"


async def test_chat_drops_the_oldest_turn_and_says_so_when_the_context_is_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat, engine = _chat([["x" * 30], ["y" * 30], ["z"]], system="S")
    await chat.answer("first")
    await chat.answer("second")
    assert capsys.readouterr().err == ""
    await chat.answer("third")
    # All of it would be 4 + 8 + 33 + 9 + 33 + 8 = 95 tokens, and 10 are wanted for the answer.
    assert engine.prompts[-1] == f"s:S;u:second;a:{'y' * 30};u:third;"
    assert "2 oldest messages dropped" in capsys.readouterr().err
    assert chat.messages[0]["content"] == "second"


async def test_a_stopped_answer_stays_as_far_as_it_came() -> None:
    chat, engine = _chat([["half", KeyboardInterrupt()], ["rest"]])
    with pytest.raises(KeyboardInterrupt):
        await chat.answer("a")
    await chat.answer("b")
    assert engine.prompts[-1] == "u:a;a:half;u:b;"


async def test_a_message_that_is_refused_is_forgotten() -> None:
    chat, engine = _chat([["ok"], [RequestError("too long")], ["fine"]])
    await chat.answer("a")
    with pytest.raises(RequestError):
        await chat.answer("b" * 200)
    await chat.answer("c")
    assert engine.prompts[-1] == "u:a;a:ok;u:c;"


def test_without_ray_its_backend_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is to end as it did
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--port", "0", "--data-parallel-backend", "ray"]) == 1
    assert "pip install '.[ray]'" in capsys.readouterr().err


def test_a_model_after_a_flag_that_may_be_repeated_is_the_model() -> None:
    flags = "--api-key a --api-key b --served-model-name n"
    args = build_parser().parse_args(["serve", *flags.split(), "model"])
    assert (args.model, args.api_key, args.served_model_name) == ("model", ["a", "b"], ["n"])


def test_every_setting_of_the_server_has_a_flag_or_is_one_that_needs_none() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the package opentelemetry-sdk")
    flags = (
        "--host h --port 1 --uds u --root-path /r --ssl-certfile c --ssl-keyfile k --ssl-ca-certs a"
        " --served-model-name n --api-key x --allowed-origins o --tool-call-parser mistral"
        " --max-concurrent-requests 3 --max-queued-requests 4 --max-prompt-tokens 5 --max-n 6"
        " --max-body-size 7KB --request-timeout 8 --drain-timeout 9 --no-access-log"
        " --otlp-traces-endpoint http://h:4318/v1/traces"
    )
    settings = serve._settings(build_parser().parse_args(["serve", *flags.split()]))
    changed = {
        field.name
        for field in dataclasses.fields(ServerSettings)
        if getattr(settings, field.name) != getattr(ServerSettings(), field.name)
    }
    fixed = {"header_timeout", "body_timeout", "keepalive_seconds", "write_timeout"}
    assert changed == {field.name for field in dataclasses.fields(ServerSettings)} - fixed
    assert settings.max_body_bytes == 7000


def test_json_log_lines_are_objects_with_the_fields_given_and_the_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("two\nlines %s", "\u0e44", extra={"fields": {"status": 200}})
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logger.exception("broken")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"], first["status"]) == ("two\nlines \u0e44", "info", 200)
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert "ZeroDivisionError" in second["exception"]


@pytest.mark.parametrize(
    ("redirect", "code", "says"),
    [
        (">/dev/full", 1, "cuengine: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
    ],
)
def test_odd_standard_streams_bring_one_line_at_most(redirect: str, code: int, says: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m cuengine.cli.main info {redirect}', sys.executable],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=False, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, says)


def test_processes_that_are_started_have_standard_streams_where_the_caller_closed_them() -> None:
    child = "import os; [os.fstat(number) for number in range(3)]"
    code = (
        "import subprocess, sys\n"
        "from cuengine.cli import main\n"
        "main._open_standard_streams()\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    closed = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, sys.executable, code], check=False).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_no_text_fails_for_the_terminal_s_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    monkeypatch.setattr(info, "run", lambda args: print("\u0e44 \U0001f600") or 0)
    assert main(["info"]) == 0
    assert output.getvalue() == rb"\u0e44 \U0001f600" + b"\n"


# -- serve's end before it serves


def test_a_port_in_use_shows_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is to end as it did
    monkeypatch.setattr(serve, "build_engine", lambda *_, **__: pytest.fail("a model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert f"port {port} is in use" in capsys.readouterr().err


def test_sigterm_while_loading_ends_serve_whatever_swallows_the_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def load(*_: object, **__: object) -> tuple[str, None]:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        return "model", None

    def never(*_: object) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr(serve, "build_engine", load)
    monkeypatch.setattr("cuengine.api.server.run_server", never)
    try:
        with pytest.raises(SystemExit, match="143"):
            main(["serve", "--port", "0"])
    finally:
        signal.signal(signal.SIGTERM, before)
