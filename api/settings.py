"""What an operator can set about the server. The engine's settings are in cuengine/config.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from cuengine.api.tracing import check_endpoint
from cuengine.errors import ConfigError
from cuengine.sampling_params import MAX_SAMPLES

ToolCallFormat = Literal["hermes", "mistral", "llama3_json"]
TOOL_CALL_FORMATS: tuple[str, ...] = get_args(ToolCallFormat)
"""How models write tool calls; tool_calls.py reads them."""

_MAX_COUNT = 2**31 - 1
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """host, port           where to listen; port 0 takes a free one
    uds                  path of a Unix socket to listen at instead
    ssl_certfile, ssl_keyfile   serve https; the key may be in the certificate's file
    ssl_ca_certs         clients must have a certificate of one of these authorities
    root_path            path under which a proxy shows this server
    served_model_names   names that requests may use, the first is reported; empty: the model's
    api_keys             where given, /v1 and the dashboard's events need one as bearer token
    cors_origins         origins that browsers may call from; "*" allows any
    tool_call_parser     how the model writes tool calls; None: as its chat template suggests
    max_n                samples that one request may ask for
    max_prompt_tokens    longest prompt; None: the context
    max_body_bytes       larger request bodies are refused with 413
    max_concurrent_requests  requests that may generate at once; further ones get 429
    max_queued_requests  prompts that may wait for their first token; further ones get 429
    request_timeout      seconds that the engine is given for one request; None: no limit
    header_timeout       seconds for a new connection to send a request's headers
    body_timeout         seconds for a request's body to arrive
    keepalive_seconds    a waiting stream gets a comment line so often
    write_timeout        seconds after which a reader that takes nothing more is dropped
    drain_timeout        seconds that running requests are given after SIGTERM
    access_log           one log line per request
    otlp_traces_endpoint where spans of requests are sent, by OTLP over HTTP; see tracing.py

    Raises ConfigError for a value that cannot be used.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    root_path: str = ""
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tool_call_parser: ToolCallFormat | None = None
    max_n: int = MAX_SAMPLES
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 16 * 2**20
    max_concurrent_requests: int = 2048
    max_queued_requests: int = 1024
    request_timeout: float | None = None
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    keepalive_seconds: float = 15.0
    write_timeout: float = 120.0
    drain_timeout: float = 30.0
    access_log: bool = True
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port!r} is not from 0 to 65535")
        if self.tool_call_parser not in (None, *TOOL_CALL_FORMATS):
            raise ConfigError(
                f"tool_call_parser={self.tool_call_parser!r} is not one of: "
                f"{', '.join(TOOL_CALL_FORMATS)}"
            )
        if not 1 <= self.max_n <= MAX_SAMPLES:
            raise ConfigError(f"max_n={self.max_n!r} is not from 1 to {MAX_SAMPLES}")
        for name in (
            "max_body_bytes",
            "max_concurrent_requests",
            "max_queued_requests",
            "max_prompt_tokens",
        ):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= _MAX_COUNT:
                unit = " bytes" if name == "max_body_bytes" else ""
                raise ConfigError(f"{name}={count!r} is not from 1 to {_MAX_COUNT}{unit}")
        for name in (
            "header_timeout",
            "body_timeout",
            "keepalive_seconds",
            "write_timeout",
            "request_timeout",
        ):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name}={seconds!r} is not a number of seconds above 0")
        if not 0 <= self.drain_timeout < math.inf:
            raise ConfigError(
                f"drain_timeout={self.drain_timeout!r} is not a number of seconds, 0 or more"
            )
        if "" in self.api_keys:
            raise ConfigError("an API key is empty: it would let everyone in")
        if "" in self.served_model_names:
            raise ConfigError("a served model name is empty")
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path={self.root_path!r} is not a path such as /llm, with no slash at its end"
            )
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("TLS needs a certificate: ssl_certfile is missing")
