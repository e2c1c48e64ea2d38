"""Reads Dockerfiles, for image.py and the tests. No more of the language than ours use."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NAMES = frozenset(
    ("ARG", "FROM", "RUN", "COPY", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD")
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class DockerfileError(ValueError):
    """A line that is none of Docker's, or that ours do not use."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. value: what stands behind its name, on one line."""

    name: str
    value: str
    line: int

    def words(self) -> list[str]:
        """The value as a shell reads it, or the JSON list that it is."""
        if self.value.startswith("["):
            return [str(word) for word in json.loads(self.value)]
        return shlex.split(self.value)

    def flags(self) -> tuple[dict[str, str], str]:
        """The leading --name=value, and what follows them."""
        flags, rest = {}, self.value
        while found := re.match(r"--([\w-]+)=(\S+)\s+", rest):
            flags[found[1]] = found[2]
            rest = rest[found.end() :]
        return flags, rest


def parse(path: Path) -> list[Instruction]:
    """Raises DockerfileError with the line."""
    instructions: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        start = start if parts else number
        parts.append(text.removesuffix("\\").rstrip())
        if text.endswith("\\"):
            continue
        name, _, value = " ".join(parts).partition(" ")
        if name not in _NAMES or not value:
            raise DockerfileError(f"{path.name}:{start}: {name!r} is not one of {sorted(_NAMES)}")
        instructions.append(Instruction(name, value.strip(), start))
        parts = []
    if parts:
        raise DockerfileError(f"{path.name}:{start}: goes on at the end of the file")
    return instructions


def build_arguments(instructions: Iterable[Instruction]) -> frozenset[str]:
    """The names that --build-arg may give a value to."""
    return frozenset(one.value.partition("=")[0] for one in instructions if one.name == "ARG")


def expand(text: str, variables: Mapping[str, str], where: str) -> str:
    """$NAME and ${NAME} by their values. Raises DockerfileError for one that has none."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            raise DockerfileError(f"{where}: ${name} is not set there")
        return variables[name]

    return _VARIABLE.sub(value, text)
