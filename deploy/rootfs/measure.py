"""Makes an image's root file system, prints its size by package, and starts it.

Called by measure_rootfs.sh, which sees to it that nothing is left behind.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from contents import sizes, table, unwanted
from dockerfile import DockerfileError
from image import Builder, Image
from start import StartError, check_gpu_parts, fetch, leave_network, serve

_ROOT = Path(__file__).resolve().parents[2]
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="measure_rootfs.sh", description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("image", choices=("cpu", "cuda"), help="deploy/docker/Dockerfile.IMAGE")
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build's"
    )
    parser.add_argument("--limit", type=float, metavar="MIB", help="fail where it is larger")
    parser.add_argument(
        "--no-start", action="store_true", help="only measure it, and start nothing in it"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="keep Debian's base and pip's wheels for next time",
    )
    arguments = parser.parse_args()
    given = dict(word.split("=", 1) for word in arguments.build_arg)
    if arguments.cache is not None:
        arguments.cache.mkdir(parents=True, exist_ok=True)
    try:
        builder = Builder(_ROOT, arguments.scratch, arguments.cache)
        image = builder.build(_ROOT / f"deploy/docker/Dockerfile.{arguments.image}", given)
        _measure(image, arguments.limit)
        if not arguments.no_start:
            _start(image, arguments.scratch / "cache", gpu=arguments.image == "cuda", given=given)
    except (DockerfileError, StartError, subprocess.CalledProcessError) as error:
        sys.exit(f"measure_rootfs.sh: {error}")


def _measure(image: Image, limit: float | None) -> None:
    if found := unwanted(image):
        sys.exit(f"measure_rootfs.sh: the image has {', '.join(found)}")
    counted = sizes(image)
    print(table(counted), flush=True)
    total = counted.total() / _MIB
    if limit is not None and total > limit:
        sys.exit(f"measure_rootfs.sh: {total:.0f} MiB are more than {limit:g}")


def _start(image: Image, cache: Path, *, gpu: bool, given: dict[str, str]) -> None:
    """From what `cuengine pull` left in /cache. An image for GPUs serves with NumPy,
    which needs no GPU and all the rest."""
    cache.mkdir()
    if gpu:
        words = given.get("COMPILE", "").split()
        built = words[words.index("--arch") + 1].split(",") if "--arch" in words else []
        check_gpu_parts(image, cache, built)
    model = image.command[0]
    seconds = fetch(image, cache, model)
    print(f"cuengine pull {model}: {seconds:.1f} s", flush=True)
    leave_network()
    times = serve(image, cache, [model, *(["--device", "cpu"] if gpu else [])])
    for event, after in times.items():
        print(f"{event}: {after:.1f} s after the start", flush=True)


if __name__ == "__main__":
    main()
