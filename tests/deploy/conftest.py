"""Lets the tests import the modules beside them, of deploy/rootfs and of the server's tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(Path(__file__).parent),
    str(ROOT / "tests" / "api"),
    str(ROOT / "deploy" / "rootfs"),
]
