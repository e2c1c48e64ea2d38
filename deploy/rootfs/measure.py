"""Makes an image's root file system, prints its size by package, and starts it.

Called by measure_rootfs.sh, which sees to it that nothing is left behind of the folder that
$ROOTFS_SCRATCH names. The flags are in arguments.py.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import arguments
from contents import sizes, table, unwanted
from dockerfile import DockerfileError
from image import Builder, Image
from start import StartError, check_gpu_parts, compiled_for, fetch, leave_network, serve

_MIB = 2**20


def main() -> None:
    asked = arguments.read()
    scratch = Path(os.environ["ROOTFS_SCRATCH"])
    try:
        if asked.cache is not None:
            asked.cache.mkdir(parents=True, exist_ok=True)
        builder = Builder(arguments.ROOT, scratch, asked.cache)
        image = builder.build(arguments.dockerfile(asked.image), asked.build_arg)
        _measure(image, asked.limit)
        if asked.start:
            _start(image, scratch / "cache", gpu=asked.image == "cuda", given=asked.build_arg)
    except (DockerfileError, StartError, OSError, http.client.HTTPException) as error:
        sys.exit(f"measure_rootfs.sh: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"measure_rootfs.sh: status {error.returncode} of: {_as_typed(error.cmd)}")


def _as_typed(command: list[str]) -> str:
    """On one line, as what failed has said why above."""
    return " ".join(" ".join(map(str, command)).split())


def _measure(image: Image, limit: float | None) -> None:
    if found := unwanted(image):
        sys.exit(f"measure_rootfs.sh: the image has {', '.join(found)}")
    counted = sizes(image)
    print(table(counted), flush=True)
    total = counted.total() / _MIB
    if limit is not None and total > limit:
        sys.exit(f"measure_rootfs.sh: {total:.0f} MiB are more than {limit:g}")


def _start(image: Image, cache: Path, *, gpu: bool, given: Mapping[str, str]) -> None:
    """From what `cuengine pull` left in /cache. An image for GPUs serves with NumPy,
    which needs no GPU and all the rest."""
    cache.mkdir()
    if gpu:
        check_gpu_parts(image, cache, compiled_for(given.get("COMPILE", "")))
    model = image.command[0]
    seconds = fetch(image, cache, model)
    print(f"cuengine pull {model}: {seconds:.1f} s", flush=True)
    leave_network()
    times = serve(image, cache, [model, *(["--device", "cpu"] if gpu else [])])
    for event, after in times.items():
        print(f"{event}: {after:.1f} s after the start", flush=True)


if __name__ == "__main__":
    main()
