"""The synchronous core: token ids in, token ids out, one step at a time.

Queues requests, runs what the scheduler picks and deals out the tokens. Text, stop strings and
ranking are in output_processor.py; loading a model in loading.py.

Where the device works on while the host does other things, a step is scheduled and launched before
the tokens of the one before it are fetched. Until then they are placeholders: all that scheduling
needs to know is that they are there, and the device takes its input from its own last output. That
a sample has ended is seen one step late: the token that it drew meanwhile is dropped. Only tokens
that the host must know first (penalties count them, a grammar goes on from them, guesses follow
them, beam search compares what may be one) make the next step wait. The tokens are the same either
way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cuengine.admission import Limits
from cuengine.batch import Batch, PendingOutput, SamplerOutput, SamplingBatch
from cuengine.batch_builder import build_batch, build_sampling
from cuengine.beam_search import BeamSearch, Candidates, Result
from cuengine.block_pool import BlockPool
from cuengine.config import EngineConfig
from cuengine.counted import counted
from cuengine.engine_view import NUM_STEPS, EngineView, StepView
from cuengine.errors import RequestError
from cuengine.grammar import Grammar, GrammarCompiler
from cuengine.outputs import EngineOutput, Logprob, TokenLogprobs, TokenOutput
from cuengine.sampling_params import BeamSearchParams, RequestParams
from cuengine.scheduler import Chunk, Scheduler
from cuengine.sequence import Progress, Request, Sequence, SequenceStatus
from cuengine.speculation import Speculator
from cuengine.stats import EngineStats
from cuengine.swap_space import SwapSpace
from cuengine.viewing import view_engine, view_step

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer


class Runner(Protocol):
    """What model_runner.py has for the engine."""

    overlaps: bool

    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput: ...

    def range(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """What a model brings besides its weights.

    eos_token_ids  end a sample, unless it asks to ignore them
    """

    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    config: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    generation_defaults: GenerationDefaults | None = None


@dataclass(slots=True)
class _Launched:
    """A step that was given to the device.

    tokens_first  its tokens have to be here before another step can be scheduled
    """

    chunks: list[Chunk]
    output: PendingOutput
    tokens_first: bool


class Engine:
    """Not thread-safe: one thread calls it.

    max_model_len  tokens of prompt and output together; the pool holds at least as many
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        runner: Runner,
        *,
        num_blocks: int,
        max_model_len: int,
        swap_space: SwapSpace | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.runner = runner
        self.max_model_len = max_model_len
        self._limits = Limits(max_model_len, config.max_num_seqs, model.vocab_size)
        self._grammars = (
            None
            if model.tokenizer is None
            else GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        )
        self.pool = BlockPool(
            num_blocks, config.block_size, enable_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            swap_space=swap_space,
            drafts=speculator,
        )
        self._speculator = speculator
        self.before_launch: Callable[[list[Chunk]], None] | None = None
        """Called with what a step will run, before the device gets it."""
        self._requests: dict[str, Request] = {}
        self._in_flight: _Launched | None = None
        self._seeds = random.Random(config.seed)
        self._arrivals = 0
        self._num_steps = 0
        self._num_scheduled = 0
        self._generation_tokens = 0
        self._last_steps: deque[StepView] = deque(maxlen=NUM_STEPS)

    def check_request(self, prompt_token_ids: list[int], params: RequestParams) -> int:
        """max_tokens as it will be; raises RequestError for what can never be served."""
        return self._limits.check(prompt_token_ids, params)

    def compile_grammar(self, params: RequestParams) -> Grammar | None:
        """What add_request is to be given for a request with structured outputs; else None.

        It may take long, and may be called from any thread. Raises RequestError, with the place in
        `param`, for what cannot be followed, and where there is no tokenizer.
        """
        if isinstance(params, BeamSearchParams) or params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise RequestError(
                "structured_outputs: they need a tokenizer, and this engine runs without one "
                "(skip_tokenizer_init)",
                param="structured_outputs",
            )
        return self._grammars.compile(params.structured_outputs)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Queue a request. Lower priority values go first.

        grammar   from `compile_grammar`, which is called here where none is given
        progress  what it got from an engine that is gone; it goes on from there, and nothing of
                  that is reported again. (Beam search has none: it begins anew.)

        Raises RequestError for one that can never be served, or whose id is in use.
        """
        max_tokens = self.check_request(prompt_token_ids, params)
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use", param="request_id")
        beams = None
        if isinstance(params, BeamSearchParams):
            beams, params = params, params.sampling_params()
        if grammar is None:
            grammar = self.compile_grammar(params)
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self.model.eos_token_ids
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        beam_search = None
        if beams is not None:
            beam_search = BeamSearch(
                beams,
                max_tokens=max_tokens,
                ending_ids=frozenset(ending),
                vocab_size=self.model.vocab_size,
            )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival=self._arrivals,
            seed=seed,
            max_tokens=max_tokens,
            ending_ids=frozenset(ending),
            priority=priority,
            cache_salt=cache_salt,
            beam_search=beam_search,
        )
        self._arrivals += 1
        self._requests[request_id] = request
        if progress is None:
            self.scheduler.add(request)
        else:
            request.resume_from(progress)
            self.scheduler.resume(request, progress.outputs)
        if grammar is not None:
            for sequence in request.sequences:
                sequence.matcher = grammar.matcher()
                for token in sequence.token_ids[sequence.prompt_len :]:
                    sequence.matcher.consume(token)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks at once; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for sequence in request.sequences:
                self.scheduler.finish(sequence)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End one sample (its text hit a stop string) and free its blocks at once."""
        request = self._requests.get(request_id)
        if request is not None:
            self.scheduler.finish(request.sequences[index])
            if request.finished:
                del self._requests[request_id]

    def has_unfinished(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_unfinished()

    def step(self) -> list[EngineOutput]:
        """Run what the scheduler picks next and return new tokens: its own, or the last step's.

        If the runner raises, the requests of the steps concerned are aborted, and nothing is used
        again of what was cached: what is in the blocks is not known. The error is passed on.
        """
        with self.runner.range("step"):
            return self._step()

    def _step(self) -> list[EngineOutput]:
        before = self._in_flight
        if before is not None and before.tokens_first:
            self._in_flight = None
            return self._collect(before)
        launched = self._in_flight = self._launch()
        outputs = [] if before is None else self._collect(before)
        if launched is not None:
            self.scheduler.publish(launched.chunks)
            if before is None and launched.tokens_first:
                self._in_flight = None
                return self._collect(launched)
        return outputs

    @property
    def num_completed_steps(self) -> int:
        """Steps whose tokens are here; at most two more have been launched."""
        return self._num_steps - (self._in_flight is not None)

    def stats(self) -> EngineStats:
        scheduler, pool, speculator = self.scheduler, self.pool, self._speculator
        stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting) + len(scheduler.held),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_blocks - pool.num_free,
            num_cached_blocks=pool.num_cached,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_steps=self._num_steps,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self._generation_tokens,
            mean_batch=self._num_scheduled / max(1, self._num_steps),
        )
        if speculator is not None:
            stats.num_drafts = speculator.num_drafts
            stats.num_draft_tokens = speculator.num_draft_tokens
            stats.num_accepted_tokens = sum(speculator.accepted_per_pos)
            stats.num_accepted_tokens_per_pos = tuple(speculator.accepted_per_pos)
        return stats

    def view(self) -> EngineView:
        """What is to be seen of it between two steps, for people to look at."""
        return view_engine(
            self.scheduler,
            self._last_steps,
            self.stats(),
            speculative=self._speculator is not None,
        )

    def _launch(self) -> _Launched | None:
        """Give the next step to the device, if there is one."""
        runner = self.runner
        with runner.range("schedule"):
            step = self.scheduler.schedule()
        if not step.chunks:
            return None
        if self.before_launch is not None:
            self.before_launch(step.chunks)
        try:
            if self._speculator is not None:
                with runner.range("draft"):
                    self._speculator.propose(step)
            with runner.range("build"):
                batch, sampling = build_batch(step, self.config.block_size), build_sampling(step)
            output = runner.run(batch, sampling)
        except BaseException:
            self._abandon(step.chunks)
            raise
        self._last_steps.append(view_step(self._num_steps + 1, step.chunks))
        self.scheduler.launched(step)
        self._num_steps += 1
        self._num_scheduled += len(step.chunks)
        tokens_first = not runner.overlaps or any(
            chunk.num_samples and self._needs_tokens(chunk) for chunk in step.chunks
        )
        return _Launched(step.chunks, output, tokens_first)

    def _needs_tokens(self, chunk: Chunk) -> bool:
        """What a launched chunk draws has to be known before its sequence goes on."""
        sequence, request = chunk.sequence, chunk.sequence.request
        if chunk.num_drafts or request.penalized or sequence.matcher is not None:
            return True
        if request.beam_search is not None:
            return True
        if self._speculator is None:
            return False
        return self._speculator.limit(sequence, self.scheduler.num_running) > 0

    def _abandon(self, chunks: list[Chunk]) -> None:
        """A step failed: abort its requests, and trust no block that somebody might still find."""
        for chunk in chunks:
            request = chunk.sequence.request
            if self._requests.get(request.request_id) is request:
                self.abort(request.request_id)
        self.scheduler.forget_contents()

    def _collect(self, launched: _Launched) -> list[EngineOutput]:
        """Put a step's tokens into their places and report them."""
        try:
            with self.runner.range("copy-out"):
                results = _Results(launched.output.fetch())
        except BaseException:
            after, self._in_flight = self._in_flight, None
            self._abandon(launched.chunks + ([] if after is None else after.chunks))
            raise
        with self.runner.range("collect"):
            return self._deal_out(launched.chunks, results)

    def _deal_out(self, chunks: list[Chunk], results: _Results) -> list[EngineOutput]:
        outputs: dict[str, EngineOutput] = {}
        row = 0
        for chunk in chunks:
            request = chunk.sequence.request
            if chunk.num_prompt_rows:
                self._collect_prompt(chunk, results, row)
                row += chunk.num_prompt_rows
            if request.beam_search is not None:
                if chunk.num_samples and chunk.sequence.status is not SequenceStatus.FINISHED:
                    output = self._collect_beam(chunk.sequence, request.beam_search, results, row)
                    if output is not None:
                        outputs[request.request_id] = output
                row += chunk.num_samples
                continue
            # A sequence that was to draw several tokens has been forked since.
            samples = [chunk.sequence] if chunk.num_samples == 1 else request.sequences
            for sample in samples if chunk.num_samples else ():
                if sample.status is not SequenceStatus.FINISHED:
                    output = outputs.get(request.request_id)
                    if output is None:
                        output = self._new_output(chunk)
                        outputs[request.request_id] = output
                    if chunk.num_drafts:
                        output.tokens += self._verify(chunk, results, row)
                    else:
                        output.tokens.append(self._place(sample, chunk.end, results, row))
                row += 1
            row += chunk.num_drafts
        return list(outputs.values())

    def _verify(self, chunk: Chunk, results: _Results, row: int) -> list[TokenOutput]:
        """Take a chunk's guesses as far as they are right and the sample goes on, and one token."""
        assert self._speculator is not None
        sequence, first = chunk.sequence, chunk.known_end
        drawn = results.token_ids[row : row + chunk.num_drafts + 1]
        tokens = drawn[: self._speculator.accept(chunk, drawn) + 1]
        ends = (i for i, token in enumerate(tokens, 1) if token in sequence.request.ending_ids)
        tokens = tokens[: next(ends, len(tokens))]
        self.scheduler.settle(chunk, tokens)
        outputs: list[TokenOutput] = []
        for i in range(len(tokens)):
            outputs.append(self._place(sequence, first + i, results, row + i))
            if outputs[-1].finish_reason is not None:  # a grammar may be complete before
                break
        return outputs

    def _collect_beam(
        self, sequence: Sequence, search: BeamSearch, results: _Results, row: int
    ) -> EngineOutput | None:
        """Take what may follow a beam. The last to report lets all go on, or brings the results."""
        self._generation_tokens += 1
        candidates = results.candidates(row, search.num_candidates)
        if not search.report(sequence.index, candidates):
            return None
        request = sequence.request
        continuations = search.advance()
        self.scheduler.advance(request, continuations)
        if continuations:
            return None
        del self._requests[request.request_id]
        output = EngineOutput(request.request_id, num_cached_tokens=request.num_cached_tokens or 0)
        for index, result in enumerate(search.results):
            output.tokens += _result_tokens(index, result, request)
        return output

    def _new_output(self, chunk: Chunk) -> EngineOutput:
        request = chunk.sequence.request
        output = EngineOutput(request.request_id, num_cached_tokens=request.num_cached_tokens or 0)
        if chunk.known_end == chunk.sequence.prompt_len and request.prompt_logprobs:
            output.prompt_logprobs = request.prompt_logprobs
        return output

    def _collect_prompt(self, chunk: Chunk, results: _Results, row: int) -> None:
        """Log-probabilities of the tokens after the chunk's; once more after a preemption."""
        request, first = chunk.sequence.request, chunk.start + 1
        count = request.params.prompt_logprobs or 0
        request.prompt_logprobs[first : first + chunk.num_prompt_rows] = [
            results.logprobs(i, count) for i in range(row, row + chunk.num_prompt_rows)
        ]

    def _place(self, sequence: Sequence, position: int, results: _Results, row: int) -> TokenOutput:
        """Give a sequence the token at a position, and end it if that was its last."""
        request, token = sequence.request, results.token_ids[row]
        sequence.token_ids[position] = token
        self._generation_tokens += 1
        output = TokenOutput(sequence.index, token)
        params = request.params
        if params.logprobs is not None or params.num_samples > params.n:
            output.logprobs = results.logprobs(row, params.logprobs or 0)
        matcher = sequence.matcher
        ending = None if matcher is None else matcher.consume(token)
        if token in request.ending_ids and ending != "error":
            output.finish_reason = "stop"
            if token not in self.model.eos_token_ids or params.ignore_eos:
                output.stop_reason = token
        elif matcher is not None and ending is not None:
            output.finish_reason, output.complete = ending, matcher.complete
            if ending == "error":
                output.stop_reason = (
                    "The answer cannot be finished: after "
                    f"{counted(position + 1 - sequence.prompt_len, 'token')}, what it has to match "
                    f"cannot be followed any further: {matcher.problem}"
                )
        elif position + 1 == sequence.max_len:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self.finish_sequence(request.request_id, sequence.index)
        return output


def _result_tokens(index: int, result: Result, request: Request) -> list[TokenOutput]:
    """A text that beam search found, token by token."""
    count = request.params.logprobs
    tokens = [
        TokenOutput(index, at.token_id, None if count is None else at.token_logprobs(count))
        for at in result.hypothesis.tokens()
    ]
    last = tokens[-1]
    last.finish_reason = "stop" if last.token_id in request.ending_ids else "length"
    last.score = result.score
    return tokens


class _Results:
    """A SamplerOutput as Python values, converted at once: indexing arrays one by one is slow."""

    def __init__(self, sampled: SamplerOutput) -> None:
        self.token_ids: list[int] = sampled.token_ids.tolist()
        self._logprobs: list[float] = sampled.logprobs.tolist()
        self._ranks: list[int] = sampled.ranks.tolist()
        self._top_ids: list[list[int]] = sampled.top_ids.tolist()
        self._top_logprobs: list[list[float]] = sampled.top_logprobs.tolist()

    def candidates(self, row: int, count: int) -> Candidates:
        """The row's `count` most likely tokens, best first."""
        top = zip(self._top_ids[row][:count], self._top_logprobs[row][:count], strict=True)
        return list(top)

    def logprobs(self, row: int, count: int) -> TokenLogprobs:
        """The row's token first, then its `count` most likely ones."""
        entries = {self.token_ids[row]: Logprob(self._logprobs[row], self._ranks[row])}
        top = zip(self._top_ids[row][:count], self._top_logprobs[row][:count], strict=True)
        for rank, (token, logprob) in enumerate(top, 1):
            entries.setdefault(token, Logprob(logprob, rank))
        return entries
