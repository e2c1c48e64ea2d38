"""`cuengine pull`: fetches a model and prepares it and the CPU's kernels, so that the next start
need not."""

from __future__ import annotations

import argparse
import time

from cuengine.cli.arguments import engine_config
from cuengine.cli.info import folder_size
from cuengine.cli.start import model_folder
from cuengine.cli.values import format_size
from cuengine.device.cpu_kernels import compile_cpu_kernels, has_numba
from cuengine.device.select import choose_device
from cuengine.model.config import read_model_config


def run(args: argparse.Namespace) -> int:
    name, folder = model_folder(engine_config(args))
    config = read_model_config(folder)
    print(f"{name}: {config.architecture}, {config.num_layers} layers, {config.dtype}")
    print(f"in {folder} ({format_size(folder_size(folder))})")
    if choose_device("auto")[0] == "cpu" and has_numba():
        start = time.monotonic()
        print(f"kernels for {compile_cpu_kernels()}: ready ({time.monotonic() - start:.0f} s)")
    return 0
