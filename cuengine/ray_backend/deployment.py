"""The replicas, as Ray Serve runs them: started, replaced one after the other, asked, deleted.

Ray decides where they run, starts others for those that end, and, between two numbers, how many
there are. What happens in one is in replica.py, who gets a request in router.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import LoggingConfig

from cuengine.config import EngineConfig
from cuengine.counted import counted
from cuengine.engine_view import EngineView
from cuengine.errors import ConfigError
from cuengine.ray_backend.fleet import FleetGoneError
from cuengine.ray_backend.replica import Replica
from cuengine.ray_backend.router import PrefixRouter
from cuengine.ray_backend.routing_here import routing_of
from cuengine.ray_backend.settings import RaySettings
from cuengine.stats import EngineStats
from cuengine.wire import Add, AddBeams, Ready

logger = logging.getLogger("cuengine")

DEPLOYMENT = "engine"

_MAX_ONGOING = 100_000
"""Requests of a replica: the queue is the engine's, and its length limited by the server."""

_HEALTH_CHECK_SECONDS = 2.0
_BUSY = 0.75
"""Of max_num_seqs: with more requests at each replica on average, Ray adds one if it may."""


class ServeFleet:
    """A Ray Serve application of one deployment. Made with `deploy`."""

    def __init__(self, config: EngineConfig, settings: RaySettings, *, step_timeout: float) -> None:
        """Connects to Ray, or starts it here where no address is given. Raises ConfigError."""
        self._config = config
        self._settings = settings
        self._step_timeout = step_timeout
        self._own_ray = not ray.is_initialized()
        self._own_application = settings.app is None
        self.application = settings.app or f"cuengine-{socket.gethostname()}-{os.getpid()}"
        self._updating = threading.Lock()
        # It has a line for each request of a replica that is lost; client.py has one for all.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if self._own_ray:
            _connect(settings.address)
        serve.start(proxy_location="Disabled", logging_config=_quiet())
        self._handle: Any = None

    def deploy(self) -> Ready:
        """Start the replicas. Returns what all of them can do; raises ConfigError."""
        self._handle = self._run()
        results = self._handle.broadcast("ready").results(timeout_s=60)
        logger.info("Ready: %s of %s", counted(len(results), "replica"), self._config.model)
        return Ready(
            min(ready.max_model_len for ready in results),
            min(ready.num_blocks for ready in results),
            min(ready.vocab_size for ready in results),
        )

    def update(self) -> None:
        """Replace all replicas, one after the other, by such as load the model's files anew.

        Takes its time, in the calling thread; while it does, a second call waits.
        """
        with self._updating:
            logger.info("The replicas are replaced, one after the other")
            self._run()
            logger.info("All replicas have been replaced")

    def _run(self) -> Any:
        settings, config = self._settings, self._config
        names = ("", "cuengine")
        levels = {name: logging.getLogger(name).getEffectiveLevel() for name in names}
        most = settings.max_replicas
        scaling = None
        if most is not None and most > settings.replicas:
            target = max(1.0, _BUSY * config.max_num_seqs)
            scaling = AutoscalingConfig(
                min_replicas=settings.replicas,
                initial_replicas=settings.replicas,
                max_replicas=most,
                target_ongoing_requests=target,
            )
        deployment: Any = serve.deployment(
            name=DEPLOYMENT,
            num_replicas=settings.replicas if scaling is None else None,
            autoscaling_config=scaling,
            ray_actor_options={"num_cpus": settings.cpus, "num_gpus": _num_gpus(config.device)},
            max_ongoing_requests=_MAX_ONGOING,
            graceful_shutdown_timeout_s=settings.drain_timeout,
            graceful_shutdown_wait_loop_s=0.2,
            health_check_period_s=_HEALTH_CHECK_SECONDS,
            max_constructor_retry_count=1,
            logging_config=_quiet(),
            request_router_config=RequestRouterConfig(
                request_router_class=PrefixRouter,
                request_router_kwargs={
                    "block_size": config.block_size,
                    "margin": settings.prefix_margin,
                },
            ),
        )(Replica)
        application = deployment.bind(config, self._step_timeout, levels)
        try:
            return serve.run(application, name=self.application, route_prefix=None)
        except RuntimeError as error:
            raise ConfigError(f"The replicas do not start: {self._reason(error)}") from error

    def _reason(self, error: RuntimeError) -> str:
        """What a replica's constructor raised: the last line of a message with its traceback."""
        application = serve.status().applications.get(self.application)
        said = [] if application is None else [d.message for d in application.deployments.values()]
        lines = [line.strip() for text in (*said, str(error)) for line in text.splitlines()]
        ours = [line for line in lines if line.startswith("cuengine.errors.")]
        return ours[-1].partition(": ")[2] if ours else str(error)

    # What client.py asks.

    def replicas(self) -> Collection[str]:
        return routing_of(self.application).replicas

    def submit(self, command: Add | AddBeams, *, avoid: Collection[str]) -> ServeStream:
        handle = self._handle.options(stream=True)
        try:
            responses = handle.generate.remote(command, avoid=list(avoid))
        except DeploymentUnavailableError as error:
            raise FleetGoneError(str(error)) from error
        return ServeStream(self.application, command.key, responses)

    async def finish(self, replica: str, key: str, index: int) -> None:
        await self._handle.finish.remote(key, index, replica=replica)

    async def stats(self, replica: str) -> EngineStats:
        stats: EngineStats = await self._handle.stats.remote(replica=replica)
        return stats

    async def view(self, replica: str) -> EngineView:
        view: EngineView = await self._handle.view.remote(replica=replica)
        return view

    async def stop(self) -> None:
        """Delete the application, unless it has a name by which others may use it."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """The same, in the calling thread."""
        if self._own_application:
            serve.delete(self.application)
        if self._own_ray:
            ray.shutdown()


@dataclass(slots=True)
class ServeStream:
    """What Ray Serve gives for one request, with the errors that fleet.py names."""

    application: str
    key: str
    responses: Any

    @property
    def likely_replica(self) -> str | None:
        return routing_of(self.application).picks.get(self.key)

    async def __anext__(self) -> bytes:
        try:
            data: bytes = await anext(self.responses)
        except DeploymentUnavailableError as error:
            raise FleetGoneError(f"The deployment is gone: {error}") from error
        return data

    def cancel(self) -> None:
        self.responses.cancel()


def _connect(address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address is None:
            ray.init("local", logging_level=logging.WARNING, include_dashboard=False)
        else:
            ray.init(address, logging_level=logging.WARNING)
    except Exception as error:  # a node that takes too long to start is an Exception, no more
        what = "started here" if address is None else f"reached at {address}"
        raise ConfigError(f"Ray cannot be {what}: {error}") from error


def _num_gpus(device: str) -> int:
    """Of each replica: on "auto" one, if the cluster has any."""
    if device == "auto":
        return int(ray.cluster_resources().get("GPU", 0) >= 1)
    return int(device == "cuda")


def _quiet() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)
