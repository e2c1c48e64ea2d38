"""Ray Serve's request router, which runs in the process that sends the requests.

What it chooses by is in prefix_routing.py. Calls to a named replica go through it as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cuengine.ray_backend.prefix_routing import PrefixRouting, block_hashes
from cuengine.ray_backend.routing_here import routing_of

_SECONDS_TO_SEND = 60.0
_ROUTING_TASKS = 256


@dataclass(slots=True)
class _Request:
    """One that was given to a replica, or is about to be.

    sent  the replica has taken it
    """

    replica: str
    future: asyncio.Future[Any]
    picked: float
    sent: bool = False

    def counts(self) -> bool:
        """Not if it was given up before it was sent, which nobody says."""
        if self.sent:
            return True
        return not self.future.cancelled() and time.monotonic() - self.picked < _SECONDS_TO_SEND


class PrefixRouter(RequestRouter):
    """Picks for `generate` by prefix and load, and for all else who is named by `replica`."""

    queue_len_response_deadline_s = 1.0
    """Seconds to wait for a replica that was not heard of for a while, before another is taken."""

    @property
    def max_num_routing_tasks(self) -> int:
        """Ray has two for each replica, which calls to a hung one would occupy for ever."""
        return _ROUTING_TASKS

    def initialize_state(self, *, block_size: int, margin: float) -> None:
        self._block_size = block_size
        self._routing = PrefixRouting(margin)
        self._requests: dict[str, _Request] = {}
        self._here = routing_of(self._deployment_id.app_name)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Ray would ask again at once otherwise, and for ever.
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        named = pending_request.kwargs.get("replica")
        if named is not None:
            if named in by_name:
                return [[by_name[named]]]
            # Ray would ask again and again. What is done it leaves alone, whoever is picked.
            if not pending_request.future.done():
                pending_request.future.set_exception(LookupError(f"no replica {named}"))
            return [candidate_replicas]
        command = pending_request.args[0]
        hashes = self._hashes(pending_request)
        loads = self._loads(by_name)
        ranking = self._routing.rank(hashes, loads, pending_request.kwargs["avoid"])
        if ranking:
            # Said now, not once it has been sent: others are picked for in between.
            self._routing.sent(ranking[0], hashes)
            self._here.pick(command.key, ranking[0])
            self._requests[pending_request.metadata.internal_request_id] = _Request(
                ranking[0], pending_request.future, time.monotonic()
            )
        return [[by_name[name]] for name in ranking]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """It may not be the one that was picked first."""
        request = self._requests.get(pending_request.metadata.internal_request_id)
        if request is None:
            return  # a call to a named replica
        name = replica_id.unique_id
        request.sent = True
        if request.replica != name:
            request.replica = name
            self._routing.sent(name, self._hashes(pending_request))
            self._here.pick(pending_request.args[0].key, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._requests.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._show()

    def _show(self) -> None:
        names = tuple(replica_id.unique_id for replica_id in self.curr_replicas)
        self._routing.keep(names)
        self._here.replicas = names

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._show()

    def _hashes(self, pending_request: PendingRequest) -> list[bytes]:
        command = pending_request.args[0]
        return block_hashes(command.prompt_token_ids, self._block_size, command.cache_salt)

    def _loads(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        """Their requests: from here, and, as they said themselves, from others."""
        self._requests = {key: one for key, one in self._requests.items() if one.counts()}
        here = Counter(request.replica for request in self._requests.values())
        said = self.replica_queue_len_cache.get
        return {name: max(here[name], said(r.replica_id) or 0) for name, r in replicas.items()}
