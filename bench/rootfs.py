"""Makes the images' root file systems, checks their sizes, and starts each to a first token.

    python bench/rootfs.py                 all of them
    python bench/rootfs.py --cache DIR     keep what was downloaded for the next time

deploy/measure_rootfs.sh does it, without Docker; where it cannot (it needs Linux, root and
debootstrap) it says so, and this ends with its status, 77.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "deploy" / "measure_rootfs.sh"

LIMITS = (
    ("cpu", (), 500),
    ("cpu", ("EXTRA=",), 300),
    ("cuda", (), 1500),
    ("cuda", ("COMPILE=--arch sm_90 --dtype bfloat16 --head-dim 64,128",), 1400),
)
"""Image, build arguments, apparent MiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, metavar="DIR")
    with tempfile.TemporaryDirectory() as scratch:
        cache = parser.parse_args().cache or Path(scratch)
        for image, arguments, limit in LIMITS:
            print(f"== {' '.join((image, *arguments))}: at most {limit} MiB", flush=True)
            given = [word for argument in arguments for word in ("--build-arg", argument)]
            command = [SCRIPT, image, *given, "--limit", str(limit), "--cache", cache]
            if code := subprocess.run(command, check=False).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main()
