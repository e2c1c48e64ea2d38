"""What a root file system is made of: apparent bytes by package, and what must not be in it."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from pathlib import Path

from image import Image, packages

_COMPILERS = re.compile(
    r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|nvcc|ptxas|ld|as|rustc)(-[\d.]+)?"
)
_MIB = 2**20


def sizes(image: Image) -> Counter[str]:
    """Apparent bytes by owner: Debian's base, each package beyond it, each Python distribution, the
    rest by folder. The sum is what `du --apparent-size` says: folders count, hard links once."""
    owners = _debian_owners(image) | _python_owners(image.root)
    sizes: Counter[str] = Counter()
    seen = set()
    for folder, names, files in os.walk(image.root):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            inside = os.path.relpath(path, image.root)
            sizes[owners.get(inside) or _by_folder(inside)] += status.st_size
    return sizes


def _by_folder(inside: str) -> str:
    if inside.startswith("opt/cuengine/kernels"):
        return "kernels built ahead"
    if inside.startswith("opt/"):
        return "Python's environment: folders"
    return "Debian, Python's bytecode" if "__pycache__" in inside else "Debian, base"


def _debian_owners(image: Image) -> dict[str, str]:
    owners = {}
    for package in packages(image.root) - image.base_packages:
        info = image.root / "var/lib/dpkg/info"
        for listed in (*info.glob(f"{package}.list"), *info.glob(f"{package}:*.list")):
            for line in listed.read_text().splitlines():
                # /lib and the like are links into /usr.
                inside = re.sub(r"^(bin|sbin|lib|lib64)/", r"usr/\1/", line.lstrip("/"))
                if not (image.root / inside).is_dir():
                    owners[inside] = f"Debian, {package}"
    return owners


def distributions(root: Path) -> dict[str, Path]:
    """Python's: name -> its RECORD."""
    found = {}
    for record in root.glob("opt/cuengine/lib/python*/site-packages/*.dist-info/RECORD"):
        metadata = (record.parent / "METADATA").read_text(encoding="utf-8")
        name = re.search(r"^Name: (\S+)", metadata, re.MULTILINE)
        assert name is not None
        found[name[1]] = record
    return found


def _python_owners(root: Path) -> dict[str, str]:
    owners = {}
    for name, record in distributions(root).items():
        site = record.parents[1]
        with record.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                owners[os.path.relpath(os.path.normpath(site / row[0]), root)] = name
    return owners


def unwanted(image: Image) -> list[str]:
    """PyTorch and compilers: names and paths."""
    found = [name for name in distributions(image.root) if name.lower().startswith("torch")]
    for folder in ("usr/bin", "usr/sbin", "usr/local/bin", "opt/cuengine/bin"):
        for path in (image.root / folder).iterdir():
            if _COMPILERS.fullmatch(path.name):
                found.append(str(path.relative_to(image.root)))
    return found


def table(sizes: Counter[str], least: float = 1.0) -> str:
    """A line each of at least so many MiB, the largest first, and their sum."""
    shown = [(name, size) for name, size in sizes.most_common() if size >= least * _MIB]
    rest = sizes.total() - sum(size for _, size in shown)
    rows = [*shown, (f"{len(sizes) - len(shown)} smaller ones", rest), ("in all", sizes.total())]
    return "\n".join(f"{size / _MIB:8.1f} MiB  {name}" for name, size in rows)
