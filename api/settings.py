"""What an operator can set about the server. The engine's settings are in cuengine/config.py."""

from __future__ import annotations

from dataclasses import dataclass

from cuengine.api.tool_calls import TOOL_CALL_FORMATS, ToolCallFormat
from cuengine.errors import ConfigError
from cuengine.sampling_params import MAX_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """host, port           where to listen; port 0 takes a free one
    served_model_names   names that requests may use, the first is reported; empty: the model's
    api_keys             where given, /v1 needs one of them as bearer token
    cors_origins         origins that browsers may call from; "*" allows any
    tool_call_parser     how the model writes tool calls; None: as its chat template suggests
    max_n                samples that one request may ask for
    max_body_bytes       larger request bodies are refused with 413
    header_timeout       seconds for a new connection to send a request's headers
    body_timeout         seconds for a request's body to arrive
    keepalive_seconds    a waiting stream gets a comment line so often
    write_timeout        seconds after which a reader that takes nothing more is dropped
    drain_timeout        seconds that running requests are given after SIGTERM
    access_log           one log line per request

    Raises ConfigError for a value that cannot be used.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tool_call_parser: ToolCallFormat | None = None
    max_n: int = MAX_SAMPLES
    max_body_bytes: int = 16 * 2**20
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    keepalive_seconds: float = 15.0
    write_timeout: float = 120.0
    drain_timeout: float = 30.0
    access_log: bool = True

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
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes!r} is not at least 1")
        for name in ("header_timeout", "body_timeout", "keepalive_seconds", "write_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not above 0 seconds")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout={self.drain_timeout!r} is not at least 0 seconds")
        if "" in self.api_keys:
            raise ConfigError("an API key is empty: it would let everyone in")
        if "" in self.served_model_names:
            raise ConfigError("a served model name is empty")
