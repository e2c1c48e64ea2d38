"""The synchronous core: token ids in, token ids out, one step at a time.

Admits requests, runs what the scheduler picks and deals out the tokens. Text, stop strings and
ranking are in output_processor.py; loading a model in loading.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cuengine.batch import Batch, PendingOutput, SamplerOutput, SamplingBatch
from cuengine.batch_builder import build_batch, build_sampling
from cuengine.block_pool import BlockPool
from cuengine.config import EngineConfig
from cuengine.errors import RequestError
from cuengine.outputs import FinishReason, Logprob, TokenLogprobs
from cuengine.sampling_params import SamplingParams
from cuengine.scheduler import Chunk, Scheduler, Step
from cuengine.sequence import Request, Sequence
from cuengine.stats import EngineStats

if TYPE_CHECKING:
    from cuengine.model.chat_template import ChatTemplate
    from cuengine.model.config import ModelConfig
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.model.tokenizer import Tokenizer


class Runner(Protocol):
    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput: ...


@dataclass(slots=True)
class TokenOutput:
    """One new token of one sample; logprobs where asked for (or needed to rank `best_of`)."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class EngineOutput:
    """One step's news of a request; prompt_logprobs with the first token only."""

    request_id: str
    tokens: list[TokenOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


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
    ) -> None:
        self.config = config
        self.model = model
        self.runner = runner
        self.max_model_len = max_model_len
        self.pool = BlockPool(
            num_blocks, config.block_size, enable_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._requests: dict[str, Request] = {}
        self._seeds = random.Random(config.seed)
        self._arrivals = 0
        self._num_steps = 0
        self._num_scheduled = 0
        self._generation_tokens = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Find, fetch and load the model, and size the KV cache.

        Raises ModelError and ConfigError.
        """
        from cuengine.loading import load_engine

        return load_engine(config)

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> int:
        """max_tokens as it will be; raises RequestError for what can never be served."""
        room = self.max_model_len - len(prompt_token_ids)
        if not prompt_token_ids:
            raise RequestError("The prompt is empty: give it at least one token", param="prompt")
        if room < 1:
            raise RequestError(
                f"The prompt does not fit: it has {len(prompt_token_ids)} tokens and this model's "
                f"context is {self.max_model_len}. Shorten it to at most {self.max_model_len - 1}.",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"max_tokens={params.max_tokens} does not fit: the prompt has "
                f"{len(prompt_token_ids)} tokens and this model's context is {self.max_model_len}. "
                f"Ask for at most {room}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} does not fit: the prompt leaves room for {room} "
                f"tokens in this model's context of {self.max_model_len}.",
                param="min_tokens",
                code="context_length_exceeded",
            )
        if params.num_samples > self.config.max_num_seqs:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name}={params.num_samples} is more than this engine runs at once: "
                f"ask for at most {self.config.max_num_seqs} (max_num_seqs)",
                param=name,
            )
        self._check_ids("prompt", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.logit_bias))
        return room if params.max_tokens is None else params.max_tokens

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request. Lower priority values go first.

        Raises RequestError for one that can never be served, or whose id is in use.
        """
        max_tokens = self.check_request(prompt_token_ids, params)
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use", param="request_id")
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self.model.eos_token_ids
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
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
        )
        self._arrivals += 1
        self._requests[request_id] = request
        self.scheduler.add(request)

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
        return self.scheduler.has_unfinished()

    def step(self) -> list[EngineOutput]:
        """Run what the scheduler picks next and return the new tokens.

        If the runner raises, the requests of the step are aborted: what is in their blocks is not
        known. The error is passed on.
        """
        step = self.scheduler.schedule()
        if not step.chunks:
            return []
        try:
            batch = build_batch(step, self.config.block_size)
            sampled = self.runner.run(batch, build_sampling(step)).fetch()
        except BaseException:
            for chunk in step.chunks:
                self.abort(chunk.sequence.request.request_id)
            raise
        self._num_steps += 1
        self._num_scheduled += len(step.chunks)
        return self._collect(step, sampled)

    def stats(self) -> EngineStats:
        scheduler, pool = self.scheduler, self.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_blocks - pool.num_free,
            num_cached_blocks=pool.num_cached,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self._generation_tokens,
            mean_batch=self._num_scheduled / max(1, self._num_steps),
        )

    def _check_ids(self, name: str, ids: list[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.model.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.model.vocab_size)
            raise RequestError(
                f"{name}: token id {wrong} is not in this model's vocabulary, "
                f"0 to {self.model.vocab_size - 1}",
                param=name,
            )

    def _collect(self, step: Step, sampled: SamplerOutput) -> list[EngineOutput]:
        """Append the sampled tokens to their sequences and report them."""
        results = _Results(sampled)
        outputs: dict[str, EngineOutput] = {}
        row = 0
        for chunk in step.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            self.scheduler.computed(chunk)
            if request.wants_prompt_logprobs:
                self._collect_prompt(chunk, results, row)
            row += chunk.num_prompt_rows
            if not chunk.num_samples:
                continue
            output = outputs.get(request.request_id)
            if output is None:
                output = EngineOutput(
                    request.request_id, num_cached_tokens=request.num_cached_tokens or 0
                )
                outputs[request.request_id] = output
            if sequence.num_output == 0 and request.prompt_logprobs:
                output.prompt_logprobs = request.prompt_logprobs
            samples = self.scheduler.fork(sequence) if sequence.width > 1 else [sequence]
            for sample in samples:
                output.tokens.append(self._append(sample, results, row))
                row += 1
            if request.finished:
                del self._requests[request.request_id]
        return list(outputs.values())

    def _collect_prompt(self, chunk: Chunk, results: _Results, row: int) -> None:
        request = chunk.sequence.request
        if chunk.start == 0:
            request.prompt_logprobs.append(None)
        count = request.params.prompt_logprobs or 0
        for i in range(row, row + chunk.num_prompt_rows):
            request.prompt_logprobs.append(results.logprobs(i, count))

    def _append(self, sequence: Sequence, results: _Results, row: int) -> TokenOutput:
        """Give a sequence its next token, and end it if that was its last."""
        request, token = sequence.request, results.token_ids[row]
        sequence.token_ids.append(token)
        self._generation_tokens += 1
        output = TokenOutput(sequence.index, token)
        params = request.params
        if params.logprobs is not None or params.num_samples > params.n:
            output.logprobs = results.logprobs(row, params.logprobs or 0)
        if token in request.ending_ids:
            output.finish_reason = "stop"
            if token not in self.model.eos_token_ids or params.ignore_eos:
                output.stop_reason = token
        elif sequence.num_output >= request.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self.scheduler.finish(sequence)
        return output


class _Results:
    """A SamplerOutput as Python values, converted at once: indexing arrays one by one is slow."""

    def __init__(self, sampled: SamplerOutput) -> None:
        self.token_ids: list[int] = sampled.token_ids.tolist()
        self._logprobs: list[float] = sampled.logprobs.tolist()
        self._ranks: list[int] = sampled.ranks.tolist()
        self._top_ids: list[list[int]] = sampled.top_ids.tolist()
        self._top_logprobs: list[list[float]] = sampled.top_logprobs.tolist()

    def logprobs(self, row: int, count: int) -> TokenLogprobs:
        """The row's token first, then its `count` most likely ones."""
        entries = {self.token_ids[row]: Logprob(self._logprobs[row], self._ranks[row])}
        top = zip(self._top_ids[row][:count], self._top_logprobs[row][:count], strict=True)
        for rank, (token, logprob) in enumerate(top, 1):
            entries.setdefault(token, Logprob(logprob, rank))
        return entries
