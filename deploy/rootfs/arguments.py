"""The command line of measure_rootfs.sh, checked before anything is made or fetched.

Run by itself it says what is wrong with its arguments, in one line, and does nothing else: the
script does so first, on any machine and as anybody.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import NoReturn

from dockerfile import build_arguments, parse

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("cpu", "cuda")


class _Parser(argparse.ArgumentParser):
    """Answers wrong usage with one line that says where to look."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def dockerfile(image: str) -> Path:
    return ROOT / "deploy" / "docker" / f"Dockerfile.{image}"


def read(argv: list[str] | None = None) -> argparse.Namespace:
    """image, build_arg (a dict), limit, start, cache; ends the process where they are wrong."""
    parser = _Parser(
        prog="measure_rootfs.sh",
        description="Makes an image's root file system without Docker, prints its size by package, "
        "and starts it.",
        epilog="Needs Linux, root, debootstrap and Python 3.11.",
        allow_abbrev=False,
    )
    parser.add_argument("image", choices=IMAGES, help="deploy/docker/Dockerfile.IMAGE")
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build's"
    )
    parser.add_argument("--limit", type=_mib, metavar="MIB", help="fail where it is larger")
    parser.add_argument(
        "--no-start",
        dest="start",
        action="store_false",
        help="only measure it, and start nothing in it",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="keep Debian's base and pip's wheels for next time",
    )
    arguments = parser.parse_args(argv)
    given = {}
    known = build_arguments(parse(dockerfile(arguments.image)))
    for word in arguments.build_arg:
        name, equals, value = word.partition("=")
        if not equals:
            parser.error(f"--build-arg {word}: is not NAME=VALUE")
        if name not in known:
            parser.error(
                f"--build-arg {word}: {dockerfile(arguments.image).name} has no ARG {name}, only "
                f"{', '.join(sorted(known))}"
            )
        given[name] = value
    arguments.build_arg = given
    if arguments.cache is not None and (why := _unusable(arguments.cache)):
        parser.error(f"--cache {arguments.cache}: {why}")
    return arguments


def _mib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of MiB above 0")
    return value


def _unusable(folder: Path) -> str | None:
    """Why nothing can be kept there, if so. A folder that is missing is made when it is needed."""
    there = folder
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
    except OSError as error:  # too long a name, or a folder on its way that may not be looked into
        return error.strerror or str(error)
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    return None


if __name__ == "__main__":
    read()
