"""Makes the modules beside the tests importable, and those of the server's tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "api")]
