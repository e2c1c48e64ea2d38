"""Token outputs of the engine -> what a caller sees: text, stop strings, log-probabilities.

The engine knows no text. A sample whose text hits a stop string is ended here, and the engine told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cuengine.detokenizer import Detokenizer, DetokenizerSource
from cuengine.errors import RequestError
from cuengine.outputs import (
    EngineOutput,
    FinishReason,
    RequestDelta,
    SequenceDelta,
    TokenLogprobs,
    TokenOutput,
)
from cuengine.sampling_params import BeamSearchParams, RequestParams, SamplingParams


class TokenText(DetokenizerSource, Protocol):
    """What is needed of a tokenizer."""

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class _Sample:
    """One sample; texts and tokens are kept only for requests ranked by `best_of`."""

    detokenizer: Detokenizer | None
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    held: list[SequenceDelta] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[_Sample]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def ranked(self) -> bool:
        return self.params.num_samples > self.params.n

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)


class OutputProcessor:
    """Keeps the text side of every request that runs.

    finish_sequence  the engine's, called at once for a sample that hit a stop string
    """

    def __init__(
        self, tokenizer: TokenText | None, finish_sequence: Callable[[str, int], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._finish_sequence = finish_sequence
        self._states: dict[str, _State] = {}

    def check_request(self, params: RequestParams) -> None:
        """Raises RequestError for what needs a tokenizer where there is none."""
        if isinstance(params, SamplingParams) and params.stop and self._tokenizer is None:
            raise RequestError(
                "stop: stop strings need a tokenizer, and this engine runs without one "
                "(skip_tokenizer_init). Use stop_token_ids.",
                param="stop",
            )

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: RequestParams
    ) -> None:
        if isinstance(params, BeamSearchParams):
            params = params.sampling_params()
        samples = [
            _Sample(self._detokenizer(prompt_token_ids, params)) for _ in range(params.num_samples)
        ]
        self._states[request_id] = _State(prompt_token_ids, params, samples)

    def process(self, outputs: list[EngineOutput]) -> list[RequestDelta]:
        """One delta per request that has news for its caller."""
        deltas = (self._process(output) for output in outputs)
        return [delta for delta in deltas if delta is not None]

    def abort(self, request_id: str) -> RequestDelta | None:
        """The last delta of a request that was aborted; None for one that is over or unknown.

        Text that was held back because it might have become a stop string is in it. (Of samples
        that `best_of` was to rank nothing is: no ranking is known.)
        """
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        logprobs: list[TokenLogprobs] | None = None if state.params.logprobs is None else []
        if state.ranked:
            texts = dict.fromkeys(range(state.params.n), "")
        else:
            texts = {
                i: sample.detokenizer.flush() if sample.detokenizer is not None else ""
                for i, sample in enumerate(state.samples)
                if sample.finish_reason is None
            }
        deltas = [
            SequenceDelta(i, text, [], logprobs, finish_reason="abort") for i, text in texts.items()
        ]
        return self._delta(request_id, state, deltas, finished=True)

    def _detokenizer(
        self, prompt_token_ids: list[int], params: SamplingParams
    ) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _process(self, output: EngineOutput) -> RequestDelta | None:
        state = self._states.get(output.request_id)
        if state is None:
            return None
        state.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = output.prompt_logprobs
            for entry in output.prompt_logprobs:
                self._name_tokens(entry)
        deltas = self._push_all(output.request_id, state, output.tokens)
        finished = state.finished
        if finished:
            del self._states[output.request_id]
        if state.ranked:
            for delta in deltas:
                state.samples[delta.index].held.append(delta)
            if not finished:
                return None
            deltas = _best(state)
        return self._delta(output.request_id, state, deltas, finished=finished)

    def _push_all(
        self, request_id: str, state: _State, tokens: list[TokenOutput]
    ) -> list[SequenceDelta]:
        """One delta per sample. What a step drew after a stop string is nobody's."""
        deltas: dict[int, SequenceDelta] = {}
        for token in tokens:
            if state.samples[token.index].finish_reason is not None:
                continue
            news = self._push(request_id, state, token)
            delta = deltas.setdefault(token.index, news)
            if delta is not news:
                delta.text += news.text
                delta.token_ids += news.token_ids
                if delta.logprobs is not None and news.logprobs is not None:
                    delta.logprobs += news.logprobs
                delta.finish_reason, delta.stop_reason = news.finish_reason, news.stop_reason
                delta.score = news.score
        return list(deltas.values())

    def _push(self, request_id: str, state: _State, token: TokenOutput) -> SequenceDelta:
        sample, params = state.samples[token.index], state.params
        delta = SequenceDelta(
            token.index,
            "",
            [token.token_id],
            finish_reason=token.finish_reason,
            stop_reason=token.stop_reason,
            score=token.score,
        )
        sample.num_tokens += 1
        if token.logprobs is not None:
            sample.cumulative_logprob += token.logprobs[token.token_id].logprob
            if params.logprobs is not None:
                self._name_tokens(token.logprobs)
                delta.logprobs = [token.logprobs]
        detokenizer = sample.detokenizer
        if detokenizer is not None:
            # The token that ends a sample is no part of its text, unless asked for; the last one
            # of a grammar is.
            hidden = token.finish_reason == "stop" and not token.complete
            if not hidden or params.include_stop_str_in_output:
                delta.text = detokenizer.push(token.token_id)
            if token.finish_reason is not None and detokenizer.stop_reason is None:
                delta.text += detokenizer.flush()
            if detokenizer.stop_reason is not None:
                if token.finish_reason is None:
                    self._finish_sequence(request_id, token.index)
                delta.finish_reason, delta.stop_reason = "stop", detokenizer.stop_reason
        sample.finish_reason = delta.finish_reason
        return delta

    def _name_tokens(self, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None and self._tokenizer is not None:
            for token_id, entry in logprobs.items():
                entry.decoded_token = self._tokenizer.token_text(token_id)

    def _delta(
        self, request_id: str, state: _State, deltas: list[SequenceDelta], *, finished: bool
    ) -> RequestDelta:
        prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, None
        return RequestDelta(
            request_id,
            state.prompt_token_ids,
            deltas,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
        )


def _best(state: _State) -> list[SequenceDelta]:
    """The n samples with the best mean log-probability, each as one delta, renumbered by rank."""
    ranking = sorted(state.samples, key=lambda s: s.cumulative_logprob / s.num_tokens, reverse=True)
    deltas = []
    for index, sample in enumerate(ranking[: state.params.n]):
        parts = sample.held
        logprobs = None
        if state.params.logprobs is not None:
            logprobs = [entry for part in parts for entry in part.logprobs or []]
        deltas.append(
            SequenceDelta(
                index,
                "".join(part.text for part in parts),
                [token for part in parts for token in part.token_ids],
                logprobs,
                parts[-1].finish_reason,
                parts[-1].stop_reason,
            )
        )
    return deltas
