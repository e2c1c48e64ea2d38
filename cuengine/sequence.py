"""Requests, and the sequences (samples) they consist of, as the scheduler sees them.

Plain state: how it changes is in scheduler.py and engine.py. No text here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from cuengine.block_pool import chain_hash, root_hash
from cuengine.block_table import BlockTable
from cuengine.outputs import FinishReason, TokenLogprobs
from cuengine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request and its samples.

    arrival            counts up: the order of requests
    seed               the user's or one drawn on admission, as uint64
    max_tokens         resolved: never more than the room in the context
    ending_ids         token ids that end a sample
    prompt_logprobs    one entry per prompt token seen so far, where they were asked for
    num_cached_tokens  prompt tokens found in the prefix cache; None before the first admission
    sequences          one until the prompt is through, then one per sample
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    seed: int
    max_tokens: int
    ending_ids: frozenset[int]
    priority: int = 0
    cache_salt: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: int | None = None
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of the prompt's log-probabilities are still to be computed."""
        asked = self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)


class Sequence:
    """One sample: prompt and output, and how much of both is in the KV cache.

    token_ids     int32, prompt then output
    num_computed  tokens whose keys and values are in the cache
    width         samples this sequence stands for: all of them until it is forked, then 1
    order         who goes first: lower priority value, then arrival, then index
    """

    __slots__ = (
        "finish_reason",
        "hashes",
        "index",
        "num_computed",
        "order",
        "prompt_len",
        "request",
        "status",
        "stop_reason",
        "table",
        "token_ids",
        "width",
    )

    def __init__(self, request: Request, index: int, table: BlockTable) -> None:
        self.request = request
        self.index = index
        self.table = table
        self.prompt_len = len(request.prompt_token_ids)
        self.token_ids: array[int] = array("i", request.prompt_token_ids)
        self.num_computed = 0
        self.width = request.params.num_samples
        self.order = (request.priority, request.arrival, index)
        self.status = SequenceStatus.WAITING
        self.hashes: list[bytes] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def fork(self, index: int) -> Sequence:
        """Another sample of the same request, sharing all blocks."""
        other = Sequence(self.request, index, self.table.fork())
        other.token_ids = self.token_ids[:]
        other.num_computed = self.num_computed
        other.width = 1
        other.status = self.status
        other.hashes = self.hashes[:]
        return other

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of at least the first `count` blocks, which must be full of known tokens."""
        hashes = self.hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
            start = len(hashes) * block_size
            hashes.append(chain_hash(parent, self.token_ids[start : start + block_size].tobytes()))
        return hashes
