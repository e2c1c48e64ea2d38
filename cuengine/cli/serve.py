"""`cuengine serve`: an engine behind the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from contextlib import ExitStack, closing
from types import FrameType
from typing import TYPE_CHECKING

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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending)
    with ExitStack() as stack:
        # An address in use shows now, not after the model is loaded.
        listening = stack.enter_context(closing(listen(settings)))
        engine: ServingEngine
        if replicas is None:
            name, engine = build_engine(config, step_timeout=args.step_timeout)
        else:
            ray_engine = stack.enter_context(
                build_ray_engine(
                    config, replicas, step_timeout=args.step_timeout, check=ending.check
                )
            )
            name, engine = ray_engine.model_name, ray_engine
        ending.check()
        if not settings.served_model_names:
            settings = dataclasses.replace(settings, served_model_names=(name,))
        run_server(engine, settings, listening)
    return 0


class _EndWhileLoading:
    """Until the server drains on them. By default SIGTERM ends any process but a container's first,
    which does not notice it: the model would be loaded and served until somebody kills it.
    """

    def __init__(self) -> None:
        self._asked: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        self.check()

    def check(self) -> None:
        """End the process if a signal has come: what runs when one does may swallow any exception,
        as Python's own compiler of modules does.
        """
        if self._asked is not None:
            sys.exit(128 + self._asked)


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


_RAY_SETTINGS = {
    "data_parallel_size": "replicas",
    "max_data_parallel_size": "max_replicas",
    "ray_address": "address",
    "ray_replica_cpus": "cpus",
    "ray_app": "app",
    "ray_prefix_margin": "prefix_margin",
}
"""Flags, and what RaySettings calls them."""


def _replicas(args: argparse.Namespace) -> RaySettings | None:
    """None: one engine, without Ray."""
    given = {flag: getattr(args, flag) for flag in _RAY_SETTINGS if getattr(args, flag) is not None}
    with usage_errors():
        settings = RaySettings(
            **{_RAY_SETTINGS[flag]: value for flag, value in given.items()},
            drain_timeout=args.drain_timeout,
        )
    if args.data_parallel_backend is not None:
        return settings
    for flag, value in given.items():
        if (flag, value) != ("data_parallel_size", 1):
            raise UsageError(f"{flag}={value!r} needs --data-parallel-backend ray")
    return None
