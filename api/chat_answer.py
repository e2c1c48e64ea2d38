"""The shape of a chat completion: deltas of the engine to chunks, results to the whole answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from cuengine.api.errors import ApiError
from cuengine.api.generation import (
    PromptResult,
    Sample,
    UsageCounter,
    floored,
    prompt_logprobs_shape,
    top_entries,
)
from cuengine.api.protocol import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Delta,
    FinishReason,
    FunctionDelta,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from cuengine.api.streaming import DONE, end_of_stream, event
from cuengine.api.tokens import TokenNames
from cuengine.api.tool_calls import CallStart, Piece, Text, ToolCallParser
from cuengine.outputs import RequestDelta, SequenceDelta, TokenLogprobs


@dataclass(slots=True)
class ChatAnswerer:
    """Shapes deltas into chunks, or a result into the whole answer.

    new_parser  makes what finds tool calls in one sample's text; None where there are no tools
    """

    id: str
    created: int
    model: str
    body: ChatRequest
    names: TokenNames
    new_parser: Callable[[], ToolCallParser] | None = None
    usage: UsageCounter = field(default_factory=UsageCounter)
    started: set[int] = field(default_factory=set)
    parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def chunks(self, _prompt_index: int, delta: RequestDelta) -> bytes:
        """The events of one engine step: one per sample that has news."""
        self.usage.add(0, delta)
        events = []
        for sequence in delta.sequences:
            if sequence.index not in self.started:
                ids = delta.prompt_token_ids if self.body.return_token_ids else UNSET
                role = ChatChunkChoice(sequence.index, Delta(role="assistant", content=""))
                events.append(self._event([role], prompt_token_ids=ids))
                self.started.add(sequence.index)
            choice = self._chunk_choice(sequence)
            if choice is not None:
                events.append(self._event([choice]))
        return b"".join(events)

    def _chunk_choice(self, sequence: SequenceDelta) -> ChatChunkChoice | None:
        reason: FinishReason | None = sequence.finish_reason
        finished = reason is not None
        if self.new_parser is None:
            delta = Delta(content=sequence.text) if sequence.text or not finished else Delta()
            silent = not sequence.text
        else:
            if sequence.index not in self.parsers:
                self.parsers[sequence.index] = self.new_parser()
            parser = self.parsers[sequence.index]
            pieces = parser.push(sequence.text)
            if finished:
                pieces += parser.finish()
            delta, silent = _delta(pieces), not pieces
            if reason == "stop" and parser.num_calls:
                reason = "tool_calls"
        if silent and not (sequence.logprobs or finished or self.body.return_token_ids):
            return None
        return ChatChunkChoice(
            sequence.index,
            delta,
            self._logprobs(sequence.token_ids, sequence.logprobs),
            reason,
            sequence.stop_reason if finished else UNSET,
            sequence.token_ids if self.body.return_token_ids else UNSET,
        )

    def end(self, error: ApiError | None) -> bytes:
        """The last events of a stream."""
        options = self.body.stream_options
        if error is None and options is not None and options.include_usage:
            return self._event([], usage=self.usage.usage()) + DONE
        return end_of_stream(error)

    def _event(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | UnsetType | None = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        options = self.body.stream_options
        if options is not None and choices:
            if options.continuous_usage_stats:
                usage = self.usage.usage()
            elif options.include_usage:
                usage = None
        return event(
            ChatChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt_token_ids,
            )
        )

    def whole(self, result: PromptResult, usage: UsageCounter) -> ChatAnswer:
        return ChatAnswer(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, sample) for i, sample in enumerate(result.samples)],
            usage=usage.usage(),
            prompt_logprobs=UNSET
            if result.prompt_logprobs is None
            else prompt_logprobs_shape(result.prompt_logprobs),
            prompt_token_ids=result.prompt_token_ids if self.body.return_token_ids else UNSET,
        )

    def _choice(self, index: int, sample: Sample) -> ChatChoice:
        message, reason = AnswerMessage(sample.text), sample.finish_reason
        finish_reason: FinishReason | None = reason
        if self.new_parser is not None:
            parser = self.new_parser()
            message = _message(parser.push(sample.text) + parser.finish())
            if reason == "stop" and parser.num_calls:
                finish_reason = "tool_calls"
        return ChatChoice(
            index,
            message,
            self._logprobs(sample.token_ids, sample.logprobs),
            finish_reason,
            sample.stop_reason,
            sample.token_ids if self.body.return_token_ids else UNSET,
        )

    def _logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> ChatLogprobs | None:
        if not self.body.logprobs or logprobs is None:
            return None
        top = self.body.top_logprobs or 0
        return ChatLogprobs(logprob_entries(self.names, token_ids, logprobs, top))


def logprob_entries(
    names: TokenNames, token_ids: list[int], logprobs: list[TokenLogprobs], top: int
) -> list[ChatLogprob]:
    """One entry per token, with its `top` likeliest alternatives."""
    return [
        ChatLogprob(
            names.text(token),
            floored(at[token].logprob),
            names.bytes(token),
            [TopLogprob(names.text(t), lp, names.bytes(t)) for t, lp in top_entries(at, top)],
        )
        for token, at in zip(token_ids, logprobs, strict=True)
    ]


def _delta(pieces: list[Piece]) -> Delta:
    """All news of one step as one delta."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls = [
        ToolCallDelta(piece.index, FunctionDelta("", piece.name), piece.id, "function")
        if isinstance(piece, CallStart)
        else ToolCallDelta(piece.index, FunctionDelta(piece.text))
        for piece in pieces
        if not isinstance(piece, Text)
    ]
    return Delta(content=text or UNSET, tool_calls=calls or UNSET)


def _message(pieces: list[Piece]) -> AnswerMessage:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: list[AnswerToolCall] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append(AnswerToolCall(piece.id, CalledFunction(piece.name, "")))
        elif not isinstance(piece, Text):
            calls[piece.index].function.arguments += piece.text
    if not calls:
        return AnswerMessage(text)
    return AnswerMessage(text or None, tool_calls=calls)
