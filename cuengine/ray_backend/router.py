"""Ray Serve's request router, which runs in the process that sends the requests.

What it chooses by is in prefix_routing.py. Calls to a named replica go through it as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cuengine.ray_backend.prefix_routing import PrefixRouting, block_hashes
from cuengine.ray_backend.routing_here import routing_of


class PrefixRouter(RequestRouter):
    """Picks for `generate` by prefix and load, and for all else who is named by `replica`."""

    queue_len_response_deadline_s = 1.0
    """Seconds to wait for a replica that was not heard of for a while, before another is taken."""

    def initialize_state(self, *, block_size: int, margin: float) -> None:
        self._block_size = block_size
        self._routing = PrefixRouting(margin)
        self._sent: Counter[ReplicaID] = Counter()
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
            return [[by_name[named]]] if named in by_name else []
        command = pending_request.args[0]
        hashes = self._hashes(pending_request)
        loads = {name: self._load(replica.replica_id) for name, replica in by_name.items()}
        ranking = self._routing.rank(hashes, loads, pending_request.kwargs["avoid"])
        if ranking:
            # Said now, not once it has been sent: the next one may have the same prefix.
            self._routing.sent(ranking[0], hashes)
            self._here.pick(command.key, ranking[0])
        return [[by_name[name]] for name in ranking]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """It may not be the one that was picked first."""
        name = replica_id.unique_id
        if "avoid" in pending_request.kwargs:
            command = pending_request.args[0]
            if self._here.picks.get(command.key) != name:
                self._routing.sent(name, self._hashes(pending_request))
                self._here.pick(command.key, name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._show()

    def _show(self) -> None:
        names = tuple(replica_id.unique_id for replica_id in self.curr_replicas)
        self._routing.keep(names)
        self._here.replicas = names

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if replica_id in self._sent:
            self._sent[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._show()
        for gone in self._sent.keys() - {replica.replica_id for replica in replicas}:
            del self._sent[gone]

    def _hashes(self, pending_request: PendingRequest) -> list[bytes]:
        command = pending_request.args[0]
        return block_hashes(command.prompt_token_ids, self._block_size, command.cache_salt)

    def _load(self, replica_id: ReplicaID) -> int:
        """Its requests: from here, and as it said itself, from others."""
        return max(self._sent[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)
