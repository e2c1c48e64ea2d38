"""Fixtures that more than one folder of tests uses, and what becomes of skipped tests in CI.

Golden data (reference outputs of Hugging Face transformers in float32) is in tests/data/golden.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent))

import engine_control

from cuengine import engine_link

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background jobs. Programs that tests start, and interrupt, would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "data" / "golden"

MAY_SKIP = (
    "needs a GPU",
    "needs kubectl",
    "needs root",
    "needs torch",
    "needs transformers",
    "needs the package langchain-openai",  # of the extra `clients`, for `make accept`
    "needs the package ray",  # of the extra `ray`, for `make accept`
)
"""How the reasons begin with which a test may be skipped even in CI (CUENGINE_MUST_RUN=1)."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """main() sets the level of the process's logger."""
    level = logging.getLogger("cuengine").level
    yield
    logging.getLogger("cuengine").setLevel(level)


@pytest.fixture(scope="module")
def module_control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine_control.Control]:
    """Engine processes started in this module's tests are controlled."""
    folder = tmp_path_factory.mktemp("control")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUENGINE_TEST_CONTROL", str(folder))
        patch.setattr(engine_link, "COMMAND", engine_control.COMMAND)
        yield engine_control.Control(folder)


@pytest.fixture
def control(module_control: engine_control.Control) -> Iterator[engine_control.Control]:
    """What the test sets is unset when it ends."""
    yield module_control
    module_control.reset()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """tiny_model("bias") -> folder with config.json, weights and reference.npz; no tokenizer."""

    def folder(name: str) -> Path:
        found = GOLDEN / "tiny" / name
        assert found.is_dir(), f"no tiny model {name}: {sorted(os.listdir(GOLDEN / 'tiny'))}"
        return found

    return folder


@pytest.fixture(scope="session")
def golden_smollm2() -> dict[str, Any]:
    """Greedy outputs of the real SmolLM2 with top-5 log-probabilities, from its GGUF's weights."""
    content: dict[str, Any] = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    return content


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of the real SmolLM2, for LLM(...) or find_model; fetched once into the user's cache."""
    from cuengine.errors import CuengineError
    from cuengine.model.find import find_model

    try:
        files = find_model("smollm2-135m", progress=False)
    except CuengineError as error:
        pytest.skip(f"needs the model smollm2-135m: {error}")
    return str(files.gguf or files.folder)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: str) -> Path:
    """The same model as a folder in Hugging Face's layout."""
    from cuengine.model.gguf import convert_gguf

    path = Path(smollm2)
    return convert_gguf(path, progress=False) if path.suffix == ".gguf" else path


@pytest.fixture(scope="session")
def tiny_chat_model(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random model of 2048 positions with a tokenizer and a ChatML template: one byte, one token.

    0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|> (which ends a text); byte b is token b + 3. Bytes
    FD to FF, which UTF-8 never uses, are left out so that all fits the model's 256 tokens.
    """
    source = tiny_model("llama3_rope")
    folder = tmp_path_factory.mktemp("tiny_chat_model")
    for file in source.iterdir():
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "chat_template": CHATML,
            }
        )
    )
    return folder


def _byte_tokenizer() -> Tokenizer:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {token: index for index, token in enumerate(special)}
    vocab |= {letters[byte]: byte + len(special) for byte in range(256 - len(special))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _fail_if_skipped_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped_in_ci(report)
    return report


def _fail_if_skipped_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skip hides a missing package: where CUENGINE_MUST_RUN=1, only MAY_SKIP's are let pass."""
    if os.environ.get("CUENGINE_MUST_RUN") != "1" or not report.skipped:
        return
    path, line, message = report.longrepr
    reason = str(message).removeprefix("Skipped: ")
    if not reason.startswith(MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: skipped where it must run: {reason}"
