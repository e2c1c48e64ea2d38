"""The flags of `cuengine serve` that are about the server; the engine's are in arguments.py."""

from __future__ import annotations

import argparse

from cuengine.api.settings import TOOL_CALL_FORMATS, ServerSettings
from cuengine.cli.values import memory_size, number, port, text, whole
from cuengine.config import STEP_TIMEOUT
from cuengine.ray_backend.settings import RaySettings

_DEFAULT = ServerSettings()
_RAY = RaySettings()


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("server").add_argument(
        "--seed",
        type=whole,
        help="draws the seeds of requests that name none (default: 0)",
    )
    _add_address(parser.add_argument_group("address"))
    _add_access(parser.add_argument_group("access"))
    _add_limits(parser.add_argument_group("limits"))
    _add_replicas(parser.add_argument_group("many engines"))
    _add_log(parser.add_argument_group("log"))


def _add_address(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        type=text,
        default=_DEFAULT.host,
        help="address to listen on; 0.0.0.0: all (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=port, default=_DEFAULT.port, help="0: a free one (default: %(default)s)"
    )
    group.add_argument(
        "--uds", type=text, metavar="PATH", help="listen on this Unix socket instead"
    )
    group.add_argument(
        "--root-path",
        metavar="PATH",
        default="",
        help="path under which a proxy shows this server, as /llm; it may cut it off or not",
    )
    group.add_argument(
        "--ssl-certfile", type=text, metavar="FILE", help="serve https with this certificate"
    )
    group.add_argument(
        "--ssl-keyfile",
        type=text,
        metavar="FILE",
        help="its key (default: in the certificate's file)",
    )
    group.add_argument(
        "--ssl-ca-certs",
        type=text,
        metavar="FILE",
        help="clients must have a certificate of one of these authorities",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        type=text,
        action="append",
        metavar="NAME",
        help="a name that clients may ask for; may be repeated (default: the model's)",
    )
    group.add_argument(
        "--api-key",
        type=text,
        action="append",
        metavar="KEY",
        help="clients must send this key; may be repeated for several (default: $CUENGINE_API_KEY, "
        "else none is asked for)",
    )
    group.add_argument(
        "--allowed-origins",
        type=text,
        action="append",
        metavar="ORIGIN",
        help="web pages from there may call this server; *: all; may be "
        "repeated (default: none but its own)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_FORMATS,
        help="how the model writes tool calls (default: as its chat template suggests)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-concurrent-requests",
        type=whole,
        metavar="N",
        default=_DEFAULT.max_concurrent_requests,
        help="requests answered at once; further ones get 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-queued-requests",
        type=whole,
        metavar="N",
        default=_DEFAULT.max_queued_requests,
        help="prompts that wait for their first token; further ones get 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-prompt-tokens", type=whole, metavar="N", help="longest prompt (default: the context)"
    )
    group.add_argument(
        "--max-n",
        type=whole,
        metavar="N",
        default=_DEFAULT.max_n,
        help="samples that one request may ask for (default: %(default)s)",
    )
    group.add_argument(
        "--max-body-size",
        type=memory_size,
        metavar="SIZE",
        default=_DEFAULT.max_body_bytes,
        help="longest request body (default: 16MiB)",
    )
    group.add_argument(
        "--request-timeout",
        type=number,
        metavar="SECONDS",
        help="what the engine is given for one request (default: no limit)",
    )
    group.add_argument(
        "--step-timeout",
        type=number,
        metavar="SECONDS",
        default=STEP_TIMEOUT,
        help="a step of the engine that takes longer hangs, and the engine is started again; "
        "0: never (default: %(default)g)",
    )
    group.add_argument(
        "--drain-timeout",
        type=number,
        default=_DEFAULT.drain_timeout,
        metavar="SECONDS",
        help="what running requests are given to end after SIGTERM (default: %(default)g)",
    )


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data-parallel-size",
        type=whole,
        metavar="N",
        help="engines that answer side by side, each with the whole model "
        f"(default: {_RAY.replicas})",
    )
    group.add_argument(
        "--data-parallel-backend",
        choices=("ray",),
        help="who runs them, on this machine and others; needs the extra ray (default: one engine, "
        "without)",
    )
    group.add_argument(
        "--max-data-parallel-size",
        type=whole,
        metavar="N",
        help="Ray may add engines up to this many while they are busy (default: none)",
    )
    group.add_argument(
        "--ray-address",
        type=text,
        metavar="ADDRESS",
        help="of a Ray cluster, or auto (default: $RAY_ADDRESS, else Ray is started here)",
    )
    group.add_argument(
        "--ray-replica-cpus",
        type=number,
        metavar="CPUS",
        help="CPUs that Ray reserves for each engine, and on cpu its threads "
        f"(default: {_RAY.cpus:g})",
    )
    group.add_argument(
        "--ray-app",
        type=text,
        metavar="NAME",
        help="the engines' application in Ray Serve, which stays when the server ends, and which "
        "another server with this name updates and uses, too (default: one of its own)",
    )
    group.add_argument(
        "--ray-prefix-margin",
        type=number,
        metavar="REQUESTS",
        help="more than another engine has, and one still gets a request whose whole prompt it "
        f"knows (default: {_RAY.prefix_margin:g})",
    )


def _add_log(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log every request (default: on)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: one object a line (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        type=text,
        metavar="URL",
        help="send a span per request there, by OTLP over HTTP, as to "
        "http://localhost:4318/v1/traces; needs the extra otel (default: none)",
    )
