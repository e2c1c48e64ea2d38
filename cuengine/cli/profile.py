"""`cuengine profile`: where the time of prefill and decode steps goes, and at what rates."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuengine.cli.arguments import UsageError, engine_config, usage_errors
from cuengine.cli.start import model_folder, note
from cuengine.config import EngineConfig
from cuengine.errors import CuengineError

if TYPE_CHECKING:
    from cuengine.profiling.report import Section
    from cuengine.profiling.workload import Workload

EMULATION = "emulated: times are those of the emulation on this machine's CPU, and of no GPU"


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    workload = _workload(args, config)
    if args.trace is not None:
        _check_writable(args.trace)
    name, folder = model_folder(config)

    from cuengine.loading import load_engine
    from cuengine.model.config import read_model_config
    from cuengine.profiling.chrome_trace import chrome_trace
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
    try:
        _print(about, sections, as_json=args.json)
    finally:  # where one of the two cannot be written, the other one is
        if args.trace is not None:
            _write(args.trace, json.dumps(chrome_trace(profiler.recorded, about)))
    return 0


def _print(about: dict[str, Any], sections: list[Section], *, as_json: bool) -> None:
    from cuengine.profiling import report

    if as_json:
        found = [report.as_json(section) for section in sections]
        print(json.dumps({**about, "sections": found}), flush=True)
        return
    print("{model} on {device}, {dtype}".format_map(about))
    if "note" in about:
        print(about["note"])
    for section in sections:
        print(f"\n{report.render(section)}", flush=True)


def _workload(args: argparse.Namespace, config: EngineConfig) -> Workload:
    from cuengine.profiling.workload import Workload

    with usage_errors():
        return Workload(
            args.batch, args.context, args.steps, config.max_num_batched_tokens, config.block_size
        )


def _quiet(text: str) -> None:
    """Nobody watches."""


def _check_writable(path: Path) -> None:
    """Before anything is run, so that no work is lost to a wrong path. All stays as it is.

    Raises UsageError. What is no file, as a pipe, shows only when it is written to.
    """
    try:
        there = path.exists()
        if there and not (path.is_file() or path.is_dir()):
            return
        path.open("ab").close()
        if not there:
            path.resolve().unlink()
    except OSError as error:
        raise UsageError(_unwritable(path, error)) from error


def _write(path: Path, text: str) -> None:
    """Raises CuengineError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CuengineError(_unwritable(path, error)) from error


def _unwritable(path: Path, error: OSError) -> str:
    return f"--trace {path}: cannot be written: {error.strerror}"
