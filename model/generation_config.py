"""What a model's authors want for requests that don't say: generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuengine.errors import ModelError
from cuengine.model.json_file import read_json_object
from cuengine.sampling_params import REPETITION_PENALTIES


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of a model; None where it states none. SamplingParams has the meanings."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


def read_generation_config(folder: Path) -> GenerationDefaults:
    """Reads `folder`/generation_config.json; no file means no defaults.

    Like vLLM, takes the sampling values whatever `do_sample` says: that one decides what
    transformers does by default, which is greedy search, and says nothing about the values.
    Raises ModelError for a file that is not what it should be.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    content = read_json_object(path)
    return GenerationDefaults(
        eos_token_ids=_token_ids(path, content.get("eos_token_id")),
        temperature=_number(path, content, "temperature", 0.0, 100.0),
        top_p=_number(path, content, "top_p", 0.0, 1.0, open_low=True),
        top_k=_integer(path, content, "top_k"),
        repetition_penalty=_number(path, content, "repetition_penalty", *REPETITION_PENALTIES),
    )


def _token_ids(path: Path, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelError(
                f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them"
            )
    return tuple(dict.fromkeys(values))


def _number(
    path: Path,
    content: dict[str, Any],
    name: str,
    low: float,
    high: float,
    *,
    open_low: bool = False,
) -> float | None:
    value = content.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise ModelError(f"{path}: {name} is {value!r}; it must be a number {bounds}")
    return float(value)


def _integer(path: Path, content: dict[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ModelError(f"{path}: {name} is {value!r}; it must be -1, 0 (off) or a count")
    return value
