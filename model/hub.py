"""Models from a hub, through huggingface_hub, whose settings hold: HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE. The small files come first, so that an unsupported model costs no download.

huggingface_hub takes a good part of a second to import; only fetching does it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuengine.errors import CuengineError, ModelError
from cuengine.model.config import read_model_config

# fnmatch's * also matches "/", so folders inside a repository are left out by a pattern of theirs.
_SMALL_FILES = ["*.json", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_IGNORED = ["*/*", "consolidated*"]
_ATTEMPTS = 5

logger = logging.getLogger(__name__)


def fetch_from_hub(
    name: str, *, file: str | None = None, revision: str | None = None, progress: bool = True
) -> Path:
    """Folder with a model's config, tokenizer and safetensors; or its GGUF where it has no others.

    `file` asks for one GGUF file of the repository. A download that breaks off goes on where it
    broke, a few times; files that are here already are not fetched again. Raises ModelError.
    """
    with _hub_errors(name, file, revision):
        from huggingface_hub import hf_hub_download, snapshot_download

        if file is not None:
            with _bars(name, progress):
                return Path(_persistently(lambda: hf_hub_download(name, file, revision=revision)))
        with _bars(name, False):
            snapshot = Path(
                snapshot_download(
                    name, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=_IGNORED
                )
            )
        # The snapshot's folder is named after its commit: what follows is of the same commit.
        commit = snapshot.name
        files = _list_files(name, commit, snapshot)
        if not any(path.endswith(".safetensors") and "/" not in path for path in files):
            gguf = _only_gguf(name, files)
            with _bars(name, progress and not (snapshot / gguf).exists()):
                return Path(_persistently(lambda: hf_hub_download(name, gguf, revision=commit)))
        _refuse_unsupported(name, snapshot)
        with _bars(name, progress and not any(snapshot.glob("*.safetensors"))):
            _persistently(
                lambda: snapshot_download(
                    name,
                    revision=commit,
                    allow_patterns=_SMALL_FILES + _WEIGHTS,
                    ignore_patterns=_IGNORED,
                )
            )
        return snapshot


def _persistently(download: Callable[[], str]) -> str:
    """Calls again after a download broke off: huggingface_hub keeps what has come and goes on from
    there, but before its version 2 only in the next call.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for _ in range(_ATTEMPTS - 1):
        try:
            return download()
        except (HfHubHTTPError, LocalEntryNotFoundError):
            raise  # the hub has answered, or was never reached
        except (OSError, _transport_error()) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of this machine, such as a full disk
            logger.warning("The download broke off and goes on: %s", error)
    return download()


def _list_files(name: str, commit: str, snapshot: Path) -> list[str]:
    """Paths in the repository at `commit`; without a network, those that are here."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    here = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    if any(path.endswith((".safetensors", ".gguf")) for path in here):
        return here
    try:
        return HfApi().list_repo_files(name, revision=commit)
    except HfHubHTTPError:
        raise
    except (OSError, _transport_error()):
        return here


def _only_gguf(name: str, files: list[str]) -> str:
    from cuengine.model.find import choose_gguf

    if found := sorted(path for path in files if path.endswith(".gguf")):
        return choose_gguf(f"{name} on the hub", found)
    if "adapter_config.json" in files:
        raise ModelError(f"{name}: is a LoRA adapter, which is not supported. Use a merged model")
    raise ModelError(
        f"{name}: has neither *.safetensors nor *.gguf; weights of other kinds are not read"
    )


def _refuse_unsupported(name: str, snapshot: Path) -> None:
    """Raises ModelError where this engine cannot run the model, before its weights are fetched."""
    if not (snapshot / "config.json").exists():
        raise ModelError(f"{name}: has no config.json")
    try:
        read_model_config(snapshot)
    except CuengineError as error:
        raise ModelError(f"{name}: {error}") from error


@contextmanager
def _bars(name: str, progress: bool) -> Iterator[None]:
    """Lets huggingface_hub draw its bars, in a terminal; a log gets one line instead."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    if progress and not sys.stderr.isatty():
        print(f"Fetching {name} …", file=sys.stderr, flush=True)
    if utils.are_progress_bars_disabled() or (progress and sys.stderr.isatty()):
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _transport_error() -> type[Exception]:
    """Base of the errors of the HTTP client, which is another library in each major version."""
    from huggingface_hub.errors import HfHubHTTPError

    base = HfHubHTTPError.__bases__[0]
    assert issubclass(base, Exception)
    return base


@contextmanager
def _hub_errors(name: str, file: str | None, revision: str | None) -> Iterator[None]:
    """Turns what huggingface_hub raises into a ModelError of one line."""
    from huggingface_hub import errors

    where = f"{name} at revision {revision!r}" if revision else name
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name}: is gated. Accept its terms on its page, make a token and set HF_TOKEN"
            + (" (the token that is set has no access yet)" if os.environ.get("HF_TOKEN") else "")
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: no such folder here and no such model on the hub. "
            "Check the spelling; a private model needs HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name}: has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(_unreachable(where, error)) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{where}: has no file {file!r}") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{name}: is not a hub name (org/name): {error}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ModelError(
                f"{name}: the hub refused access ({status}). Check HF_TOKEN"
            ) from error
        raise ModelError(f"{name}: the hub answered with status {status}. Try later") from error
    except (OSError, _transport_error()) as error:
        raise ModelError(_unreachable(where, error)) from error


def _unreachable(where: str, error: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return (
            f"{where}: no such folder here, not wholly in the hub's cache, and HF_HUB_OFFLINE is "
            "set. Unset it and pull the model once"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(error, OSError) and error.errno is not None:
        return f"{where}: cannot be stored: {error}. HF_HOME names another folder for the cache"
    return (
        f"{where}: no such folder here, not wholly in the hub's cache, and the hub cannot be "
        f"reached ({type(cause).__name__}: {' '.join(str(cause).split())}). "
        "Check the network, HF_ENDPOINT and the proxy settings"
    )
