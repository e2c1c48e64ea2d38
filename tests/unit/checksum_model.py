"""A model whose next token is a checksum of all tokens before it, and an engine that runs it.

It reads those tokens back through the block tables from a memory that it wrote through the slot
mapping, so a wrong slot, a block reused too early or a missing copy changes what comes out.
"""

from __future__ import annotations

import zlib
from array import array
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch, Int32, SamplerOutput, SamplingBatch
from cuengine.config import EngineConfig
from cuengine.draft_model import DraftModelProposer
from cuengine.engine import Engine, LoadedModel
from cuengine.outputs import EngineOutput
from cuengine.sampling_params import SamplingParams
from cuengine.scheduler import Chunk, Step
from cuengine.sequence import Sequence
from cuengine.speculation import Proposer, Speculator
from cuengine.swap_space import SwapCosts, SwapSpace

VOCAB = 50
EOS = 0
BLOCK_SIZE = 8

Memory = dict[int, tuple[int, int]]
"""Slot -> (token, position)."""


def checksum(tokens: list[int], seed: int, sample: int) -> int:
    return zlib.crc32(bytes(tokens) + bytes([seed % 256, sample]))


def logprob(tokens: list[int], token: int) -> float:
    """From -10 to 0, as float32 holds it, so that no two are likely to be equal."""
    return float(np.float32(-zlib.crc32(bytes([*tokens, token])) / 2**32 * 10))


def most_likely(tokens: list[int], count: int) -> list[int]:
    ranked = sorted(range(VOCAB), key=lambda token: (-logprob(tokens, token), token))
    return ranked[:count]


def draw(tokens: list[int], seed: int, sample: int, forbidden: set[int]) -> int:
    token = checksum(tokens, seed, sample) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def expected_output(prompt: list[int], params: SamplingParams, sample: int = 0) -> list[int]:
    """What the model says when it has the machine to itself. The seed must be given."""
    assert params.seed is not None
    assert params.max_tokens is not None
    ending = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    output: list[int] = []
    while len(output) < params.max_tokens and not ending & set(output):
        forbidden = ending if len(output) < params.min_tokens else set()
        output.append(draw(prompt + output, params.seed, sample, forbidden))
    return output


class Guesser:
    """A proposer that knows what the model says, and is wrong now and then.

    right  of a draft's tokens, how many are right before the first wrong one; in turn
    """

    cost = 0.0

    def __init__(self, right: list[int]) -> None:
        self.right = right
        self.num_drafts = 0

    def prepare(self, sequence: Sequence, count: int) -> int:
        return count

    def propose(self, step: Step) -> None:
        for chunk in step.chunks:
            if chunk.num_drafts:
                right = self.right[self.num_drafts % len(self.right)]
                chunk.draft_ids = array("i", self.guess(chunk, right))
                self.num_drafts += 1

    def guess(self, chunk: Chunk, right: int) -> list[int]:
        sequence, request = chunk.sequence, chunk.sequence.request
        tokens = sequence.token_ids.tolist()
        for i in range(chunk.num_drafts):
            early = len(tokens) - sequence.prompt_len < request.params.min_tokens
            forbidden = set(request.ending_ids) if early else set()
            token = draw(tokens, request.seed, sequence.index, forbidden)
            tokens.append(token if i < right else (token + 1) % VOCAB)
        return tokens[-chunk.num_drafts :]

    def num_reusable(self, sequence: Sequence) -> int:
        return sequence.num_computed

    def forget(self, sequence: Sequence) -> None:
        return


class Switched:
    """A proposer that is asked only now and then, as `on` says in turn."""

    cost = 0.0

    def __init__(self, proposer: Proposer, on: list[bool]) -> None:
        self.proposer, self.on = proposer, on
        self.propose, self.forget = proposer.propose, proposer.forget
        self.num_reusable = proposer.num_reusable
        self.num_asked = 0

    def prepare(self, sequence: Sequence, count: int) -> int:
        self.num_asked += 1
        on = self.on[self.num_asked % len(self.on)]
        return self.proposer.prepare(sequence, count) if on else 0


def draft_model(model: ChecksumModel, budget: int = 64) -> DraftModelProposer:
    """A draft model that says what the model says, as long as its cache has what it should have."""
    return DraftModelProposer(model, block_size=BLOCK_SIZE, max_tokens=budget, cost=0)


class ChecksumModel:
    """A runner; also keeps the size of every step.

    overlaps  runs a step only when its results are fetched: as late as a device may
    fail      the next step raises, when it is given or, with `late`, when it is fetched
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.memory: Memory = {}
        self.host_memory: Memory = {}
        self.last_tokens: Int32 = np.empty(0, np.int32)
        self.steps: list[tuple[int, int]] = []
        self.batches: list[Batch] = []
        self.pending: list[_Pending] = []
        self.fail = False
        self.late = False

    def range(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, batch: Batch, sampling: SamplingBatch) -> _Pending:
        if self.fail and not self.late:
            raise RuntimeError("out of luck")
        self.steps.append((len(batch.token_ids), len(batch.seq_lens)))
        self.batches.append(batch)
        pending = _Pending(self, batch, sampling)
        self.pending.append(pending)
        assert len(self.pending) <= 2, "a step is launched before the last but one was fetched"
        if not self.overlaps:
            pending.compute()
        return pending

    def compute(self, batch: Batch, sampling: SamplingBatch) -> SamplerOutput:
        if self.fail:
            raise RuntimeError("out of luck")
        if batch.swap_outs is not None:
            move(batch.swap_outs, self.memory, self.host_memory)
        copies = batch.block_copies
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist()), "copies that chain"
        assert batch.swap_outs is None or batch.swap_ins is None
        move(copies, self.memory, self.memory)
        if batch.swap_ins is not None:
            move(batch.swap_ins, self.host_memory, self.memory)
        token_ids = batch.token_ids
        if batch.token_sources is not None:
            known = self.last_tokens[batch.token_sources]
            token_ids = np.where(batch.token_sources < 0, token_ids, known)
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens go to one slot"
        for slot, token, position in zip(slots, token_ids, batch.positions, strict=True):
            self.memory[slot] = (int(token), int(position))
        starts = batch.query_start_loc.tolist()
        assert starts[-1] == len(slots)
        for i, end in enumerate(batch.seq_lens.tolist()):
            chunk = batch.positions[starts[i] : starts[i + 1]].tolist()
            assert chunk == list(range(end - len(chunk), end))
        output = self.sample(batch, sampling)
        self.last_tokens = output.token_ids
        return output

    def sample(self, batch: Batch, sampling: SamplingBatch) -> SamplerOutput:
        rows = len(batch.logits_indices)
        drawn = np.empty(rows, np.int32)
        logprobs = np.full(rows, np.nan, np.float32)
        width = max(0, int(sampling.num_logprobs.max(initial=0)))
        contexts: dict[int, list[int]] = {}
        top: dict[int, list[int]] = {}
        for row, index in enumerate(batch.logits_indices.tolist()):
            sequence = int(np.searchsorted(batch.query_start_loc, index, side="right")) - 1
            tokens = self.read(batch.block_tables[sequence], int(batch.positions[index]) + 1)
            drawn[row] = sampling.target_ids[row]
            if drawn[row] < 0:
                assert sampling.positions[row] == len(tokens)
                check_penalized_tokens(sampling, row, tokens)
                seed, sample = int(sampling.seeds[row]), int(sampling.sample_indices[row])
                drawn[row] = draw(tokens, seed, sample, forbidden_tokens(sampling, row))
            if sampling.num_logprobs[row] >= 0:
                logprobs[row] = logprob(tokens, int(drawn[row]))
                contexts[row] = tokens
                top[row] = most_likely(tokens, int(sampling.num_logprobs[row]))
        output = SamplerOutput(
            drawn,
            logprobs,
            np.ones(rows, np.int32),
            np.full((rows, width), -1, np.int32),
            np.full((rows, width), np.nan, np.float32),
        )
        for row, best in top.items():
            output.top_ids[row, : len(best)] = best
            output.top_logprobs[row, : len(best)] = [logprob(contexts[row], t) for t in best]
        return output

    def read(self, table: NDArray[np.int32], length: int) -> list[int]:
        held = [
            self.memory[int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE]
            for position in range(length)
        ]
        assert [position for _, position in held] == list(range(length))
        return [token for token, _ in held]


class _Pending:
    """A step that is computed when somebody wants to see what came of it."""

    def __init__(self, model: ChecksumModel, batch: Batch, sampling: SamplingBatch) -> None:
        self.model, self.batch, self.sampling = model, batch, sampling
        self.output: SamplerOutput | None = None

    def compute(self) -> None:
        self.output = self.model.compute(self.batch, self.sampling)

    def fetch(self) -> SamplerOutput:
        assert self.model.pending.pop(0) is self, "steps are fetched in order, and once"
        if self.output is None:
            self.compute()
        assert self.output is not None
        return self.output


def move(pairs: Int32, source: Memory, target: Memory) -> None:
    """Copy blocks in whatever order: all are read before any is written."""
    targets = pairs[:, 1].tolist()
    assert len(set(targets)) == len(targets), "two copies go to one block"
    copied: Memory = {}
    for from_block, to_block in pairs.tolist():
        for offset in range(BLOCK_SIZE):
            held = source.get(from_block * BLOCK_SIZE + offset)
            if held is not None:
                copied[to_block * BLOCK_SIZE + offset] = held
    target.update(copied)


def check_penalized_tokens(sampling: SamplingBatch, row: int, tokens: list[int]) -> None:
    """Where there is a penalty, the tokens it is over are those that the row follows."""
    if sampling.repetition_penalty is None or sampling.repetition_penalty[row] == 1:
        return
    given: list[int] = []
    for ids, offsets in (
        (sampling.prompt_ids, sampling.prompt_offsets),
        (sampling.output_ids, sampling.output_offsets),
    ):
        assert ids is not None
        assert offsets is not None
        given += ids[offsets[row] : offsets[row + 1]].tolist()
    assert given == tokens


def forbidden_tokens(sampling: SamplingBatch, row: int) -> set[int]:
    if sampling.bias_rows is None or sampling.bias_ids is None or sampling.bias_values is None:
        return set()
    chosen = (sampling.bias_rows == row) & np.isneginf(sampling.bias_values)
    return set(sampling.bias_ids[chosen].tolist())


def make_engine(
    *,
    num_blocks: int = 64,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    budget: int = 64,
    caching: bool = True,
    overlaps: bool = False,
    num_host_blocks: int = 0,
    block_cost: float = 1.0,
    proposer: Proposer | None = None,
    num_draft_tokens: int = 4,
) -> tuple[Engine, ChecksumModel]:
    """block_cost: of swapping, in tokens computed again. proposer: always worth its while."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    model = ChecksumModel(overlaps=overlaps)
    loaded = LoadedModel(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    swap_space = None
    if num_host_blocks:
        swap_space = SwapSpace(num_host_blocks, BLOCK_SIZE, SwapCosts(block=block_cost, token=1))
    engine = Engine(
        config,
        loaded,
        model,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        swap_space=swap_space,
        speculator=None
        if proposer is None
        else Speculator(proposer, num_draft_tokens, weight_tokens=10**9),
    )
    return engine, model


class Outputs:
    """Collects tokens by request and sample."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.first: list[str] = []

    def add(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            for token in output.tokens:
                key = (output.request_id, token.index)
                assert key not in self.reasons, "a finished sample goes on"
                if key not in self.tokens:
                    self.first.append(output.request_id)
                self.tokens.setdefault(key, []).append(token.token_id)
                if token.finish_reason is not None:
                    self.reasons[key] = token.finish_reason


def run(engine: Engine, outputs: Outputs | None = None, limit: int = 5000) -> Outputs:
    outputs = outputs or Outputs()
    for _ in range(limit):
        if not engine.has_unfinished():
            return outputs
        outputs.add(engine.step())
    raise AssertionError("no end in sight")


def assert_whole(engine: Engine) -> None:
    pools = [engine.pool]
    if engine.scheduler.swap_space is not None:
        pools.append(engine.scheduler.swap_space.pool)
    for pool in pools:
        assert pool.num_free == pool.num_blocks
        assert not any(pool.ref_count(block) for block in range(pool.num_blocks))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    if engine._speculator is not None:
        assert not engine._speculator._acceptances


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 8, "ignore_eos": True, **fields})  # type: ignore[arg-type]
