"""`cuengine pull`: fetches a model and prepares it, so that the next start need not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cuengine.cli.arguments import engine_config, format_size
from cuengine.cli.start import model_folder
from cuengine.model.config import read_model_config


def run(args: argparse.Namespace) -> int:
    name, folder = model_folder(engine_config(args), progress=True)
    config = read_model_config(folder)
    print(f"{name}: {config.architecture}, {config.num_layers} layers, {config.dtype}")
    print(f"in {folder} ({format_size(_folder_size(folder))})")
    sys.stdout.flush()
    return 0


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
