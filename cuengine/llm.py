"""Offline generation: all prompts in, all outputs back, in the calling thread.

The server's counterpart is async_engine.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from tqdm import tqdm

from cuengine.config import EngineConfig
from cuengine.counted import counted
from cuengine.engine import Engine
from cuengine.errors import ConfigError, RequestError
from cuengine.loading import load_engine
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import BeamSearchOutput, CompletionOutput, RequestDelta, RequestOutput
from cuengine.sampling_params import BeamSearchParams, RequestParams, SamplingParams
from cuengine.stats import EngineStats

if TYPE_CHECKING:
    from cuengine.model.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt
Message = Mapping[str, Any]
T = TypeVar("T")


class LLM:
    """A model in this process.

    model   folder, .gguf file, hub name or built-in name; None: EngineConfig's default
    fields  those of EngineConfig

    Raises ModelError, ConfigError.
    """

    def __init__(self, model: str | None = None, **fields: Any) -> None:
        if model is not None:
            fields["model"] = model
        known = EngineConfig.__dataclass_fields__
        if unknown := fields.keys() - known:
            raise ConfigError(
                f"{', '.join(sorted(unknown))}: there is no such setting. They are: "
                f"{', '.join(known)}"
            )
        self._use(load_engine(EngineConfig(**fields)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Offline generation on an engine that is loaded already."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: Engine) -> None:
        self.engine = engine
        self._processor = OutputProcessor(engine.model.tokenizer, engine.finish_sequence)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError where the engine runs without one."""
        if self.engine.model.tokenizer is None:
            raise ConfigError("There is no tokenizer: the engine was made with skip_tokenizer_init")
        return self.engine.model.tokenizer

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; params: one for all, or one for each;
        None: SamplingParams() with what the model's generation_config.json says instead.

        Raises RequestError for a prompt that can't be served, before anything runs.
        """
        texts, ids = self._tokenize(prompts)
        if params is None:
            params = self._default_params()
        each = _one_for_each("params", params, SamplingParams, len(ids))
        return self._run(texts, ids, each, use_tqdm=use_tqdm, priority=priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The most likely texts, in the order of the prompts; params: one for all, or one for each.

        Raises RequestError for a prompt that can't be served, before anything runs.
        """
        texts, ids = self._tokenize(prompts)
        each = _one_for_each("params", params, BeamSearchParams, len(ids))
        outputs = self._run(texts, ids, each, use_tqdm=use_tqdm, priority=None)
        return [
            BeamSearchOutput(found.request_id, found.prompt, found.prompt_token_ids, found.outputs)
            for found in outputs
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to several.

        template  further arguments of ChatTemplate.render (tools, add_generation_prompt, ...)
        Raises RequestError as `generate` does, ConfigError where the model has no chat template.
        """
        chat_template = self.engine.model.chat_template
        if chat_template is None:
            raise ConfigError("This model has no chat template: use generate, or give one")
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        texts = [chat_template.render(messages, **template) for messages in conversations]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if params is None:
            params = self._default_params()
        each = _one_for_each("params", params, SamplingParams, len(ids))
        return self._run([*texts], ids, each, use_tqdm=use_tqdm, priority=None)

    def _tokenize(
        self, prompts: Prompt | Sequence[Prompt]
    ) -> tuple[list[str | None], list[list[int]]]:
        """Texts, where given, and token ids."""
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            raise _not_a_prompt(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        ids = [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
            for prompt in prompts
        ]
        return texts, ids

    def _default_params(self) -> SamplingParams:
        """As the model's authors would have it, where they said so."""
        defaults = self.engine.model.generation_defaults
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        known = {name: getattr(defaults, name, None) for name in names}
        return SamplingParams(**{name: v for name, v in known.items() if v is not None})

    def _run(
        self,
        texts: Sequence[str | None],
        ids: list[list[int]],
        each: Sequence[RequestParams],
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        priorities = _one_for_each("priority", 0 if priority is None else priority, int, len(ids))
        grammars = []
        for prompt, one in zip(ids, each, strict=True):
            self.engine.check_request(prompt, one)
            self._processor.check_request(one)
            grammars.append(self.engine.compile_grammar(one))
        outputs: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(ids), unit="request", disable=not use_tqdm)
        try:
            for text, prompt, one, first, grammar in zip(
                texts, ids, each, priorities, grammars, strict=True
            ):
                request_id = str(next(self._ids))
                self.engine.add_request(request_id, prompt, one, priority=first, grammar=grammar)
                self._processor.add_request(request_id, prompt, one)
                outputs[request_id] = RequestOutput(request_id, text, prompt, None)
            while self.engine.has_unfinished():
                for delta in self._processor.process(self.engine.step()):
                    append_delta(outputs[delta.request_id], delta)
                    bar.update(delta.finished)
        except BaseException:
            # Ctrl-C among others: nothing may stay queued for the next call.
            for request_id in outputs:
                self.engine.abort(request_id)
                self._processor.abort(request_id)
            raise
        finally:
            bar.close()
        return list(outputs.values())


def append_delta(output: RequestOutput, delta: RequestDelta) -> None:
    """Add one step's news to a request's output."""
    output.num_cached_tokens = delta.num_cached_tokens
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    for news in delta.sequences:
        while len(output.outputs) <= news.index:
            output.outputs.append(CompletionOutput(len(output.outputs), "", []))
        sample = output.outputs[news.index]
        sample.text += news.text
        sample.token_ids += news.token_ids
        if news.logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + news.logprobs
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(
                entry[token].logprob
                for token, entry in zip(news.token_ids, news.logprobs, strict=True)
            )
        sample.finish_reason, sample.stop_reason = news.finish_reason, news.stop_reason
        sample.score = news.score


def _token_ids(prompt: Any) -> list[int]:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if isinstance(ids, Sequence) and all(isinstance(token, int) for token in ids):
        return list(ids)
    raise _not_a_prompt(prompt)


def _not_a_prompt(prompt: Any) -> RequestError:
    return RequestError(
        f"A prompt is a string or {{'prompt_token_ids': [...]}}, not {prompt!r:.80}", param="prompt"
    )


def _one_for_each(name: str, value: T | Sequence[T], kind: type[T], count: int) -> list[T]:
    if not isinstance(value, kind | Sequence):
        raise RequestError(
            f"{name}: {kind.__name__}, or one for each prompt, not {value!r:.80}", param=name
        )
    values = [value] * count if isinstance(value, kind) else list(cast(Sequence[T], value))
    if len(values) != count:
        raise RequestError(f"{name}: {len(values)} for {counted(count, 'prompt')}", param=name)
    return values
