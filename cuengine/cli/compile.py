"""`cuengine compile`: builds kernels ahead, for containers: the CUDA ones need no GPU for it, and
then no NVRTC where they run; the CPU's take most of a minute that the first start then has not.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

from cuengine.cli.arguments import UsageError
from cuengine.cli.start import note
from cuengine.cli.values import format_size
from cuengine.counted import counted
from cuengine.device.cpu_kernels import compile_cpu_kernels, has_numba
from cuengine.device.kernel_cache import compile_program
from cuengine.device.kernel_variants import DTYPES, HEAD_DIMS, programs
from cuengine.device.nvrtc import find_nvrtc
from cuengine.paths import PREBUILT_VARIABLE


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out {args.out}: cannot be made a folder: {error.strerror}"
            ) from error
    if args.device == "cpu":
        _compile_for_cpu(args)
    else:
        _compile_for_gpus(args)
    done = f"in {time.monotonic() - start:.0f} s"
    if args.out is not None:
        done = f"in {args.out}, {done}. Use: {PREBUILT_VARIABLE}={args.out}"
    print(done)
    return 0


def _compile_for_cpu(args: argparse.Namespace) -> None:
    for flag in ("arch", "head_dim", "dtype", "cuda"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} is for --device cuda")
    if not has_numba():
        raise UsageError("--device cpu: only Numba compiles, and it is not installed")
    note("Compiling the CPU's kernels, if they are not there yet: up to a minute …")
    print(f"kernels for {compile_cpu_kernels(args.out)}", flush=True)


def _compile_for_gpus(args: argparse.Namespace) -> None:
    for flag in ("arch", "out"):
        if getattr(args, flag) is None:
            raise UsageError(f"--device cuda needs --{flag}")
    nvrtc = find_nvrtc(args.cuda)
    supported = nvrtc.architectures()
    if unknown := [f"sm_{arch}" for arch in args.arch if arch not in supported]:
        raise UsageError(
            f"--arch {','.join(unknown)}: NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} compiles "
            f"for {', '.join(f'sm_{arch}' for arch in supported)}"
        )
    for arch in args.arch:
        wanted = {
            program: None
            for dtype, head_dim in product(args.dtype or DTYPES, args.head_dim or HEAD_DIMS)
            for program in programs(dtype, head_dim, arch)
        }
        size = 0
        note(f"Compiling {counted(len(wanted), 'program')} for sm_{arch} …")
        for program in wanted:
            size += compile_program(nvrtc, program, arch, args.out).cubin.stat().st_size
        programs_made = counted(len(wanted), "program")
        print(f"sm_{arch}: {programs_made}, {format_size(size)}", flush=True)
