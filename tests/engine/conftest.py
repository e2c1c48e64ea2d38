"""Engines on the emulated device, for tests of the CUDA device with no GPU."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cuengine import LLM
from cuengine.device.emulated import host
from cuengine.device.nvrtc import NvrtcError, find_nvrtc

EmulatedLLM = Callable[..., LLM]


@pytest.fixture
def emulator() -> None:
    """Skips where the emulated device cannot run."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    try:
        find_nvrtc()
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")


@pytest.fixture
def emulated_llm(monkeypatch: pytest.MonkeyPatch, emulator: None) -> EmulatedLLM:
    """emulated_llm(folder, runtime={"architecture": 75}, max_num_seqs=4): an LLM on that device.

    runtime: what EmulatedRuntime is given; all else is LLM's.
    """
    original = host.EmulatedRuntime

    def make(folder: Path, *, runtime: dict[str, object] | None = None, **fields: object) -> LLM:
        monkeypatch.setattr(host, "EmulatedRuntime", functools.partial(original, **(runtime or {})))
        settings = {"device": "emulated", "skip_tokenizer_init": True, **fields}
        return LLM(str(folder), **settings)

    return make
