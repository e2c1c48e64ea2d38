"""The server's life: made from an engine, started, drained on a signal, stopped.

What it answers is in routes.py and the modules named there.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from cuengine.api.access_log import AccessLogger, add_id_header
from cuengine.api.connection import Connection
from cuengine.api.engine import ServingEngine
from cuengine.api.listening import Listening, listen
from cuengine.api.loop_errors import LoopErrors
from cuengine.api.routes import add_cors_headers, add_routes, gate
from cuengine.api.settings import ServerSettings
from cuengine.api.state import STATE, ServerState
from cuengine.counted import counted

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
    app.on_response_prepare.append(add_id_header)
    if settings.cors_origins:
        app.on_response_prepare.append(add_cors_headers)

    async def life(_app: web.Application) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.stop()
        await state.close()

    app.cleanup_ctx.append(life)
    return app


class RunningServer:
    """A server that listens. `stop` may be called at any time, and more than once."""

    def __init__(
        self, app: web.Application, settings: ServerSettings, listening: Listening
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
        self.port = listening.port
        self.url = listening.url

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
                access_log_class=AccessLogger,
            )

        listening = self._listening
        create = loop.create_server if listening.path is None else loop.create_unix_server
        self._listener = await create(
            connect, sock=listening.socket, ssl=listening.tls, backlog=_BACKLOG
        )
        if listening.reachable and not (self._settings.api_keys or self._settings.ssl_ca_certs):
            logger.warning(
                "No API key is asked for: whoever reaches port %d may use the model. --api-key or "
                "CUENGINE_API_KEY sets one",
                self.port,
            )

    async def drain(self) -> None:
        """Refuse what is new with 503 and wait until what runs is done."""
        self._state.start_draining()
        await self._state.wait_idle()

    @property
    def in_flight(self) -> int:
        return self._state.in_flight

    async def stop(self) -> None:
        """Close the listening socket, stop the engine, end what still runs with an error."""
        self._state.start_draining()
        if self._listener is not None:
            self._listener.close()
        self._listening.close()
        await self._state.engine.stop()
        await self._runner.cleanup()


@asynccontextmanager
async def running_server(
    engine: ServingEngine, settings: ServerSettings, listening: Listening | None = None
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
    engine: ServingEngine, settings: ServerSettings, listening: Listening | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    listening  what `listen` gave, for whom an address in use should show before a model is loaded
    Raises ConfigError where the address cannot be had.
    """
    asyncio.run(_serve(engine, settings, listening))


async def _serve(
    engine: ServingEngine, settings: ServerSettings, listening: Listening | None
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())
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
            "Draining: %s in flight, new ones get 503. At most %g s; a second signal stops now.",
            counted(server.in_flight, "request"),
            settings.drain_timeout,
        )
        waits = [asyncio.create_task(server.drain()), asyncio.create_task(second.wait())]
        await asyncio.wait(
            waits, timeout=settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for task in waits:
            task.cancel()
        if server.in_flight:
            unfinished = counted(server.in_flight, "request")
            logger.warning("Stopping with %s unfinished", unfinished)
    logger.info("Stopped")
