"""Carries out a Dockerfile in plain folders, with debootstrap and chroot: the root file system that
Docker would make, on a machine without Docker. Linux, as root.

What is mounted for a command is unmounted after it. measure_rootfs.sh runs all this in a mount
namespace of its own besides: whatever happens, the machine's own mounts stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile import DockerfileError, Instruction, expand, parse

_MIRROR = "http://deb.debian.org/debian"
_SLIM = ("doc", "info", "locale", "man", "lintian", "linda")
"""Under /usr/share: what Debian's slim images are without, save for copyrights."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LENT = ("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
"""Variables of this machine that builds are given, as Docker gives them proxies."""

_CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


@dataclass(slots=True)
class Image:
    """What has come of a Dockerfile so far: a root file system, and how it is started."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    base_packages: frozenset[str] = frozenset()


class Builder:
    """One build.

    context  the checkout
    scratch  where root file systems are made
    cache    where Debian's base and pip's wheels are kept for the next one, or None
    """

    def __init__(self, context: Path, scratch: Path, cache: Path | None) -> None:
        self._context, self._scratch, self._cache = context, scratch, cache
        self._stages: dict[str, Image] = {}

    def build(self, path: Path, given: Mapping[str, str]) -> Image:
        """The last stage's image. given: --build-arg, by the names of its ARG.

        Raises DockerfileError, CalledProcessError.
        """
        instructions = parse(path)
        outer: dict[str, str] = {}
        image: Image | None = None
        for instruction in instructions:
            where = f"{path.name}:{instruction.line}"
            print(f"-- {instruction.name} {instruction.value}", flush=True)
            if instruction.name == "FROM":
                image = self._begin(instruction.words(), where)
                continue
            if instruction.name == "ARG":
                name, has_default, default = instruction.value.partition("=")
                known = given.get(name, default if has_default else outer.get(name, ""))
                (outer if image is None else image.arguments)[name] = known
                continue
            if image is None:
                raise DockerfileError(f"{where}: {instruction.name} before FROM")
            variables = image.arguments | image.environment
            match instruction.name:
                case "RUN":
                    self._run(image, instruction.value)
                case "COPY":
                    flags, rest = instruction.flags()
                    source = self._stages[flags["from"]].root if "from" in flags else None
                    self._copy(image.root, source, rest.split())
                case "ENV":
                    for word in instruction.words():
                        name, _, value = word.partition("=")
                        image.environment[name] = expand(value, variables, where)
                case "USER":
                    image.user = instruction.value
                case "ENTRYPOINT":
                    image.entrypoint = instruction.words()
                case "CMD":
                    image.command = instruction.words()
                case "HEALTHCHECK":
                    _, rest = instruction.flags()
                    command = Instruction("CMD", rest.removeprefix("CMD "), instruction.line)
                    image.healthcheck = command.words()
        if image is None:
            raise DockerfileError(f"{path.name}: has no FROM")
        return image

    def _begin(self, words: Sequence[str], where: str) -> Image:
        base, *rest = words
        name = rest[1] if rest[:1] == ["AS"] else "last"
        root = self._scratch / name
        if base in self._stages:
            before = self._stages[base]
            _call("cp", "-a", "--reflink=auto", before.root, root)
            image = Image(root, dict(before.environment), base_packages=before.base_packages)
        elif base.startswith("debian:") and base.endswith("-slim"):
            self._debian(base.removeprefix("debian:").removesuffix("-slim"), root)
            image = Image(root, base_packages=packages(root))
        else:
            raise DockerfileError(f"{where}: FROM {base} is neither a stage nor debian:NAME-slim")
        self._stages[name] = image
        return image

    def _debian(self, suite: str, root: Path) -> None:
        """What the image debian:SUITE-slim holds."""
        kept = None if self._cache is None else self._cache / f"debian-{suite}-slim.tar"
        root.mkdir()
        if kept is not None and kept.exists():
            _call("tar", "--numeric-owner", "-xpf", kept, "-C", root)
            return
        _call("debootstrap", "--variant=minbase", suite, root, _MIRROR)
        excludes = "".join(f"path-exclude /usr/share/{name}/*\n" for name in _SLIM)
        (root / "etc/dpkg/dpkg.cfg.d/docker").write_text(
            f"{excludes}path-include /usr/share/doc/*/copyright\n", encoding="utf-8"
        )
        for name in _SLIM:
            for entry in [*(root / "usr/share" / name).rglob("*")][::-1]:
                if entry.is_dir() and not entry.is_symlink():
                    if not any(entry.iterdir()):
                        entry.rmdir()
                elif entry.name != "copyright":
                    entry.unlink()
        for emptied in ("var/cache/apt", "var/lib/apt/lists", "var/log"):
            for entry in (root / emptied).iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if kept is not None:
            _call("tar", "--numeric-owner", "-cpf", kept.with_suffix(".part"), "-C", root, ".")
            kept.with_suffix(".part").rename(kept)

    def _copy(self, root: Path, source: Path | None, paths: Sequence[str]) -> None:
        *sources, target = paths
        to = root / target.lstrip("/")
        for path in sources:
            came = (source or self._context) / path.lstrip("/")
            if came.is_dir():
                shutil.copytree(
                    came,
                    to,
                    symlinks=True,
                    # As .dockerignore has it; from another stage all is copied.
                    ignore=shutil.ignore_patterns("__pycache__") if source is None else None,
                    dirs_exist_ok=True,
                )
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy2(came, to / came.name)

    def _run(self, image: Image, command: str) -> None:
        environment = image.environment | image.arguments | {"DEBIAN_FRONTEND": "noninteractive"}
        with ExitStack() as mounts:
            environment |= mounts.enter_context(lent_network(image.root))
            if self._cache is not None:
                wheels = self._cache / "pip"
                wheels.mkdir(exist_ok=True)
                mounts.enter_context(mounted("--bind", wheels, image.root / "root/.cache/pip"))
            mounts.enter_context(system_folders(image.root))
            subprocess.run(
                in_chroot(image.root, "0:0", ["/bin/sh", "-c", command]),
                env=environment,
                stdin=subprocess.DEVNULL,
                check=True,
            )


def packages(root: Path) -> frozenset[str]:
    """Debian's packages in a root file system."""
    return frozenset(
        path.stem.partition(":")[0] for path in (root / "var/lib/dpkg/info").glob("*.list")
    )


def in_chroot(root: Path, user: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` there as `user` (UID:GID), with no other group."""
    return [
        "chroot",
        f"--userspec={user}",
        f"--groups={user.partition(':')[2]}",
        str(root),
        *command,
    ]


@contextmanager
def mounted(*arguments: str | Path, made: bool = True) -> Iterator[None]:
    """mount(8) with these arguments, the last of which is the place.

    Folders that are made for it go with it. made: False where the place is a file.
    """
    place = Path(arguments[-1])
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    if made:
        place.mkdir(parents=True, exist_ok=True)
    _call("mount", *arguments)
    try:
        yield
    finally:
        _call("umount", "--recursive", place)
        for folder in missing:
            folder.rmdir()


@contextmanager
def system_folders(root: Path) -> Iterator[None]:
    """/proc and /dev, as a container has them."""
    with ExitStack() as mounts:
        mounts.enter_context(mounted("-t", "proc", "proc", root / "proc"))
        mounts.enter_context(mounted("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev"))
        for name in _DEVICES:
            (root / "dev" / name).touch()
            mounts.enter_context(mounted("--bind", f"/dev/{name}", root / "dev" / name, made=False))
        (root / "dev/shm").mkdir()
        mounts.enter_context(
            mounted("-t", "tmpfs", "-o", "mode=1777,size=64m", "tmpfs", root / "dev/shm")
        )
        yield


@contextmanager
def lent_network(root: Path) -> Iterator[dict[str, str]]:
    """Name servers, proxies and certificates of this machine; the variables that tell of them."""
    lent = {
        name: os.environ[spelled]
        for name in _LENT
        for spelled in (name, name.upper())
        if spelled in os.environ
    }
    with ExitStack() as mounts:
        mounts.enter_context(mounted("-t", "tmpfs", "tmpfs", root / "run"))
        names = root / "etc/resolv.conf"
        before = names.read_bytes() if names.exists() else None
        shutil.copyfile("/etc/resolv.conf", names)
        bundle = next((os.environ[name] for name in _CERTIFICATES if name in os.environ), None)
        if bundle is not None:
            shutil.copyfile(bundle, root / "run/certificates.pem")
            lent |= dict.fromkeys(_CERTIFICATES, "/run/certificates.pem")
        try:
            yield lent
        finally:
            if before is None:
                names.unlink()
            else:
                names.write_bytes(before)


def _call(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL)
