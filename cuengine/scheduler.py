"""Which tokens run in the next step, and who has to give its blocks back.

Iteration-level scheduling (Yu et al., "Orca", OSDI 2022) over paged blocks (Kwon et al., SOSP
2023), with prompts split into chunks that share steps with decodes (Agrawal et al.,
"Sarathi-Serve", OSDI 2024). Nothing here knows a model: turning a step into arrays is in
batch_builder.py, what becomes of the sampled tokens in engine.py.

Why every request ends: sequences are strictly ordered (priority, arrival, sample). Only the last in
this order is ever preempted, so the first one always advances, and the pool holds at least one
sequence of full length. A preempted sequence keeps its place in the order, swapped out or not, and
nobody overtakes the head of the waiting queue; so it resumes before any request of its priority is
admitted that came later.

A beam that has computed its tokens is parked until all beams of its search have; it can give its
blocks to anybody, as it has nothing to do. It does so for a decode that is the last in line and
would have to give way itself, and for the head of the queue where nobody else runs. Then it is
held: out of the queue, not to be admitted before the search goes on. So the first runnable sequence
advances in every step, a search has fewer beams to wait for with each one that got through, and
needs no more than one sequence of full length at a time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Protocol

from cuengine.beam_search import Continuation
from cuengine.block_pool import BlockPool
from cuengine.block_table import BlockTable
from cuengine.sequence import UNKNOWN_TOKEN, Request, Sequence, SequenceStatus
from cuengine.swap_space import SwapSpace


@dataclass(slots=True)
class Chunk:
    """Tokens start:end of a sequence, to run in this step.

    num_prompt_rows  rows that report log-probabilities of prompt tokens: those after the chunk's
                     first tokens
    num_samples      tokens to draw after the chunk's last token; 0 in the middle of a prompt, more
                     than one where the prompt ends and a request wants several samples
    num_drafts       tokens at the chunk's end that are guessed: a token is drawn after each of
                     them, too, and shows whether the next guess is right
    draft_ids        int32, tokens after the sequence's own, for as much of the chunk as is guessed
    """

    sequence: Sequence
    start: int
    end: int
    num_prompt_rows: int
    num_samples: int
    num_drafts: int = 0
    draft_ids: array[int] = field(default_factory=lambda: array("i"))

    @property
    def known_end(self) -> int:
        """Where the chunk's guesses begin, if it ends with any; else its end."""
        return self.end - self.num_drafts

    @property
    def num_rows(self) -> int:
        """Of logits; those that tokens are drawn from come last."""
        return self.num_prompt_rows + self.num_samples + self.num_drafts


@dataclass(slots=True)
class Step:
    """What runs next, and the blocks to copy before the forward pass.

    swap_outs     (device, host) blocks, first of all
    block_copies  (from, to) blocks, then
    swap_ins      (host, device) blocks, last

    Each list may be copied at once: no block is the target of one copy and in another. For who
    shares a partly full block are samples of one request, or beams with one parent, neighbours in
    order; a step that preempts the last of them has nothing left to run that comes after, and so
    could claim the block. (Parked beams share none: what they last wrote is in a block of their
    own.) A step that swaps out admits nobody, but runs something: it has no swap_ins, and the
    copies are made.
    """

    chunks: list[Chunk] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)


class Drafts(Protocol):
    """What speculation.py has for the scheduler."""

    def wanted(self, sequence: Sequence, most: int, load: int) -> int:
        """Tokens to guess for a sequence whose next step is a decode; load: samples that run."""
        ...

    def num_reusable(self, sequence: Sequence) -> int:
        """Tokens, from the first on, that are computed in every cache that a block is for."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        ...


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Scheduler:
    """Waiting and running sequences, both in order.

    Blocks for a prompt are claimed whole on admission, those for output one by one as it appears;
    so only decodes can run out of blocks. Guessed tokens get what room a step leaves, in tokens and
    in blocks, and keep it for this step only; so they never cost anybody's place.

    The caller goes on: `schedule`, give the step to the device, `launched`; and once the tokens of
    the step before are in their places, `publish`. A chunk with guesses is settled by `settle`
    before anything else is scheduled.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        swap_space: SwapSpace | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.pool = pool
        self.drafts = drafts
        self.swap_space = swap_space
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        """Parked beams that were preempted."""
        self.num_running = 0
        """Samples that running sequences stand for."""
        self.num_preemptions = 0
        self.num_swaps = 0
        """Preemptions that kept what was computed, in host memory."""
        self.prompt_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, request: Request) -> None:
        sequence = Sequence(request, 0, BlockTable(self.pool))
        request.sequences.append(sequence)
        insort(self.waiting, sequence, key=_order)

    def resume(self, request: Request, outputs: list[list[int] | None]) -> None:
        """Add a request whose samples have tokens already; None: the sample has ended.

        They are as after a preemption, each on its own.
        """
        for index, output in enumerate(outputs):
            sequence = Sequence(request, index, BlockTable(self.pool))
            sequence.width = 1
            request.sequences.append(sequence)
            if output is None:
                sequence.status = SequenceStatus.FINISHED
            else:
                sequence.token_ids.extend(output)
                insort(self.waiting, sequence, key=_order)

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Step:
        """Running decodes first, then running prompts, then admissions while there is room."""
        step = Step()
        budget = self.max_num_batched_tokens
        preemptions = self.num_preemptions
        for sequence in tuple(self.running):
            length = len(sequence.token_ids)
            # One that has all its tokens waits only for the last to reach the host.
            if length - sequence.num_computed == 1 and length < sequence.max_len and budget:
                budget -= self._decode(sequence, step)
        for sequence in self.running:
            if budget and len(sequence.token_ids) - sequence.num_computed > 1:
                budget -= self._prefill(sequence, budget, step)
        # After a preemption the blocks are for those who run; admitting now would thrash.
        admitting = self.num_preemptions == preemptions
        while admitting and budget and self.waiting:
            sequence = self.waiting[0]
            if self._admit(sequence, step):
                budget -= self._prefill(sequence, budget, step)
            elif step.chunks or not self._hold_last():
                break
        if self.drafts is not None:
            for chunk in step.chunks:
                budget -= self._guess(chunk, budget, self.drafts)
        return step

    def launched(self, step: Step) -> None:
        """The device has the step: all of it counts as computed, and what it draws as there.

        A sequence whose prompt is through is split into its samples, which run from now on.
        Guessed tokens do not count.
        """
        row = 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.known_end
            row += chunk.num_prompt_rows
            if sequence.request.beam_search is not None:
                row += chunk.num_samples
            elif chunk.num_samples:
                for sample in self._fork(sequence) if sequence.width > 1 else (sequence,):
                    sample.token_ids.append(UNKNOWN_TOKEN)
                    sample.last_row = row
                    row += 1
                row += chunk.num_drafts

    def settle(self, chunk: Chunk, token_ids: list[int]) -> None:
        """Take a chunk's guesses, as far as they are right, and the token after them as drawn.

        The slots of the others are given back.
        """
        sequence, first = chunk.sequence, chunk.known_end
        sequence.token_ids[first:] = array("i", token_ids)
        sequence.num_computed = first + len(token_ids) - 1
        sequence.table.shrink(sequence.num_computed)
        self.publish([chunk])

    def publish(self, chunks: list[Chunk]) -> None:
        """Let later steps find the full blocks of launched chunks, whose tokens are all known."""
        pool, size = self.pool, self.pool.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            computed = sequence.num_computed
            if self.drafts is not None:
                computed = min(computed, self.drafts.num_reusable(sequence))
            last = computed // size
            if sequence.num_registered < last and sequence.status is SequenceStatus.RUNNING:
                if pool.enable_caching:
                    hashes = sequence.block_hashes(last, size)
                    for i in range(sequence.num_registered, last):
                        pool.register(sequence.table.blocks[i], hashes[i])
                sequence.num_registered = last

    def forget_contents(self) -> None:
        """Use nothing again that blocks hold which no running sequence owns."""
        self.pool.forget()
        for sequence in self.waiting + self.held:
            sequence.num_computed = 0
            self._release_host_blocks(sequence)

    def advance(self, request: Request, continuations: list[Continuation]) -> None:
        """Replace the beams of a request, all parked or held, by those that they go on as.

        One that goes on in several ways is forked, one that does not gives its blocks back. The new
        ones run if their parent did, as far as `max_num_seqs` allows.
        """
        parents = request.sequences
        surviving = {continuation.parent for continuation in continuations}
        for position, parent in enumerate(parents):
            if position not in surviving:
                self.finish(parent)
            elif parent.status is SequenceStatus.RUNNING:
                self._leave_running(parent)
            else:
                self.held.remove(parent)
        beams: list[Sequence] = []
        for index, continuation in enumerate(continuations):
            beam = parents[continuation.parent]
            if continuation.parent in surviving:
                surviving.remove(continuation.parent)
            else:
                beam = self._fork_beam(beam, index)
            beams.append(beam)
        for index, (beam, continuation) in enumerate(zip(beams, continuations, strict=True)):
            beam.renumber(index)
            beam.width = 1
            beam.token_ids.append(continuation.token_id)
            self._enter(beam)
        request.sequences = beams

    def _fork_beam(self, beam: Sequence, index: int) -> Sequence:
        other = beam.fork(index)
        if self.swap_space is not None:
            other.host_blocks = self.swap_space.share(beam.host_blocks)
        return other

    def _enter(self, beam: Sequence) -> None:
        """Let a beam with a new token run, or wait until it can."""
        if beam.status is SequenceStatus.RUNNING and self.num_running < self.max_num_seqs:
            insort(self.running, beam, key=_order)
            self.num_running += 1
            return
        if beam.status is SequenceStatus.RUNNING:
            beam.table.free()
            beam.num_computed = 0
        beam.status = SequenceStatus.WAITING
        insort(self.waiting, beam, key=_order)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        siblings = [sequence.fork(index) for index in range(1, sequence.width)]
        sequence.width = 1
        for sibling in siblings:
            insort(self.running, sibling, key=_order)
        sequence.request.sequences.extend(siblings)
        return sequence.request.sequences

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever it is doing, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            del self.waiting[bisect_left(self.waiting, sequence.order, key=_order)]
            self._release_host_blocks(sequence)
        elif sequence.status is SequenceStatus.HELD:
            self.held.remove(sequence)
            self._release_host_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED
        if self.drafts is not None:
            self.drafts.forget(sequence)

    def _decode(self, sequence: Sequence, step: Step) -> int:
        """Schedule one token, preempting from the end of the line for its block."""
        table, length = sequence.table, len(sequence.token_ids)
        while sequence.status is SequenceStatus.RUNNING:
            if self.pool.num_free >= table.blocks_needed(length):
                copy = table.grow(length)
                if copy is not None:
                    step.block_copies.append(copy)
                return self._prefill(sequence, 1, step)
            if any(len(other.token_ids) == other.max_len for other in self.running):
                return 0  # Blocks come free as soon as that one's last token is here.
            # Decodes are taken in order, so the last in line has no chunk in this step yet.
            last = self.running[-1]
            if last is sequence:
                last = next((other for other in reversed(self.running) if other.is_parked), last)
            self._preempt(last, step)
        return 0

    def _prefill(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Schedule the next tokens of a sequence that owns blocks for all it has."""
        start, known = sequence.num_computed, len(sequence.token_ids)
        end = min(start + budget, known)
        rows = 0
        if sequence.request.wants_prompt_logprobs:
            rows = max(0, min(end, sequence.prompt_len - 1) - start)
        width = 1 if sequence.request.beam_search is not None else sequence.width
        step.chunks.append(Chunk(sequence, start, end, rows, width if end == known else 0))
        return end - start

    def _guess(self, chunk: Chunk, budget: int, drafts: Drafts) -> int:
        """Lengthen a decode's chunk by tokens to guess, where there is room; returns how many."""
        sequence, known = chunk.sequence, chunk.end
        if chunk.num_samples != 1 or known - chunk.start != 1 or chunk.num_prompt_rows:
            return 0
        if sequence.request.beam_search is not None:
            return 0
        # The last token needs no guess: it is drawn after them.
        most = min(budget, sequence.max_len - known - 1)
        while most > 0 and self.pool.num_free < sequence.table.blocks_needed(known + most):
            most -= 1
        count = drafts.wanted(sequence, most, self.num_running) if most > 0 else 0
        if count:
            copy = sequence.table.grow(known + count)
            assert copy is None, "a decode's last block is its own"
            chunk.num_drafts = count
            chunk.end += count
        return count

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Start the first in the waiting queue, if its blocks and its samples fit.

        What it had computed comes back from host memory, as far as the prefix cache has it not.
        """
        if self.num_running + sequence.width > self.max_num_seqs:
            return False
        if self._prompt_is_on_its_way(sequence):
            return False
        pool, table, request = self.pool, sequence.table, sequence.request
        length = len(sequence.token_ids)
        cached = self._cached_prefix(sequence)
        needed = -(-length // pool.block_size) - len(cached)
        revived = sum(pool.ref_count(block) == 0 for block in cached)
        # One block for each running sequence stays free, so that this one isn't preempted at once.
        if pool.num_free - revived - needed < len(self.running):
            return False
        table.adopt(cached)
        table.grow(length)
        sequence.num_computed = max(sequence.num_computed, len(cached) * pool.block_size)
        sequence.num_registered = len(cached)
        if sequence.num_mirrored is not None:
            sequence.num_mirrored = max(sequence.num_mirrored, len(cached) * pool.block_size)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.num_computed
            self.prompt_tokens += length
            if pool.enable_caching and not request.wants_prompt_logprobs:
                self.prefix_queries += length
                self.prefix_hits += sequence.num_computed
        first = len(cached)
        step.swap_ins.extend(zip(sequence.host_blocks[first:], table.blocks[first:], strict=False))
        self._release_host_blocks(sequence)
        del self.waiting[0]
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)
        self.num_running += sequence.width
        return True

    def _prompt_is_on_its_way(self, sequence: Sequence) -> bool:
        """Another sample of its request is to put their prompt into the cache, after a preemption.

        Who waits for that shares the prompt's blocks; admitted now, it would compute its own.
        """
        full_blocks = sequence.prompt_len // self.pool.block_size
        return self.pool.enable_caching and any(
            sample.status is SequenceStatus.RUNNING and sample.num_registered < full_blocks
            for sample in sequence.request.sequences
        )

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks in the cache that hold the sequence's beginning; at least one token must run."""
        if not self.pool.enable_caching or sequence.request.wants_prompt_logprobs:
            return []
        size = self.pool.block_size
        count = (len(sequence.token_ids) - 1) // size
        blocks: list[int] = []
        for digest in sequence.block_hashes(count, size)[:count]:
            block = self.pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Back to the queue, with what it has computed moved to host memory where that pays.

        If not, it is computed again; its full blocks stay cached while they can.
        """
        is_parked = sequence.is_parked
        if not self._swap_out(sequence, step):
            sequence.num_computed = 0
        self._take_blocks(sequence, is_parked=is_parked)

    def _hold_last(self) -> bool:
        """Take the blocks of the last in line, if only parked beams run; false: others do, or none.

        The step may be the head of the queue's, and have swap_ins: nothing is swapped out.
        """
        if not self.running or not all(sequence.is_parked for sequence in self.running):
            return False
        last = self.running[-1]
        last.num_computed = 0
        self._take_blocks(last, is_parked=True)
        return True

    def _take_blocks(self, sequence: Sequence, *, is_parked: bool) -> None:
        self.num_preemptions += 1
        self._stop_running(sequence)
        if is_parked:
            sequence.status = SequenceStatus.HELD
            self.held.append(sequence)
        else:
            sequence.status = SequenceStatus.WAITING
            insort(self.waiting, sequence, key=_order)

    def _swap_out(self, sequence: Sequence, step: Step) -> bool:
        """Have the blocks with computed tokens copied to host memory, unless that costs more."""
        if self.swap_space is None:
            return False
        size = self.pool.block_size
        blocks = sequence.table.blocks[: -(-sequence.num_computed // size)]
        # Blocks that others own too will hardly have to be computed again.
        shared = sum(self.pool.ref_count(block) > 1 for block in blocks)
        if not self.swap_space.pays(len(blocks), sequence.num_computed - shared * size):
            return False
        sequence.host_blocks = self.swap_space.claim(len(blocks))
        step.swap_outs.extend(zip(blocks, sequence.host_blocks, strict=True))
        self.num_swaps += 1
        return True

    def _release_host_blocks(self, sequence: Sequence) -> None:
        if self.swap_space is not None:
            self.swap_space.release(sequence.host_blocks)
            sequence.host_blocks = []

    def _stop_running(self, sequence: Sequence) -> None:
        self._leave_running(sequence)
        sequence.table.free()

    def _leave_running(self, sequence: Sequence) -> None:
        del self.running[bisect_left(self.running, sequence.order, key=_order)]
        self.num_running -= sequence.width
