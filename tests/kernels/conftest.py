"""Launches on the emulator, for the tests of the CUDA kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import MEMORY, Emulator

from cuengine.device.emulated.runtime import FORWARD


@pytest.fixture
def emulator() -> Iterator[Callable[..., Emulator]]:
    """emulator(order=REVERSE) -> Emulator; what it holds is forgotten when the test ends."""
    before = set(MEMORY.allocations)

    def start(order: int = FORWARD, seed: int = 1) -> Emulator:
        return Emulator(order, seed)

    yield start
    for address in set(MEMORY.allocations) - before:
        if MEMORY.allocations[address][0] is not None:
            MEMORY.remove(address)
