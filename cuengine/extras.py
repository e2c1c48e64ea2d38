"""The optional parts of cuengine, and how one that is missing is installed."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """A command to paste, for people who have cuengine as a clone: it is on no package index."""
    return f"pip install '.[{extra}]' in cuengine's checkout"
