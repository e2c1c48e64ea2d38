"""`cuengine pull`: fetches a model and prepares it, so that the next start need not."""

from __future__ import annotations

import argparse

from cuengine.cli.arguments import engine_config
from cuengine.cli.info import folder_size
from cuengine.cli.start import model_folder
from cuengine.cli.values import format_size
from cuengine.model.config import read_model_config


def run(args: argparse.Namespace) -> int:
    name, folder = model_folder(engine_config(args))
    config = read_model_config(folder)
    print(f"{name}: {config.architecture}, {config.num_layers} layers, {config.dtype}")
    print(f"in {folder} ({format_size(folder_size(folder))})")
    return 0
