"""Drafts by a smaller model with the same vocabulary.

It draws each token as the model that is served would, with the same noise, so the two agree often.
Its keys and values are in a cache of its own, but in the same blocks at the same slots: one block
table serves both, whatever is copied or swapped in the one cache is in the other, and a block that
the prefix cache finds holds both models' halves.

It may lag behind: a sequence that guesses nothing for a while is caught up block by block, in one
pass for many tokens. What it has not computed yet, the prefix cache is not told of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from cuengine.batch import Batch, PendingOutput, SamplingBatch
from cuengine.batch_builder import build_batch, build_sampling
from cuengine.scheduler import Chunk, Step
from cuengine.sequence import UNKNOWN_TOKEN, Sequence


class DraftRunner(Protocol):
    """A ModelRunner with the draft model, whose cache has as many blocks as the other."""

    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput: ...


class DraftModelProposer:
    """Implements `Proposer`.

    max_tokens  in one pass of the draft model
    cost        of a pass of it, in passes of the model that is served
    """

    def __init__(
        self, runner: DraftRunner, *, block_size: int, max_tokens: int, cost: float
    ) -> None:
        self.cost = cost
        self._runner = runner
        self._block_size = block_size
        self._max_tokens = max_tokens

    def prepare(self, sequence: Sequence, count: int) -> int:
        return count

    def num_reusable(self, sequence: Sequence) -> int:
        return sequence.num_mirrored or 0

    def forget(self, sequence: Sequence) -> None:
        return

    def propose(self, step: Step) -> None:
        """Run the step's known tokens, as far as they are due, and draw after them, one by one."""
        drafting = [chunk for chunk in step.chunks if chunk.num_drafts]
        for part in self._catch_up(step):
            self._draw(part)
        for ahead in range(1, max((chunk.num_drafts for chunk in drafting), default=0)):
            part = Step()
            for chunk in drafting:
                if ahead < chunk.num_drafts:
                    end = chunk.known_end + ahead
                    part.chunks.append(
                        Chunk(chunk.sequence, end - 1, end, 0, 1, draft_ids=chunk.draft_ids)
                    )
                    chunk.sequence.num_mirrored = end
            self._draw(part)

    def _catch_up(self, step: Step) -> Iterator[Step]:
        """Passes that compute what is due, with the blocks that move in the first of them.

        Due is what a guess follows, what samples are about to share, and whole blocks of the rest.
        """
        part = Step(
            swap_outs=step.swap_outs, block_copies=step.block_copies, swap_ins=step.swap_ins
        )
        room = self._max_tokens
        for chunk in step.chunks:
            start, end = self._missing(chunk)
            due = chunk.num_drafts or chunk.num_samples > 1 or end - start >= self._block_size
            while due and start < end:
                if room == 0:
                    yield part
                    part, room = Step(), self._max_tokens
                stop = min(end, start + room)
                draws = int(stop == end and chunk.num_drafts > 0)
                part.chunks.append(
                    Chunk(chunk.sequence, start, stop, 0, draws, draft_ids=chunk.draft_ids)
                )
                room -= stop - start
                start = stop
            chunk.sequence.num_mirrored = start
        if part != Step():
            yield part

    def _missing(self, chunk: Chunk) -> tuple[int, int]:
        """start, end of the known tokens that it has not computed. A guess that was wrong is one.

        A sequence begins with blocks of the prefix cache: up to there nothing is missing. Nor is
        what beams have after the prompt: nobody guesses for them, and they share blocks anywhere.
        """
        sequence, end = chunk.sequence, chunk.known_end
        if sequence.request.beam_search is not None:
            end = min(end, sequence.prompt_len)
        mirrored = sequence.num_mirrored
        start = chunk.start if mirrored is None else min(mirrored, chunk.start)
        while end > start and sequence.token_ids[end - 1] == UNKNOWN_TOKEN:
            end -= 1
        return start, end

    def _draw(self, part: Step) -> None:
        """Run a pass; what it draws is put behind the guesses that there are."""
        sampling = build_sampling(part)
        sampling = replace(sampling, num_logprobs=np.full_like(sampling.num_logprobs, -1))
        output = self._runner.run(build_batch(part, self._block_size), sampling).fetch()
        drawing = (chunk for chunk in part.chunks if chunk.num_samples)
        for chunk, token in zip(drawing, output.token_ids.tolist(), strict=True):
            chunk.draft_ids.append(token)
