"""What an answer must look like, as a request says it. Names are vLLM's.

Whether a schema, an expression or a grammar can be followed is found out where it is compiled, in
grammar.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

from cuengine.errors import RequestError

Kind = Literal["json", "regex", "choice", "grammar", "json_object"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first five says what the answer must match, from its first token on.

    json         a JSON schema, as a dictionary or as its text
    regex        a regular expression in the syntax of Rust's regex crate, for the whole answer
    choice       the answers to choose from
    grammar      a context-free grammar in llguidance's Lark dialect, or in GBNF (llama.cpp's EBNF)
    json_object  true: any JSON object
    disable_any_whitespace   JSON on one line, with no white space between its tokens
    whitespace_pattern       regular expression for the white space between the tokens of JSON;
                             None: a space, or a line break with indentation

    Raises RequestError, with the field's name in `param`, for a bad value.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs: exactly one of {', '.join(KINDS)} is needed, not "
                f"{' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        _check_type("json", self.json, dict, str)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_type(name, getattr(self, name), str)
        _check_type("json_object", self.json_object, bool)
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if isinstance(value, str) and not value.strip():
                raise bad_field(name, "it is empty")
        if self.choice is not None:
            _check_type("choice", self.choice, list)
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise bad_field("choice", "a list of non-empty strings is needed")

    @property
    def kind(self) -> Kind:
        """Which of the five was given."""
        return self._given()[0]

    def _given(self) -> list[Kind]:
        values = [(name, getattr(self, name)) for name in KINDS]
        return [
            name
            for name, value in values
            if value is not None and not (name == "json_object" and value is False)
        ]

    def key(self) -> str:
        """The same for equal demands, and only for those.

        Raises RequestError for what no JSON text could have said: NaN, lone surrogates, a loop.
        """
        values = [getattr(self, field.name) for field in fields(self)]
        try:
            text = json.dumps(values, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise bad_field(self.kind, f"it is not JSON, or not Unicode: {error}") from None
        return text


def bad_field(name: str, problem: str) -> RequestError:
    """`name` may go on behind the field's name, to a place within its value."""
    place = f"structured_outputs.{name}"
    return RequestError(f"{place}: {problem}", param=place)


def _check_type(name: str, value: object, *types: type) -> None:
    if value is not None and not isinstance(value, types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise bad_field(name, f"{value!r:.80} is not a {wanted}")
