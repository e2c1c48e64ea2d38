"""What a model has beside its weights: files, config, tokenizer, chat template, recommendations.

The server's process loads no more than that, and so nothing here imports NumPy or the engine.
Weights, and all of an engine, are in loading.py.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuengine.config import EngineConfig
from cuengine.errors import ModelError

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.find import ModelFiles
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer

    Text = tuple[Tokenizer | None, ChatTemplate | None, GenerationDefaults]

logger = logging.getLogger("cuengine")


@dataclass(slots=True)
class TextSide:
    """What a process needs of a model that runs in another.

    name     the model's own
    folder   where it is
    """

    name: str
    folder: Path
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation_defaults: GenerationDefaults


def load_text_side(config: EngineConfig, found: Callable[[EngineConfig], None]) -> TextSide:
    """Called with where the model is as soon as it is known, `found` can load the rest beside.

    Raises ModelError.
    """
    from cuengine.model.config import read_model_config
    from cuengine.model.find import find_model

    progress = sys.stderr.isatty()
    with hurry():
        with phase("model files"):
            files = find_model(config.model, revision=config.revision, progress=progress)
            folder = _folder(files, progress=progress)
        found(replace(config, model=str(folder), revision=None))
        model_config = read_model_config(folder)
        return TextSide(files.name, folder, model_config, *load_text(config, folder))


def load_text(config: EngineConfig, folder: Path) -> Text:
    """Tokenizer and chat template, None where there are to be none, and what the authors advise."""
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.generation_config import read_generation_config
    from cuengine.model.tokenizer import Tokenizer

    with phase("tokenizer"):
        defaults = read_generation_config(folder)
        if config.skip_tokenizer_init:
            return None, None, defaults
        tokenizer = Tokenizer.from_folder(folder)
        return tokenizer, ChatTemplate.from_folder(folder, config.chat_template), defaults


def find(name: str, revision: str | None, *, progress: bool) -> tuple[Path, ModelConfig]:
    """A model's folder, fetched and converted where it has to be, and its config."""
    from cuengine.model.config import read_model_config
    from cuengine.model.find import find_model

    files = find_model(name, revision=revision, progress=progress)
    folder = _folder(files, progress=progress)
    return folder, read_model_config(folder)


def _folder(files: ModelFiles, *, progress: bool) -> Path:
    if files.gguf is None:
        if files.folder is None:
            raise ModelError(f"{files.name}: neither a folder nor a .gguf file")
        return files.folder
    # Reading GGUF takes a package that is slow to import.
    from cuengine.model.gguf import convert_gguf

    return convert_gguf(files.gguf, progress=progress)


@contextmanager
def hurry() -> Iterator[None]:
    """Python as it suits loading: a few threads take turns, and what they make is kept.

    Half a million objects come with Numba, and looking for garbage among them takes 0.2 s. A thread
    that has packed a matrix, without the GIL, would wait 5 ms for it.
    """
    collects, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()


@contextmanager
def phase(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    logger.info("%s: %.2f s", name, time.perf_counter() - start)
