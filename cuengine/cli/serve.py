"""`cuengine serve`: an engine behind the HTTP server."""

from __future__ import annotations

import argparse
import os
import time

from cuengine.cli.arguments import engine_config
from cuengine.cli.start import build_engine, note


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    config = engine_config(args)
    name, engine = build_engine(config, note)

    from cuengine.api.server import ServerSettings, run_server

    settings = ServerSettings(
        host=args.host,
        port=args.port,
        served_model_names=args.served_model_name or [name],
        api_keys=args.api_key or [key for key in [os.environ.get("CUENGINE_API_KEY")] if key],
    )
    note(f"server  starting after {time.perf_counter() - started:.1f} s")
    run_server(engine, settings)
    return 0
