"""This process's connection to Ray: to a cluster, or to a Ray that is started here.

Whether a cluster answers is address.py's business.
"""

from __future__ import annotations

import logging
import sys
from contextlib import chdir

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address

from cuengine.errors import ConfigError
from cuengine.ray_backend.address import (
    AUTO,
    PORT,
    NoClusterError,
    check_reachable,
    cluster_address,
)
from cuengine.ray_backend.ray_log import LogLines, into_our_log

logger = logging.getLogger("cuengine")

_SECONDS_TO_ANSWER = 10.0


class Connection:
    """Made with `connect`, in a thread that lives as long: the kernel ends a Ray that was started
    here with the thread that started it.

    started_ray  so it did, or tries to
    """

    def __init__(self) -> None:
        self.started_ray = False
        self._connected = False
        self._stdout = sys.stdout

    def connect(self, address: str | None) -> None:
        """Join the cluster at `address`, as RaySettings has it, or start Ray here.

        Nothing is done where the process is connected already. Raises ConfigError.
        """
        if ray.is_initialized():
            return
        cluster = cluster_address(address)
        self.started_ray = cluster is None
        if cluster is not None:
            check_reachable(_host_and_port(cluster))
        if cluster not in (None, AUTO):  # with AUTO Ray looks for a token
            _check_answers(cluster)
        quiet = {"configure_logging": False, "log_to_driver": False}
        into_our_log()
        sys.stdout = LogLines()
        try:
            # Ray has its processes import from the working folder, too, ahead of what is installed.
            with chdir("/"):
                if cluster is None:
                    logger.info("Starting Ray")
                    ray.init("local", include_dashboard=False, **quiet)
                else:
                    logger.info("Joining the Ray cluster: %s", cluster)
                    ray.init(cluster, **quiet)
        except Exception as error:  # a node that takes too long to start is an Exception, no more
            sys.stdout = self._stdout
            what = "started here" if cluster is None else f"reached at {cluster}"
            raise ConfigError(f"Ray cannot be {what}: {error}") from error
        self._connected = True

    def close(self) -> None:
        """Leave, and end what was started here."""
        if self._connected:
            self._connected = False
            # It has lines for calls whose answers nobody waits for any more.
            logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
            ray.shutdown()
            sys.stdout = self._stdout


def _host_and_port(cluster: str) -> str:
    """Of AUTO what Ray finds on this machine."""
    if cluster != AUTO:
        return cluster
    try:
        found: str = canonicalize_bootstrap_address(AUTO)
    except ConnectionError as error:
        raise ConfigError(
            "ray_address=auto is for a machine that belongs to a Ray cluster, and this one does "
            "not. Begin a cluster here with `ray start --head`, join one with `ray start "
            f"--address HOST:{PORT}`, or leave the flag out: Ray is then started for this server"
        ) from error
    return found


def _check_answers(cluster: str) -> None:
    """That it is the cluster's own port, and takes our token: Ray would try for 20 seconds, and say
    neither. Raises ConfigError.
    """
    status = ""
    with init_grpc_channel(cluster) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(
                b"", timeout=_SECONDS_TO_ANSWER
            )
        except Exception as error:  # gRPC's; for those that are not known here Ray has a text
            if hasattr(error, "code"):
                status = error.code().name
    if status == "UNIMPLEMENTED":
        raise NoClusterError(cluster, "Ray has that port for something else")
    if status == "UNAUTHENTICATED":
        raise ConfigError(
            f"The Ray cluster at {cluster} wants its token: set RAY_AUTH_MODE=token, and have the "
            "token in ~/.ray/auth_token or in RAY_AUTH_TOKEN"
        )
