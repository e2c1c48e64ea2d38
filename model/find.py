"""From the name a user gives to the files of a model: folder, GGUF file, hub name or built-in name.

What is missing is fetched by hub.py and builtin.py; nothing here reads a weight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from cuengine.errors import ModelError

GGUF_MAGIC = b"GGUF"
ALLOWED = (
    "a folder with config.json, *.safetensors and tokenizer.json; a .gguf file; "
    "a hub name (org/name, or org/name:FILE.gguf); a built-in name"
)
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_NAME = re.compile(rf"({_PART}/{_PART})(?:[:/]([^:]+\.gguf))?")
_GGUF_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: either a folder in the hub's layout or one GGUF file.

    name  what to call the model where the user gives it no other name
    """

    name: str
    folder: Path | None
    gguf: Path | None

    @property
    def path(self) -> Path:
        path = self.folder or self.gguf
        assert path is not None
        return path


def find_model(name: str, *, revision: str | None = None, progress: bool = True) -> ModelFiles:
    """The files behind `name`, fetched first where they are not here yet.

    A path that exists comes before a built-in name, and that before a hub name. `revision` is a
    branch, tag or commit and only means something on a hub. Raises ModelError.
    """
    found = _look_up(name, revision)
    return found if isinstance(found, ModelFiles) else found(progress)


def check_model_name(name: str, *, revision: str | None = None) -> None:
    """Raises ModelError where `find_model` would without fetching anything."""
    _look_up(name, revision)


def _look_up(name: str, revision: str | None) -> ModelFiles | Callable[[bool], ModelFiles]:
    """Files that are a path of this machine; else what fetches them, with a progress bar or not."""
    if not name.strip():
        raise ModelError(f"the model's name is empty. Allowed: {ALLOWED}")
    hub_name = _HUB_NAME.fullmatch(name)
    try:
        path = Path(os.path.expanduser(name))  # of no user that there is, it stays as it is
        if path.exists():
            _no_revision(name, revision, "a path")
            return _in_folder(path) if path.is_dir() else _file(path)
    except OSError as error:  # too long, or a folder that may not be looked into
        raise ModelError(f"{name[:200]}: {error.strerror}. A model is {ALLOWED}") from None

    from cuengine.model.builtin import BUILTIN_MODELS

    if name.lower() in BUILTIN_MODELS:
        _no_revision(name, revision, "a built-in model")
        return partial(_fetch_builtin, name.lower())
    if hub_name and not _means_a_path(name):
        return partial(_fetch_from_hub, name, hub_name[1], hub_name[2], revision)
    if name.endswith(".gguf"):
        raise ModelError(f"{name}: no such file")
    if _means_a_path(name) or "/" in name:
        raise ModelError(f"{name}: no such folder. A model is {ALLOWED}")
    near = get_close_matches(name.lower(), BUILTIN_MODELS, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Built in: {', '.join(BUILTIN_MODELS)}."
    raise ModelError(
        f"{name}: no such folder and no built-in model of that name. {hint} A model is {ALLOWED}"
    )


def _fetch_builtin(name: str, progress: bool) -> ModelFiles:
    from cuengine.model.builtin import BUILTIN_MODELS, fetch_builtin

    model = BUILTIN_MODELS[name]
    return ModelFiles(model.name, None, fetch_builtin(model, progress=progress))


def _fetch_from_hub(
    name: str, repository: str, file: str | None, revision: str | None, progress: bool
) -> ModelFiles:
    from cuengine.model.hub import fetch_from_hub

    found = fetch_from_hub(repository, file=file, revision=revision, progress=progress)
    return ModelFiles(name, *((found, None) if found.is_dir() else (None, found)))


def _means_a_path(name: str) -> bool:
    """Whether a name that does not exist can only have been meant as a path."""
    return name.startswith(("/", "./", "../", "~")) or (
        name.endswith(".gguf") and name.count("/") < 2 and ":" not in name
    )


def _no_revision(name: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ModelError(f"revision={revision!r}: {name} is {kind}; only hub names have revisions")


def _file(path: Path) -> ModelFiles:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if magic == GGUF_MAGIC:
        return ModelFiles(path.stem, None, path)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: is one file of a model. Give its folder: {path.parent}")
    begin = f"it begins with {magic!r}" if magic else "it is empty"
    raise ModelError(f"{path}: not a GGUF file: {begin}. A model is {ALLOWED}")


def _in_folder(folder: Path) -> ModelFiles:
    name = folder.resolve().name
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return ModelFiles(name, folder, None)
    if found := sorted(folder.glob("*.gguf")):
        return ModelFiles(name, None, folder / choose_gguf(str(folder), [p.name for p in found]))
    if any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
        return ModelFiles(name, folder, None)
    raise ModelError(f"{folder}: has neither config.json nor a .gguf file. A model is {ALLOWED}")


def choose_gguf(place: str, names: list[str]) -> str:
    """The one GGUF file among `names` that a model is in; ModelError where that is not clear."""
    shards = [name for name in names if _GGUF_SHARD.search(name)]
    if len(shards) == len(names) and len(names) > 1:
        raise ModelError(
            f"{place}: {names[0]} is one of {len(names)} parts of a split GGUF, which is not "
            "supported. Join them with `llama-gguf-split --merge` and give the one file"
        )
    if len(names) > 1:
        raise ModelError(
            f"{place}: has {len(names)} GGUF files; name the one to use: {', '.join(names)}"
        )
    return names[0]
