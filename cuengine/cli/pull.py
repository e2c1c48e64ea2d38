"""`cuengine pull`: fetches a model and prepares it and the CPU's kernels, so that the next start
need not."""

from __future__ import annotations

import argparse
import time

from cuengine.cli.arguments import engine_config
from cuengine.cli.start import model_folder, note
from cuengine.cli.values import format_size
from cuengine.counted import counted
from cuengine.device.cpu_kernels import compile_cpu_kernels, has_numba
from cuengine.device.select import choose_device
from cuengine.model.config import read_model_config


def run(args: argparse.Namespace) -> int:
    name, folder = model_folder(engine_config(args))
    config = read_model_config(folder)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"{name}: {config.architecture}, {counted(config.num_layers, 'layer')}, {config.dtype}")
    print(f"in {folder}: {format_size(weights)} of weights", flush=True)
    if choose_device("auto")[0] == "cpu" and has_numba():
        start = time.monotonic()
        note("Compiling the CPU's kernels, if they are not there yet: up to a minute …")
        print(f"kernels for {compile_cpu_kernels()}: ready ({time.monotonic() - start:.0f} s)")
    return 0
