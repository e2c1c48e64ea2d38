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
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.schema import ApplicationStatus, DeploymentStatus, LoggingConfig, ReplicaState

from cuengine.config import EngineConfig
from cuengine.counted import counted
from cuengine.engine_view import EngineView
from cuengine.errors import ConfigError, ModelError
from cuengine.ray_backend.connection import Connection
from cuengine.ray_backend.fleet import FleetGoneError
from cuengine.ray_backend.leaving import in_time
from cuengine.ray_backend.ray_log import failure_in
from cuengine.ray_backend.replica import Replica
from cuengine.ray_backend.router import PrefixRouter
from cuengine.ray_backend.routing_here import routing_of
from cuengine.ray_backend.settings import RaySettings
from cuengine.ray_backend.watch import Outlook, Watch
from cuengine.stats import EngineStats
from cuengine.wire import Add, AddBeams, Log, Ready

logger = logging.getLogger("cuengine")

DEPLOYMENT = "engine"

_MAX_ONGOING = 100_000
"""Requests of a replica: the queue is the engine's, and its length limited by the server."""

_HEALTH_CHECK_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_WORDS = 30.0
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_BE_HEALTHY = 10.0
"""Of three checks in a row. Ray starts another replica then for one that hangs."""
_BUSY = 0.75
"""Of max_num_seqs: with more requests at each replica on average, Ray adds one if it may."""
_SECONDS_OF_AVERAGE = 15.0
"""Ray wants more than the servers' reports are apart, which is 10."""
_SECONDS_TO_ADD = 10.0
_SECONDS_TO_REMOVE = 300.0

_SECONDS_TO_CHECK = 300.0
"""The model's files, before an update."""
_TRIES = 3
"""Starts of a replica that may fail in an update. After the last Ray starts none for as long as
nobody updates again, not even one that takes the place of another.
"""


class ServeFleet:
    """A Ray Serve application of one deployment. Made with `deploy`."""

    def __init__(self, config: EngineConfig, settings: RaySettings, *, step_timeout: float) -> None:
        self._config = config
        self._settings = settings
        self._step_timeout = step_timeout
        self._own_application = settings.app is None
        self.application = settings.app or f"cuengine-{socket.gethostname()}-{os.getpid()}"
        self._connection = Connection()
        self._updating = threading.Lock()
        self._updates = threading.BoundedSemaphore(2)
        self._changing = threading.Lock()
        self._deployed = False
        self._ended = threading.Event()
        self._handle: Any = None
        self._watch = Watch(self)

    def deploy(self) -> Ready:
        """Connect to Ray, or start it, and have it start the replicas.

        Returns what all of them can do. Raises ConfigError, and FleetGoneError where `end` was
        called meanwhile. To be called in a thread that lives as long: see Connection.
        """
        self._connection.connect(self._settings.address)
        try:
            serve.start(proxy_location="Disabled", logging_config=_quiet())
            self._handle = self._run()
            results = self._handle.broadcast("ready").results(timeout_s=60)
            self._watch.start()
        except (RayError, RayServeException, TimeoutError) as error:
            raise ConfigError(f"Ray has failed: {error}") from error
        logger.info("Ready: %s of %s", counted(len(results), "replica"), self._config.model)
        return Ready(
            min(ready.max_model_len for ready in results),
            min(ready.num_blocks for ready in results),
            min(ready.vocab_size for ready in results),
        )

    def update(self) -> None:
        """Replace all replicas, one after the other, by such as load the model's files anew.

        Takes its time, in the calling thread; while it does, a second call waits. A third has no
        reason to: the second will load the files as they are by then.
        Raises ConfigError where the files cannot be loaded, or the new replicas do not start.
        """
        if self._handle is None:
            logger.info("The replicas are still being started, from the files as they are")
            return
        if not self._updates.acquire(blocking=False):
            return
        try:
            with self._updating:
                self._check_model()
                logger.info("The replicas are replaced, one after the other")
                self._run(tries=_TRIES)
                logger.info("All replicas have been replaced")
        finally:
            self._updates.release()

    def _check_model(self) -> None:
        """Where the replicas are. Ray stops one before it starts another, and cannot go back."""
        try:
            self._handle.broadcast("check_model").results(timeout_s=_SECONDS_TO_CHECK)
        except RayTaskError as error:
            if isinstance(error.cause, ModelError):
                raise ConfigError(f"The replicas stay as they are: {error.cause}") from error
            logger.warning("The model's files could not be looked at: %s", error.cause)
        except Exception as error:  # a replica may be ending or hang
            logger.warning("The model's files could not be looked at: %s", error)

    def _run(self, tries: int = 1) -> Any:
        """Have the application started or replaced. Returns its handle when all replicas run."""
        target = serve.RunTarget(self._bound(tries), name=self.application, route_prefix=None)
        with self._changing:
            if self._ended.is_set():
                raise FleetGoneError("The application has been ended")
            self._deployed = True
            [handle] = serve.run_many([target], wait_for_applications_running=False)
        logger.info("Ray starts the replicas, as the application %s", self.application)
        self._wait_until_running()
        return handle

    def _bound(self, tries: int) -> Any:
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
                look_back_period_s=_SECONDS_OF_AVERAGE,
                upscale_delay_s=_SECONDS_TO_ADD,
                downscale_delay_s=_SECONDS_TO_REMOVE,
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
            health_check_timeout_s=_SECONDS_TO_BE_HEALTHY,
            max_constructor_retry_count=tries,
            logging_config=_quiet(),
            request_router_config=RequestRouterConfig(
                request_router_class=PrefixRouter,
                request_router_kwargs={
                    "block_size": config.block_size,
                    "margin": settings.prefix_margin,
                },
            ),
        )(Replica)
        return deployment.bind(
            config, self._step_timeout, levels, settings.drain_timeout, self._own_application
        )

    def _wait_until_running(self) -> None:
        told = time.monotonic()
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            application = serve.status().applications.get(self.application)
            if application is None:
                raise ConfigError(f"The application {self.application} was deleted meanwhile")
            if application.status == ApplicationStatus.RUNNING:
                return
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                deployments = application.deployments.values()
                said = [application.message, *(one.message for one in deployments)]
                raise ConfigError(f"The replicas do not start: {failure_in(said)}")
            if time.monotonic() - told > _SECONDS_BETWEEN_WORDS:
                told = time.monotonic()
                logger.warning("Replicas are still being started: %s", self._progress(application))
        raise FleetGoneError("The application has been ended")

    def _progress(self, application: Any) -> str:
        """So that a cluster with too little for the replicas is noticed."""
        states = application.deployments[DEPLOYMENT].replica_states
        counts = ", ".join(
            f"{counted(n, 'replica')} {state.lower()}" for state, n in states.items()
        )
        needed = {"CPU": self._settings.cpus, "GPU": _num_gpus(self._config.device)}
        all_, free = ray.cluster_resources(), ray.available_resources()
        has = ", ".join(
            f"{count:g} {what} (of {all_.get(what, 0):g} in the cluster {free.get(what, 0):g} free)"
            for what, count in needed.items()
            if count
        )
        return f"{counts}; each needs {has or 'nothing'}"

    # What watch.py asks.

    def outlook(self) -> Outlook:
        deployment = serve.status().applications[self.application].deployments[DEPLOYMENT]
        states = deployment.replica_states.items()
        wanted = sum(n for state, n in states if state != ReplicaState.STOPPING)
        unwell = deployment.status in (DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED)
        return Outlook(wanted, failure_in([deployment.message]) if unwell else None)

    def log_since(self, replica: str, number: int) -> tuple[int, list[Log]]:
        response = self._handle.log_since.remote(number, replica=replica)
        try:
            records: tuple[int, list[Log]] = response.result(timeout_s=_SECONDS_TO_ANSWER)
        except TimeoutError:
            response.cancel()
            raise
        return records

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

    async def stats(self, replica: str, server: str) -> EngineStats:
        stats: EngineStats = await self._handle.stats.remote(server, replica=replica)
        return stats

    async def is_gone(self) -> bool:
        """As Ray's controller says; routers are not always told that there is no deployment."""
        return await asyncio.to_thread(self._is_gone)

    def _is_gone(self) -> bool:
        if not any(node["Alive"] for node in ray.nodes()):
            return True  # and the controller with them
        application = serve.status().applications.get(self.application)
        ends = (ApplicationStatus.DELETING, ApplicationStatus.DEPLOY_FAILED)
        return application is None or application.status in ends

    async def view(self, replica: str) -> EngineView:
        view: EngineView = await self._handle.view.remote(replica=replica)
        return view

    @property
    def wanted(self) -> int:
        return self._watch.wanted

    async def stop(self) -> None:
        """`close`, in time."""
        await asyncio.to_thread(in_time, self.close)

    def end(self) -> None:
        """Delete the application, also one that is being deployed in another thread. One with a
        name by which others may use it stays, and in a Ray that was started here all will end.
        """
        self._ended.set()
        self._watch.stop()
        if self._connection.started_ray or not self._own_application:
            return
        with self._changing:
            if self._deployed:
                self._deployed = False
                serve.delete(self.application)

    def close(self) -> None:
        """`end` and leave Ray. May be called again."""
        try:
            self.end()
        finally:
            self._connection.close()


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


def _num_gpus(device: str) -> int:
    """Of each replica: on "auto" one, if the cluster has any."""
    if device == "auto":
        return int(ray.cluster_resources().get("GPU", 0) >= 1)
    return int(device == "cuda")


def _quiet() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)
