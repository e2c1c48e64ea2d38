"""The flags of `cuengine serve` that are about the server; the engine's are in arguments.py."""

from __future__ import annotations

import argparse

from cuengine.cli.values import port


def add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--seed",
        type=int,
        help="draws the seeds of requests that name none (default: 0)",
    )
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all (%(default)s)"
    )
    group.add_argument("--port", type=port, default=8000, help="0: a free one (%(default)s)")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="a name that clients may ask for; may be repeated (default: the model's)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="clients must send this key; may be repeated for several (default: $CUENGINE_API_KEY, "
        "else none is asked for)",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="web pages from there may call this server; *: all; may be "
        "repeated (default: none but its own)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="what running requests are given to end after SIGTERM (%(default)g)",
    )
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log every request (on)",
    )
