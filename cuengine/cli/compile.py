"""`cuengine compile`: builds the CUDA kernels ahead, with no GPU: for containers without NVRTC."""

from __future__ import annotations

import argparse
import time
from itertools import product

from cuengine.cli.arguments import UsageError
from cuengine.cli.values import format_size
from cuengine.device.kernel_cache import PREBUILT_VARIABLE, compile_program
from cuengine.device.kernel_variants import programs
from cuengine.device.nvrtc import find_nvrtc


def run(args: argparse.Namespace) -> int:
    nvrtc = find_nvrtc(args.cuda)
    supported = nvrtc.architectures()
    if unknown := [f"sm_{arch}" for arch in args.arch if arch not in supported]:
        raise UsageError(
            f"--arch {','.join(unknown)}: NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} compiles "
            f"for {', '.join(f'sm_{arch}' for arch in supported)}"
        )
    start = time.monotonic()
    for arch in args.arch:
        wanted = {
            program: None
            for dtype, head_dim in product(args.dtype, args.head_dim)
            for program in programs(dtype, head_dim, arch)
        }
        size = 0
        for program in wanted:
            size += compile_program(nvrtc, program, arch, args.out).cubin.stat().st_size
        print(f"sm_{arch}: {len(wanted)} programs, {format_size(size)}", flush=True)
    print(
        f"in {args.out}, in {time.monotonic() - start:.0f} s. Use: {PREBUILT_VARIABLE}={args.out}"
    )
    return 0
