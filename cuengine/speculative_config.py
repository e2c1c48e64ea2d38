"""Settings of speculative decoding, spelled as vLLM spells them.

What they are for is in speculation.py; how drafts are made in ngram.py and draft_model.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cuengine.errors import ConfigError

METHODS = ("ngram", "draft_model")

_KEYS = {
    "ngram": {"prompt_lookup_max", "prompt_lookup_min"},
    "draft_model": {"model", "revision"},
}
_SHARED_KEYS = {"method", "num_speculative_tokens"}

_DEFAULT_LOOKUP = 5
"""vLLM's, where neither the longest nor the shortest n-gram is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """method                  "ngram": what followed the same tokens earlier in the same text;
                            "draft_model": what a smaller model says
    num_speculative_tokens  drafted in one go, at most
    prompt_lookup_max       ngram: the longest sequence of last tokens to look for, and
    prompt_lookup_min       the shortest
    model, revision         draft_model: as the engine's own
    """

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: int
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    model: str | None = None
    revision: str | None = None


def read_speculative_config(value: Mapping[str, Any] | str) -> SpeculativeConfig:
    """From a mapping, or JSON. Raises ConfigError for anything that cannot be used."""
    given = _mapping(value)
    method = given.get("method")
    if method is None and given.get("model") is not None:
        method = "draft_model"
    if method not in METHODS:
        raise _error(f"method={method!r} is not one of: {', '.join(METHODS)}")
    allowed = _SHARED_KEYS | _KEYS[method]
    if unknown := sorted(given.keys() - allowed):
        raise _error(
            f"{', '.join(unknown)}: not known with method={method!r}, which takes: "
            f"{', '.join(sorted(allowed))}"
        )
    if "num_speculative_tokens" not in given:
        raise _error("num_speculative_tokens is missing: say how many tokens to draft, 4 for one")
    fields: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": _count(given, "num_speculative_tokens"),
    }
    if method == "ngram":
        fields |= _lookup(given)
    else:
        fields |= {"model": _name(given, "model"), "revision": _name(given, "revision")}
        if fields["model"] is None:
            raise _error("model is missing: name the draft model")
    return SpeculativeConfig(**fields)


def _mapping(value: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _error(f"{value!r:.80} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise _error(f"{value!r:.80} is not a JSON object")
    return value


def _lookup(given: Mapping[str, Any]) -> dict[str, int]:
    """One of the two stands for both where the other is not given, as in vLLM."""
    longest = _count(given, "prompt_lookup_max")
    shortest = _count(given, "prompt_lookup_min")
    longest = longest or shortest or _DEFAULT_LOOKUP
    shortest = shortest or longest
    if shortest > longest:
        raise _error(
            f"prompt_lookup_min={shortest} is more than prompt_lookup_max={longest}: "
            "the shortest n-gram is not longer than the longest"
        )
    return {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}


def _count(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if name in given and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _error(f"{name}={value!r} is not a whole number of at least 1")
    return value


def _name(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise _error(f"{name}={value!r} is not a name")
    return value


def _error(text: str) -> ConfigError:
    return ConfigError(f"speculative_config: {text}")
