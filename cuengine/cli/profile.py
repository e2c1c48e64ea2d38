"""`cuengine profile`: where the time of prefill and decode steps goes, and at what rates."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cuengine.cli.arguments import UsageError, engine_config, usage_errors
from cuengine.cli.start import model_folder, note
from cuengine.config import EngineConfig

if TYPE_CHECKING:
    from cuengine.profiling.workload import Workload

EMULATION = "emulated: times are those of the emulation on this machine's CPU, and of no GPU"


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    workload = _workload(args, config)
    trace = None if args.trace is None else _open(args.trace)
    name, folder = model_folder(config)

    from cuengine.loading import load_engine
    from cuengine.model.config import read_model_config
    from cuengine.profiling.chrome_trace import chrome_trace
    from cuengine.profiling.report import as_json, render
    from cuengine.profiling.run import Profiler

    workload.check_model(read_model_config(folder).context_length)
    config = dataclasses.replace(workload.settings(config), model=str(folder), revision=None)
    profiler = Profiler(load_engine(config), workload)
    about: dict[str, Any] = {
        "model": name,
        "device": profiler.device_name,
        "dtype": profiler.dtype,
        "batch": args.batch,
        "context": args.context,
        "steps": args.steps,
    }
    if config.device == "emulated":
        about["note"] = EMULATION
    sections = profiler.run(note if sys.stderr.isatty() else _quiet)
    if trace is not None:
        with trace:
            trace.truncate(0)
            json.dump(chrome_trace(profiler.recorded, about), trace)
    if args.json:
        print(json.dumps({**about, "sections": [as_json(section) for section in sections]}))
        return 0
    print(f"{name} on {profiler.device_name}, {profiler.dtype}")
    if "note" in about:
        print(about["note"])
    for section in sections:
        print(f"\n{render(section)}")
    return 0


def _workload(args: argparse.Namespace, config: EngineConfig) -> Workload:
    from cuengine.profiling.workload import Workload

    with usage_errors():
        return Workload(
            args.batch, args.context, args.steps, config.max_num_batched_tokens, config.block_size
        )


def _quiet(text: str) -> None:
    """Nobody watches."""


def _open(path: Path) -> IO[str]:
    """Before anything is run, so that no work is lost to a wrong path; what is in it stays."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--trace {path}: cannot be written: {error.strerror}") from error
