"""How many replicas there are to be, where, and with what. Imports no Ray."""

from __future__ import annotations

from dataclasses import dataclass

from cuengine.errors import ConfigError
from cuengine.ray_backend.address import check_form

PREFIX_MARGIN = 8.0
MAX_REPLICAS = 1024
MAX_CPUS = 1024
MAX_MARGIN = 1_000_000


@dataclass(slots=True, kw_only=True)
class RaySettings:
    """replicas       engines that run, or the least if Ray may add some
    max_replicas   the most; None: as many as `replicas`
    address        HOST:PORT of a Ray cluster, auto for the one that this machine belongs to, local
                   for one that is started here; None: $RAY_ADDRESS, else local
    cpus           what Ray reserves for a replica; on cpu also the threads it computes with
    app            name of the Ray Serve application, which then stays when the server ends, and is
                   updated by the next one; None: one of this server's own
    prefix_margin  requests by which a replica may be busier than another and still get one whose
                   whole prompt it has
    drain_timeout  seconds that a replica is given to end what it runs when another takes its place

    Raises ConfigError.
    """

    replicas: int = 1
    max_replicas: int | None = None
    address: str | None = None
    cpus: float = 1.0
    app: str | None = None
    prefix_margin: float = PREFIX_MARGIN
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(
                f"data_parallel_size={self.replicas} is not a number of engines from 1 to "
                f"{MAX_REPLICAS}"
            )
        if self.max_replicas is not None and not (
            self.replicas <= self.max_replicas <= MAX_REPLICAS
        ):
            raise ConfigError(
                f"max_data_parallel_size={self.max_replicas} is not a number of engines from "
                f"data_parallel_size={self.replicas} to {MAX_REPLICAS}"
            )
        if self.address is not None:
            check_form(self.address)
        if not 0 <= self.cpus <= MAX_CPUS:
            raise ConfigError(
                f"ray_replica_cpus={self.cpus} is not a number of CPUs from 0 to {MAX_CPUS}"
            )
        if not 0 <= self.prefix_margin <= MAX_MARGIN:
            raise ConfigError(
                f"ray_prefix_margin={self.prefix_margin} is not a number of requests from 0 to "
                f"{MAX_MARGIN}"
            )
