"""The server's life: made from an engine, started, drained on a signal, stopped.

What it answers is in routes.py and the modules named there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from cuengine.api.connection import Connection
from cuengine.api.engine import ServingEngine
from cuengine.api.routes import add_cors_headers, add_routes, gate
from cuengine.api.settings import ServerSettings
from cuengine.api.state import STATE, ServerState
from cuengine.errors import ConfigError

__all__ = [
    "RunningServer",
    "ServerSettings",
    "create_app",
    "listen",
    "run_server",
    "running_server",
]

logger = logging.getLogger("cuengine.api")

# Between two requests on one connection. Longer than the minute that proxies commonly keep theirs.
_IDLE_CONNECTION_SECONDS = 75.0
# After the engine has stopped, for its streams to say so to their clients.
_FAREWELL_SECONDS = 2.0
# For a client to finish sending what is not read any more, and see why.
_LINGER_SECONDS = 2.0
_BACKLOG = 1024


def create_app(engine: ServingEngine, settings: ServerSettings) -> web.Application:
    """The whole server as an aiohttp application. It starts `engine` and stops it in the end."""
    state = ServerState(engine, settings)
    app = web.Application(middlewares=[gate], client_max_size=settings.max_body_bytes)
    app[STATE] = state
    add_routes(app, state)
    if settings.cors_origins:
        app.on_response_prepare.append(add_cors_headers)

    async def life(_app: web.Application) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.stop()
        state.close()

    app.cleanup_ctx.append(life)
    return app


class RunningServer:
    """A server that listens. `stop` may be called at any time, and more than once."""

    def __init__(
        self, app: web.Application, settings: ServerSettings, listening: socket.socket
    ) -> None:
        self._state = app[STATE]
        self._settings = settings
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=_FAREWELL_SECONDS,
            access_log=None,
        )
        self._listening = listening
        self._listener: asyncio.Server | None = None
        self.port: int = listening.getsockname()[1]

    @property
    def url(self) -> str:
        host = self._settings.host
        host = {"0.0.0.0": "localhost", "::": "localhost", "": "localhost"}.get(host, host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Start the engine, then take connections."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        access_log = logging.getLogger("cuengine.access") if self._settings.access_log else None

        def connect() -> Connection:
            return Connection(
                server,
                loop=loop,
                header_timeout=self._settings.header_timeout,
                lingering_time=min(_LINGER_SECONDS, self._settings.body_timeout),
                keepalive_timeout=_IDLE_CONNECTION_SECONDS,
                access_log=access_log,
                access_log_format='%a "%r" %s %b %Tfs',
            )

        self._listener = await loop.create_server(connect, sock=self._listening, backlog=_BACKLOG)

    async def drain(self) -> None:
        """Refuse what is new with 503 and wait until what runs is done."""
        self._state.draining = True
        await self._state.wait_idle()

    @property
    def in_flight(self) -> int:
        return self._state.in_flight

    async def stop(self) -> None:
        """Close the listening socket, stop the engine, end what still runs with an error."""
        self._state.draining = True
        if self._listener is not None:
            self._listener.close()
        self._listening.close()
        await self._state.engine.stop()
        await self._runner.cleanup()


@asynccontextmanager
async def running_server(
    engine: ServingEngine, settings: ServerSettings, listening: socket.socket | None = None
) -> AsyncIterator[RunningServer]:
    """A server in the running loop, stopped at the end of the block; arguments as `run_server`."""
    listening = listen(settings) if listening is None else listening
    server = RunningServer(create_app(engine, settings), settings, listening)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


def run_server(
    engine: ServingEngine, settings: ServerSettings, listening: socket.socket | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    listening  what `listen` gave, for whom an address in use should show before a model is loaded
    Raises ConfigError where the address cannot be had.
    """
    asyncio.run(_serve(engine, settings, listening))


async def _serve(
    engine: ServingEngine, settings: ServerSettings, listening: socket.socket | None
) -> None:
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with running_server(engine, settings, listening) as server:
        names = settings.served_model_names or (engine.config.model,)
        logger.info("Serving %s at %s", ", ".join(names), server.url)
        await first.wait()
        logger.info(
            "Draining: %d requests run, new ones get 503. At most %g s; a second signal stops now.",
            server.in_flight,
            settings.drain_timeout,
        )
        waits = [asyncio.create_task(server.drain()), asyncio.create_task(second.wait())]
        await asyncio.wait(
            waits, timeout=settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for task in waits:
            task.cancel()
        if server.in_flight:
            logger.warning("Stopping with %d requests unfinished", server.in_flight)
    logger.info("Stopped")


def listen(settings: ServerSettings) -> socket.socket:
    """A socket bound to host and port, which takes connections once the server runs.

    An empty host is every address. Raises ConfigError where the address cannot be had.
    """
    host, port = settings.host, settings.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address to listen at: {error}") from None
    listening = socket.socket(family, kind, proto)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not host:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(address)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is in use on {host or 'this machine'}. Choose another with --port."
            ) from None
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listening
