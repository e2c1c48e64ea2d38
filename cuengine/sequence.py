"""Requests, and the sequences (samples) they consist of, as the scheduler sees them.

Plain state: how it changes is in scheduler.py and engine.py. No text here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from cuengine.beam_search import BeamSearch
from cuengine.block_pool import chain_hash, root_hash
from cuengine.block_table import BlockTable
from cuengine.outputs import FinishReason, TokenLogprobs
from cuengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cuengine.grammar import Matcher

UNKNOWN_TOKEN = -1
"""Stands in `Sequence.token_ids` for a token that was drawn, but has not reached the host."""


class SequenceStatus(Enum):
    """HELD: a beam that lost its blocks while it waited for the others of its search."""

    WAITING = auto()
    RUNNING = auto()
    HELD = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Progress:
    """What a request had got when its engine ended: at least one token for each of its samples.

    outputs            the tokens of each sample; None for one that is finished
    num_cached_tokens  prompt tokens that were found in the prefix cache
    """

    outputs: list[list[int] | None]
    num_cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request and its samples.

    arrival            counts up: the order of requests
    seed               the user's or one drawn on admission, as uint64
    max_tokens         resolved: never more than the room in the context
    ending_ids         token ids that end a sample
    prompt_logprobs    one entry per prompt token seen so far, where they were asked for; None for
                       the first, which follows nothing
    penalized          its next token depends on counts of those before, which the host keeps
    num_cached_tokens  prompt tokens found in the prefix cache; None before the first admission
    beam_search        decides what its sequences go on with; None: each draws its own tokens
    sequences          one until the prompt is through, then one per sample, or per beam that runs
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
    beam_search: BeamSearch | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: int | None = None
    sequences: list[Sequence] = field(default_factory=list)
    penalized: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        if params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)
        self.penalized = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    @property
    def width(self) -> int:
        """Sequences that may run for it at once."""
        return self.params.num_samples if self.beam_search is None else self.beam_search.width

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of the prompt's log-probabilities are still to be computed."""
        asked = self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def resume_from(self, progress: Progress) -> None:
        """The prompt has been through before: it is neither reported nor counted again."""
        self.num_cached_tokens = progress.num_cached_tokens
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)


class Sequence:
    """One sample or beam: prompt and output, and how much of both is in the KV cache.

    token_ids       int32, prompt then output
    max_len         tokens of prompt and output together that it may come to
    num_computed    tokens whose keys and values are in the cache, or will be before the next step
    num_registered  blocks, from the first on, that were offered to the prefix cache
    num_mirrored    tokens whose keys and values a draft model has, too; None before its first step
    host_blocks     where its computed tokens are while it waits swapped out; else none
    last_row        row of the last step's output that its last token came from
    matcher         where it is in the request's grammar; None where there is none
    index           of the sample; of a beam its place in the search, which changes
    width           sequences this one stands for: all of them until it is forked, then 1
    order           who goes first: lower priority value, then arrival, then index
    """

    __slots__ = (
        "finish_reason",
        "hashes",
        "host_blocks",
        "index",
        "last_row",
        "matcher",
        "max_len",
        "num_computed",
        "num_mirrored",
        "num_registered",
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
        self.renumber(index)
        self.table = table
        self.prompt_len = len(request.prompt_token_ids)
        self.token_ids: array[int] = array("i", request.prompt_token_ids)
        self.max_len = self.prompt_len + request.max_tokens
        self.num_computed = 0
        self.num_registered = 0
        self.num_mirrored: int | None = None
        self.host_blocks: list[int] = []
        self.last_row = 0
        self.matcher: Matcher | None = None
        self.width = request.width
        self.status = SequenceStatus.WAITING
        self.hashes: list[bytes] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_parked(self) -> bool:
        """A beam that has computed all its tokens; what comes next is for its search to say."""
        return self.num_computed == len(self.token_ids)

    def renumber(self, index: int) -> None:
        """Give it another index, and with it another place in the order."""
        self.index = index
        self.order = (self.request.priority, self.request.arrival, index)

    def fork(self, index: int) -> Sequence:
        """Another sample of the same request, sharing all blocks."""
        other = Sequence(self.request, index, self.table.fork())
        other.token_ids = self.token_ids[:]
        other.num_computed = self.num_computed
        other.num_registered = self.num_registered
        other.num_mirrored = self.num_mirrored
        other.width = 1
        other.status = self.status
        other.hashes = self.hashes[:]
        other.matcher = None if self.matcher is None else self.matcher.fork()
        return other

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of at least the first `count` blocks, which must be full of known tokens."""
        hashes = self.hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
            start = len(hashes) * block_size
            hashes.append(chain_hash(parent, self.token_ids[start : start + block_size].tobytes()))
        return hashes
