"""`cuengine serve`: an engine behind the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import os

from cuengine.api.settings import ServerSettings
from cuengine.cli.arguments import UsageError, engine_config
from cuengine.cli.start import build_engine
from cuengine.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    name, engine = build_engine(engine_config(args))
    if not settings.served_model_names:
        settings = dataclasses.replace(settings, served_model_names=(name,))

    from cuengine.api.server import run_server

    run_server(engine, settings)
    return 0


def _settings(args: argparse.Namespace) -> ServerSettings:
    key = os.environ.get("CUENGINE_API_KEY")
    try:
        return ServerSettings(
            host=args.host,
            port=args.port,
            served_model_names=tuple(args.served_model_name or ()),
            api_keys=tuple(args.api_key or ([key] if key else [])),
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error
