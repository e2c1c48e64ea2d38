"""The command line with a tiny model: `generate`, `chat`, `pull` and `serve` as people run them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuengine.cli.main import main
from cuengine.cli.values import format_size
from cuengine.model.tokenizer import Tokenizer
from cuengine.paths import cache_dir

SECONDS = 60
"""For something to happen that only fails to happen when it is broken."""

LONG = 1200
"""Tokens of an answer that is to be stopped: 20 s of SmolLM2, but less than 1 s of a tiny model."""


def _command(*arguments: object) -> list[str]:
    flags = ["--kv-cache-memory", "64MB"]
    return [sys.executable, "-m", "cuengine.cli.main", *map(str, arguments), *flags]


def _run(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        _command(*arguments), input=stdin, capture_output=True, check=False, timeout=SECONDS
    )


def _generate(
    capsys: pytest.CaptureFixture[str], model: Path, *arguments: str, prompt: str = "hello"
) -> str:
    command = ["generate", str(model), "-p", prompt, "--kv-cache-memory", "64MB", *arguments]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_generate_prints_the_text_that_json_has_too(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-tokens", "12", "--temperature", "0", "--ignore-eos"]
    text = _generate(capsys, tiny_chat_model, *flags)
    result: dict[str, Any] = json.loads(_generate(capsys, tiny_chat_model, *flags, "--json"))
    assert text == result["text"] + "\n"
    assert result["usage"] == {"prompt_tokens": len("hello"), "completion_tokens": 12}
    assert (result["finish_reason"], result["prompt"]) == ("length", "hello")
    assert result["model"] == tiny_chat_model.name


def test_a_seed_gives_the_same_text_again_and_without_one_it_differs(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-tokens", "24", "--temperature", "1.5", "--ignore-eos"]
    seeded = {_generate(capsys, tiny_chat_model, *flags, "--seed", "7") for _ in range(2)}
    free = {_generate(capsys, tiny_chat_model, *flags) for _ in range(2)}
    assert len(seeded) == 1
    assert len(free) == 2


def test_generate_with_chat_sends_the_prompt_through_the_template(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-tokens", "1", "--json"]
    chat = json.loads(_generate(capsys, tiny_chat_model, "--chat", "--system", "S", *flags))
    rendered = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    expected = Tokenizer.from_folder(tiny_chat_model).encode(rendered, add_special_tokens=False)
    assert chat["usage"]["prompt_tokens"] == len(expected)


def test_generate_without_a_tokenizer_says_what_is_missing(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_model("bias")), "-p", "x"]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context_is_one_line(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(tiny_chat_model), "-p", "x" * 100, "--max-model-len", "64"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("cuengine: ")
    assert "64" in error
    assert error.count("\n") == 1


def test_generate_reads_a_prompt_from_a_pipe(tiny_chat_model: Path) -> None:
    done = _run("generate", tiny_chat_model, "-p", "-", "--max-tokens", 1, "--json", stdin=b"abc")
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 3
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_goes_away_ends_generate_quietly(tiny_chat_model: Path) -> None:
    process = subprocess.Popen(
        _command("generate", tiny_chat_model, "-p", "x", "--max-tokens", 2000, "--ignore-eos"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(SECONDS) == 1


def test_ctrl_c_ends_generate_quietly_with_130(smollm2: str) -> None:
    process = subprocess.Popen(
        _command(
            "generate",
            smollm2,
            "-p",
            "x",
            "--max-tokens",
            LONG,
            "--ignore-eos",
            "--max-model-len",
            LONG + 100,
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, error) == (130, b"")


def test_chat_with_a_pipe_answers_each_line(tiny_chat_model: Path) -> None:
    lines = b"one\n\n/reset\none\n/exit\nnever\n"
    flags = ("--temperature", 0, "--max-tokens", 8, "--ignore-eos")
    done = _run("chat", tiny_chat_model, *flags, stdin=lines)
    assert done.returncode == 0
    # After /reset the same message gets the same answer; each ends with the line that chat adds.
    half, rest = divmod(len(done.stdout), 2)
    assert rest == 0
    assert done.stdout[:half] == done.stdout[half:]
    assert done.stdout.endswith(b"\n")


class _Terminal:
    """A program in a terminal of its own, and what it has shown so far."""

    def __init__(self, command: list[str]) -> None:
        self.shown = b""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execvp(command[0], command)

    def until(self, text: bytes, seconds: float = SECONDS) -> bytes:
        """All that was shown up to and with `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            if time.monotonic() > deadline:
                raise TimeoutError(self.shown)
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 4096)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def press(self, keys: bytes, text: bytes) -> None:
        """Types the keys until `text` is shown: readline may miss a signal as it begins to wait."""
        for _ in range(SECONDS):
            self.type(keys)
            with contextlib.suppress(TimeoutError):
                self.until(text, seconds=1)
                return
        raise TimeoutError(self.shown)

    def exit_code(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status)


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(smollm2: str) -> None:
    flags = ("--temperature", 0, "--max-tokens", LONG, "--ignore-eos")
    terminal = _Terminal(_command("chat", smollm2, *flags))
    terminal.until(b">>> ")
    terminal.type(b"hi\r")
    terminal.until(b"hi\r\n")
    while len(terminal.shown) < 20:
        terminal.shown += os.read(terminal.master, 4096)
    terminal.type(b"\x03")
    terminal.until(b"(stopped)")
    terminal.until(b">>> ")
    terminal.press(b"\x03", b"Ctrl-D or /exit leaves.")
    terminal.type(b"/help\r")
    terminal.until(b"/reset  forget")
    terminal.until(b">>> ")
    terminal.type(b"\x04")
    assert terminal.exit_code() == 0


def test_pull_says_where_the_model_is_and_can_be_repeated(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["pull", str(tiny_chat_model)]) == 0
        shown = capsys.readouterr().out
        weights = sum(path.stat().st_size for path in tiny_chat_model.glob("*.safetensors"))
        assert f"in {tiny_chat_model}: {format_size(weights)} of weights" in shown
        assert "LlamaForCausalLM" in shown


def test_after_pull_a_start_compiles_nothing(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba")
    assert main(["pull", str(tiny_chat_model)]) == 0
    told = capsys.readouterr()
    assert "Compiling the CPU's kernels" in told.err
    assert re.search(r"kernels for this CPU: ready \(\d+ s\)", told.out)
    kept = {path: path.stat().st_mtime_ns for path in cache_dir().glob("numba/*/*.nb?")}
    _generate(capsys, tiny_chat_model, "--device", "cpu", "--max-tokens", "1")
    assert {path: path.stat().st_mtime_ns for path in cache_dir().glob("numba/*/*.nb?")} == kept
    assert kept


def test_pull_of_the_built_in_model_is_done_at_once_where_it_is_there(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "smollm2-135m"]) == 0
    assert f"in {smollm2_folder}" in capsys.readouterr().out


def test_serve_takes_names_and_keys_from_flags_and_environment(tiny_chat_model: Path) -> None:
    process = subprocess.Popen(
        _command(
            "serve",
            tiny_chat_model,
            "--port",
            0,
            "--served-model-name",
            "a",
            "--served-model-name",
            "b",
        ),
        env=os.environ | {"CUENGINE_API_KEY": "secret"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        log = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log)):
            line = process.stderr.readline()
            assert line, log
            log += line
        url = f"{found[0]}/v1/models"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=SECONDS)
        assert refused.value.code == 401
        request = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            names = {model["id"] for model in json.load(answer)["data"]}
        assert names == {"a", "b"}
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=SECONDS)
        assert process.returncode == 0
        assert "Traceback" not in log + rest
    finally:
        process.kill()
        process.wait()
