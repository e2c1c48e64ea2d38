"""Beam search over HTTP: vLLM's `use_beam_search`, and what cannot be asked for along with it."""

from __future__ import annotations

from cuengine.api.checks import refuse
from cuengine.api.protocol import ChatRequest, CompletionRequest
from cuengine.sampling_params import BeamSearchParams

# Fields that change how tokens are drawn, or when a text ends, and the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "stop_token_ids": ([],),
}


def beams_sent_as(body: ChatRequest | CompletionRequest) -> str:
    """The field that says how many beams are followed."""
    return "n" if body.best_of is None else "best_of"


def beam_params(
    body: ChatRequest | CompletionRequest, *, max_tokens: int | None, logprobs: int | None
) -> BeamSearchParams:
    """best_of beams (or n, where it is not given), of which n are returned.

    Raises RequestError for a value out of range.
    """
    n = 1 if body.n is None else body.n
    return BeamSearchParams(
        n if body.best_of is None else body.best_of,
        max_tokens,
        n=n,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def check_beams(body: ChatRequest | CompletionRequest, *, structured: bool) -> None:
    """Raises ApiError 400 for what makes no sense together; structured: a grammar is to be
    followed."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise refuse("length_penalty", "length_penalty needs use_beam_search: true.")
        if body.early_stopping not in (None, False):
            raise refuse("early_stopping", "early_stopping needs use_beam_search: true.")
        return
    if body.best_of is not None and body.n is not None and body.n > body.best_of:
        raise refuse("n", f"n={body.n} is more than best_of={body.best_of}, the beams to follow.")
    if body.stream:
        raise refuse(
            "stream", "stream: true with use_beam_search: the best texts are known only in the end."
        )
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise refuse(
                name,
                f"{name}={value!r:.80} cannot be combined with use_beam_search: texts are ranked "
                "by the model's own log-probabilities and end with its end-of-text token.",
            )
    if structured:
        fields = ("structured_outputs", "response_format")
        name = next((name for name in fields if getattr(body, name) is not None), "tool_choice")
        raise refuse(name, f"{name}: a grammar cannot be combined with use_beam_search.")
    if body.prompt_logprobs is not None:
        raise refuse("prompt_logprobs", "prompt_logprobs cannot be combined with use_beam_search.")
    if isinstance(body, CompletionRequest) and body.echo:
        if body.logprobs is not None:
            raise refuse("logprobs", "echo with logprobs cannot be combined with use_beam_search.")
        if body.max_tokens == 0:
            raise refuse("max_tokens", "max_tokens=0 with use_beam_search: ask for at least 1.")
