"""How one request wants its tokens chosen and when it ends. Names, defaults and ranges are vLLM's.

Drawn one by one (SamplingParams), or as the best texts of a search (BeamSearchParams).

Checks that need the model (vocabulary, context length) are made on admission, in engine.py.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from cuengine.errors import RequestError
from cuengine.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 100
MAX_SAMPLES = 128
MIN_TEMPERATURE = 1e-5
"""Lower ones are greedy, as in vLLM."""
REPETITION_PENALTIES = (1e-6, 1e6)
"""In float32, which samplers compute in, a logit times or over anything between them is finite."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    n                   samples to return
    best_of             samples to draw, of which the n with the best mean log-probability are
                        returned; None: n
    temperature         0, or below 0.00001, is greedy
    top_p, top_k, min_p truncation; 1, 0 (or -1) and 0 turn each off
    seed                None: one is drawn on admission
    stop                strings that end a sample; not part of its text, unless
                        include_stop_str_in_output
    stop_token_ids      tokens that end a sample, besides the model's own end-of-sequence tokens
    ignore_eos          go on past the model's end-of-sequence tokens; with structured_outputs as
                        far as those allow
    max_tokens          None: the room left in the model's context
    min_tokens          no end of sequence and no stop token before so many tokens; with
                        structured_outputs as far as those allow
    presence_penalty, frequency_penalty   OpenAI's, over the sample's own tokens
    repetition_penalty  over prompt and sample (Keskar et al., arXiv 1909.05858, section 4.1)
    logit_bias          token id -> -100 to 100, added to its logit
    logprobs            most likely tokens to report besides the chosen one; None: nothing
    prompt_logprobs     the same for the prompt's tokens
    skip_special_tokens leave special tokens out of the text
    structured_outputs  what the text must match; the sample ends where no more can follow

    Raises RequestError, with the field's name in `param`, for a bad value.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        _integer("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_SAMPLES)
        _number("temperature", self.temperature, 0, 100)
        if self.temperature < MIN_TEMPERATURE:
            self.temperature = 0.0
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}",
                param="min_tokens",
            )
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop: {text!r} is not a non-empty string", param="stop")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100, 100)
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs={wanted!r:.80} is not a StructuredOutputsParams",
                param="structured_outputs",
            )

    @property
    def num_samples(self) -> int:
        """Samples to draw."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(slots=True)
class BeamSearchParams:
    """A search for the most likely texts, as transformers' `generate(num_beams=beam_width)` does.

    beam_width      texts that are followed at once
    max_tokens      None: the room left in the model's context
    n               results to return, best first; None: beam_width
    length_penalty  a text's score is the sum of its tokens' log-probabilities / their number **
                    length_penalty: above 0 it favours long texts, below 0 short ones
    early_stopping  when to end once beam_width texts have ended. True: at once. False: when the
                    best one that runs has a worse score already. "never": when it could not even
                    get a better one by max_tokens
    temperature     0: nothing is drawn here
    ignore_eos      go on past the model's end-of-sequence tokens
    logprobs        most likely tokens to report besides the chosen one; None: nothing
    skip_special_tokens         leave special tokens out of the text
    include_stop_str_in_output  leave the end-of-sequence token in the text

    Raises RequestError, with the field's name in `param`, for a bad value.
    """

    beam_width: int
    max_tokens: int | None
    _: KW_ONLY
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 0.0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, MAX_SAMPLES)
        if self.n is not None:
            _integer("n", self.n, 1, self.beam_width)
        _number("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f"early_stopping={self.early_stopping!r} is not True, False or 'never'",
                param="early_stopping",
            )
        if self.temperature != 0:
            raise RequestError(
                f"temperature={self.temperature!r} with beam search: it draws nothing. "
                "Leave it out, or at 0.",
                param="temperature",
            )
        self.sampling_params()

    @property
    def num_results(self) -> int:
        return self.beam_width if self.n is None else self.n

    def sampling_params(self) -> SamplingParams:
        """What the results have in common with as many samples, none of which is random."""
        return SamplingParams(
            n=self.num_results,
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


RequestParams = SamplingParams | BeamSearchParams


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is not an integer from {low} to {high}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high or (open_low and value == low):
        bounds = f"from {_plain(low)} to {_plain(high)}"
        if open_low:
            bounds = f"above {_plain(low)} and at most {_plain(high)}"
        raise RequestError(f"{name}={value!r} is not a number {bounds}", param=name)


def _plain(bound: float) -> str:
    return f"{bound:f}".rstrip("0").rstrip(".")
