"""What a wheel and an sdist hold, and that an install of either stands on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cuengine.paths import cache_dir

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "cuengine": "cuengine",
    "model": "cuengine/model",
    "api": "cuengine/api",
    "cuda": "cuengine/cuda",
}
SIZE_LIMIT = 80e6

IMPORT_ALL = """
import importlib, pkgutil, cuengine
names = [module.name for module in pkgutil.walk_packages(cuengine.__path__, "cuengine.")]
for name in names:
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "ray" or not name.startswith("cuengine.ray_backend."):
                raise
print("\\n".join(names))
"""

GENERATE_WITHOUT_NUMBA = """
import sys
from cuengine import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, kv_cache_memory=1 << 20)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
print(len(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids))
unwanted = {"torch", "cupy", "numba", "llguidance"}
print(sorted(unwanted & {name.split(".")[0] for name in sys.modules}))
"""


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that a build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build_wheel(source, source / "dist")


def build_wheel(source: Path, into: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", into, source, cwd=source)
    (built,) = into.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


def package_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path):
    expected = {
        f"{target}/{file.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    }
    assert package_files(wheel) == expected


def test_a_wheel_built_from_the_sdist_is_the_same(source: Path, wheel: Path, tmp_path: Path):
    script = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", script, tmp_path, cwd=source).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    assert package_files(build_wheel(unpacked, tmp_path)) == package_files(wheel)


def test_nothing_but_cuengine_lands_at_the_top_of_site_packages(site: Path):
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    # pip puts the console script into bin/ where --target is given.
    assert names - {"bin"} == {"cuengine"}


def test_every_module_can_be_imported_from_an_install(site: Path, tmp_path: Path):
    names = run(sys.executable, "-c", IMPORT_ALL, cwd=tmp_path, path=site).split()
    assert {"cuengine.model.llama", "cuengine.api", "cuengine.device.interface"} <= set(names)


def test_an_install_elsewhere_uses_the_kernels_that_were_compiled(site: Path, tmp_path: Path):
    pytest.importorskip("numba")
    load = "from cuengine.device import numba_kernels, numba_sampler, products"
    run(sys.executable, "-c", load, cwd=tmp_path)
    kernels = {path: path.stat().st_mtime_ns for path in cache_dir().glob("numba/*/*")}
    assert kernels
    run(sys.executable, "-c", load, cwd=tmp_path, path=site)
    assert {path: path.stat().st_mtime_ns for path in cache_dir().glob("numba/*/*")} == kernels
    assert not list(site.rglob("*.nbi"))


@pytest.fixture
def kernel_source_dir(tmp_path: Path) -> Callable[[Path], str]:
    def find(folder: Path) -> str:
        script = "from cuengine.paths import kernel_source_dir; print(kernel_source_dir())"
        return run(sys.executable, "-c", script, cwd=tmp_path, path=folder).strip()

    return find


def test_kernel_sources_are_found_in_an_install(
    site: Path, kernel_source_dir: Callable[[Path], str]
):
    assert kernel_source_dir(site) == str(site.resolve() / "cuengine" / "cuda")


def test_kernel_sources_are_found_in_the_checkout(kernel_source_dir: Callable[[Path], str]):
    assert kernel_source_dir(ROOT) == str(ROOT / "cuda")


def test_a_cuda_folder_of_somebody_else_is_not_taken_for_the_kernel_sources(
    site: Path, tmp_path: Path, kernel_source_dir: Callable[[Path], str]
):
    shutil.copytree(site / "cuengine", tmp_path / "other" / "cuengine")
    shutil.rmtree(tmp_path / "other" / "cuengine" / "cuda")
    (tmp_path / "other" / "cuda").mkdir()
    with pytest.raises(AssertionError, match=r"no CUDA sources at .* reinstall cuengine"):
        kernel_source_dir(tmp_path / "other")


@pytest.mark.accept
def test_a_bare_install_is_small_and_generates_without_numba_torch_or_cupy(
    source: Path, tiny_model: Callable[[str], Path], tmp_path: Path
):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    before = {path.name for path in packages.iterdir()}
    run(python, "-m", "pip", "install", "--prefer-binary", source, cwd=tmp_path)
    brought = [path for path in packages.iterdir() if path.name not in before]
    assert not [path for path in brought if path.name.startswith(("torch", "cupy", "numba"))]

    counted = [path for path in brought if not path.name.startswith("numpy")]
    files = [file for path in counted for file in (path, *path.rglob("*")) if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"installed without NumPy: {size / 1e6:.1f} MB")
    assert size < SIZE_LIMIT

    output = run(
        python, "-c", GENERATE_WITHOUT_NUMBA, tiny_model("gqa_default"), cwd=tmp_path
    ).split("\n")
    assert output[:2] == ["4", "[]"]
