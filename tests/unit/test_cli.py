"""The command line without a model: flags, exit codes, `info`, and how chat keeps its history."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
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
from cuengine.cli.log import JsonLines
from cuengine.cli.main import main
from cuengine.cli.values import format_size, memory_size
from cuengine.errors import RequestError
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
        ("serve --max-num-seqs 0", "max_num_seqs=0"),
        ("serve --device tpu", "invalid choice: 'tpu'"),
        ("serve --mod x", "unrecognized arguments: --mod"),
        ("generate", "required: -p/--prompt"),
        ("generate -p x --temperature -1", "temperature=-1.0"),
        ("generate -p x --max-tokens 0", "max_tokens=0"),
        ("generate -p x --system y", "--system needs --chat"),
        ("chat --top-p 2", "top_p=2.0"),
        ("profile --steps 0", "'0' is not a whole number of at least 1"),
        ("profile --max-num-seqs 4", "unrecognized arguments: --max-num-seqs"),
        ("compile --out x", "--device cuda needs --arch"),
        ("compile --arch sm_90", "--device cuda needs --out"),
        ("compile --device cpu --arch sm_90", "--arch is for --device cuda"),
        ("compile --device cpu --head-dim 64", "--head-dim is for --device cuda"),
        ("compile --device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in _usage_error(command.split(), capsys)


def test_an_empty_prompt_or_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompt is empty" in _usage_error(["generate", "-p", ""], capsys)
    assert "API key is empty" in _usage_error(["serve", "--api-key", ""], capsys)


def test_a_prompt_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # As Python hands over an argument with the byte FF in it.
    assert "not UTF-8" in _usage_error(["generate", "-p", "a\udcff"], capsys)


def test_an_unknown_log_level_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUENGINE_LOG", "loud")
    assert "CUENGINE_LOG='loud'" in _usage_error(["info"], capsys)


def test_a_name_too_long_for_a_path_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "a" * 5000]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "File name too long" in error
    assert len(error) < 1000


@pytest.mark.parametrize("command", ["serve", "chat", "profile", "pull", "generate -p x"])
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
