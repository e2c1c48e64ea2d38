"""What `serve`, `chat` and `generate` begin with: the model's files, then an engine on them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cuengine.config import EngineConfig

if TYPE_CHECKING:
    from cuengine.async_engine import AsyncEngine

Report = Callable[[str], None]


def note(text: str) -> None:
    """One line for the person at the terminal; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def model_folder(config: EngineConfig, *, progress: bool) -> tuple[str, Path]:
    """The model's own name and its folder, fetched and converted first where needed. ModelError."""
    from cuengine.model.find import find_model

    files = find_model(config.model, revision=config.revision, progress=progress)
    if files.gguf is None:
        assert files.folder is not None
        return files.name, files.folder
    from cuengine.model.gguf import convert_gguf

    return files.name, convert_gguf(files.gguf, progress=progress)


def build_engine(config: EngineConfig, report: Report) -> tuple[str, AsyncEngine]:
    """The model's own name and an engine that only has to be started; `report` gets each phase."""
    started = time.perf_counter()
    name, folder = model_folder(config, progress=True)
    found = time.perf_counter()
    report(f"model   {name} in {folder} ({found - started:.1f} s)")

    from cuengine.async_engine import AsyncEngine

    imported = time.perf_counter()
    report(f"code    imported ({imported - found:.1f} s)")
    engine = AsyncEngine.from_config(dataclasses.replace(config, model=str(folder), revision=None))
    stats = engine.stats()
    blocks = stats.num_blocks * config.block_size
    report(
        f"engine  context {engine.max_model_len} tokens, KV cache {blocks} tokens "
        f"({time.perf_counter() - imported:.1f} s)"
    )
    return name, engine
