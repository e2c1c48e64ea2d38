"""Numbers of things in messages and tables."""

from __future__ import annotations


def counted(number: int | str, noun: str) -> str:
    """ "1 step", "2 steps", "1 to 8 steps"."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"
