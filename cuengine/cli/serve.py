"""`cuengine serve`: an engine behind the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from cuengine.api.settings import ServerSettings
from cuengine.cli.arguments import UsageError, engine_config, usage_errors
from cuengine.cli.start import build_engine, build_ray_engine
from cuengine.config import check_step_timeout
from cuengine.ray_backend.settings import RaySettings

if TYPE_CHECKING:
    from cuengine.api.engine import ServingEngine


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    config = engine_config(args)
    replicas = _replicas(args)

    from cuengine.api.server import listen, run_server
    from cuengine.model.find import check_model_name

    check_model_name(config.model, revision=config.revision)
    ending = _EndWhileLoading()
    signal.signal(signal.SIGTERM, ending)
    listening = listen(settings)  # an address in use shows now, not after the model is loaded
    try:
        engine: ServingEngine
        if replicas is None:
            name, engine = build_engine(config, step_timeout=args.step_timeout)
        else:
            name, engine = build_ray_engine(config, replicas, step_timeout=args.step_timeout)
        if ending.asked:
            ending.end()
        if not settings.served_model_names:
            settings = dataclasses.replace(settings, served_model_names=(name,))
        run_server(engine, settings, listening)
    finally:
        listening.close()
    return 0


class _EndWhileLoading:
    """Until the server drains on it. By default SIGTERM ends any process but a container's first,
    which does not notice it: the model would be loaded and served until somebody kills it.

    asked  it has come: what runs at the moment may swallow any exception, as Python's own compiler
           of modules does
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self.end()

    def end(self) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)


def _settings(args: argparse.Namespace) -> ServerSettings:
    key = os.environ.get("CUENGINE_API_KEY")
    with usage_errors():
        check_step_timeout(args.step_timeout)
        return ServerSettings(
            host=args.host,
            port=args.port,
            uds=args.uds,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            ssl_ca_certs=args.ssl_ca_certs,
            root_path=args.root_path,
            served_model_names=tuple(args.served_model_name or ()),
            api_keys=tuple(args.api_key or ([key] if key else [])),
            cors_origins=tuple(args.allowed_origins or ()),
            tool_call_parser=args.tool_call_parser,
            max_n=args.max_n,
            max_prompt_tokens=args.max_prompt_tokens,
            max_body_bytes=args.max_body_size,
            max_concurrent_requests=args.max_concurrent_requests,
            max_queued_requests=args.max_queued_requests,
            request_timeout=args.request_timeout,
            drain_timeout=args.drain_timeout,
            access_log=args.access_log,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
        )


def _replicas(args: argparse.Namespace) -> RaySettings | None:
    """None: one engine, without Ray."""
    with usage_errors():
        settings = RaySettings(
            replicas=args.data_parallel_size,
            max_replicas=args.max_data_parallel_size,
            address=args.ray_address,
            cpus=args.ray_replica_cpus,
            app=args.ray_app,
            prefix_margin=args.ray_prefix_margin,
            drain_timeout=args.drain_timeout,
        )
    if args.data_parallel_backend is None:
        flags = ("max_data_parallel_size", "ray_address", "ray_app")
        given = [name for name in flags if getattr(args, name) is not None]
        if args.data_parallel_size != 1:
            given.insert(0, "data_parallel_size")
        if given:
            flag = f"--{given[0].replace('_', '-')} {getattr(args, given[0])}"
            raise UsageError(f"{flag} needs --data-parallel-backend ray")
        return None
    return settings
