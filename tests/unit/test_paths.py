"""Where the cache lies, also for users without a home and with odd variables."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from cuengine.errors import ConfigError, ModelError
from cuengine.model.builtin import BUILTIN_MODELS, find_builtin
from cuengine.model.find import find_model
from cuengine.paths import cache_dir

NOBODY = "~no_such_user_here"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CUENGINE_CACHE": "/a b/\u00e9"}, "/a b/\u00e9"),
        ({"CUENGINE_CACHE": "~/x", "HOME": "/h"}, "/h/x"),
        ({"CUENGINE_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/cuengine"),
        ({"HOME": "/h"}, "/h/.cache/cuengine"),
    ],
)
def test_the_cache_lies_where_the_environment_says(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUENGINE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(folder)


def test_without_a_home_there_is_one_line_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUENGINE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_uid: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match="home directory: set CUENGINE_CACHE"):
        cache_dir()


def test_a_path_that_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUENGINE_CACHE", os.fsdecode(b"/a\xff/b"))
    with pytest.raises(ConfigError, match=r"'/a\\udcff/b' is not UTF-8: set CUENGINE_CACHE"):
        cache_dir()


def test_homes_of_unknown_users_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUENGINE_CACHE", f"{NOBODY}/cache")
    with pytest.raises(ConfigError, match=f"CUENGINE_CACHE={NOBODY}/cache: "):
        cache_dir()
    with pytest.raises(ModelError, match=f"^{NOBODY}/model: no such folder"):
        find_model(f"{NOBODY}/model")


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30)], ids=["name", "path"])
def test_a_cache_with_too_long_a_path_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def not_installed(distribution: str) -> None:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / name))
    (model,) = BUILTIN_MODELS.values()
    assert find_builtin(model) is None
    with pytest.raises(ModelError, match=r"File name too long.* CUENGINE_CACHE names another"):
        find_model(model.name)
