"""JSON schemas before llguidance gets them: what is within one, what is refused, how numbers are
bounded. Compiling is in grammar.py.

llguidance has numbers as floats and counts them in 64 bits. It takes bounds beyond that for errors
of its own, or rounds them, and constants, too. Here bounds are moved inwards to what it can count,
so that whatever it allows lies within the client's; what cannot be said to it is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from cuengine.structured_outputs import bad_field

MAX_MULTIPLE = 10_000
"""Of `multipleOf`, counted in its last decimal. As many states take their square in time."""
MAX_OPTIONAL = 1500
"""Properties of an object. Wherever one may come, each that may is looked at, and compared with all
others: for 2,000 a mask takes 0.3 s of a CPU."""
MAX_NUMBER = 9 * 10**18
"""As far from 0 as numbers can be bounded: a float, and in decimal within 64 bits."""
_MIN_NUMBER = 1e-50
"""Bounds nearer to 0 have more digits than llguidance can follow."""
_DIGITS = 15
"""Of a number, which it reads exactly."""
_NEXT = 1e-9
"""What is left out next to an exclusive bound, as part of all that is allowed."""
_MAX_TARGETS = 20_000
"""Places to look for what references lead to."""
_LONG = 10**18
"""Numbers with more digits than those below it need a bound on either side."""
HALF_ESCAPE = r'not a regular expression: an escape ends early, at "\"'
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Where the allowed numbers are, seen from there: above (1) or below."""


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, definitions first, each with its place."""
    for name in ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas"):
        group = schema.get(name)
        if isinstance(group, dict):
            yield from ((f"{name}.{key}", part) for key, part in group.items())
    for name in ("prefixItems", "items", "anyOf", "oneOf", "allOf"):
        group = schema.get(name)
        if isinstance(group, list):
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(group))
    for name in ("items", "additionalProperties", "additionalItems", "contains", "propertyNames"):
        yield name, schema.get(name)
    yield "not", schema.get("not")


def schemas(place: str, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all within it, each once with its place: also what is a schema only because a
    `$ref` leads there, from within a constant or a key of no meaning.
    """
    seen: set[int] = set()
    # Which document a reference is into is not looked at: none is left out so.
    documents: list[tuple[str, dict[str, Any]]] = []
    pointers: dict[str, None] = {}
    todo: list[tuple[str, Any]] = [(place, schema)]
    while todo:
        where, part = todo.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield where, part
        todo += [(f"{where}.{name}", sub) for name, sub in parts(part)]
        if not documents or "$id" in part:
            documents.append((where, part))
            todo += [_at(where, part, pointer) for pointer in pointers]
        reference = part.get("$ref")
        if isinstance(reference, str) and "#/" in reference:
            pointer = unquote(reference.partition("#/")[2])
            if pointer not in pointers:
                pointers[pointer] = None
                todo += [_at(*document, pointer) for document in documents]
        if len(documents) > 1 and len(documents) * len(pointers) > _MAX_TARGETS:
            raise bad_field(where, "these are too many schemas with `$id` for so many `$ref`")


def _at(place: str, schema: dict[str, Any], pointer: str) -> tuple[str, Any]:
    """What is at a JSON pointer (RFC 6901, without its first slash), with its place; else None."""
    at: Any = schema
    for token in pointer.split("/"):
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at, place = at.get(key), f"{place}.{key}"
        elif isinstance(at, list) and key.isascii() and key.isdecimal() and int(key[:9]) < len(at):
            at, place = at[int(key[:9])], f"{place}[{key}]"
        else:
            at = None
    return place, at


def ends_in_an_escape(regex: object) -> bool:
    """Whether half an escape ends an expression. llguidance would drop it."""
    return isinstance(regex, str) and (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def problem_in(place: str, schema: Any) -> tuple[str, str] | None:
    """What llguidance would take for ever over, let pass, or not count: where it is, and why.

    `place` is the schema's own.
    """
    for where, part in schemas(place, schema):
        for name, problem in _problems(part):
            if problem:
                return f"{where}.{name}", problem
    return None


def _problems(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    multiple = part.get("multipleOf")
    if _is_number(multiple) and _states(multiple) > MAX_MULTIPLE:
        yield (
            "multipleOf",
            f"{multiple!s:.40} has more than {MAX_MULTIPLE} in its last decimal place",
        )
    properties, required = part.get("properties"), part.get("required")
    if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL:
        needed = set(filter(_is_text, required)) if isinstance(required, list) else set()
        optional = len(properties.keys() - needed)
        if optional > MAX_OPTIONAL:
            yield (
                "properties",
                f"{optional} of them are optional, and at most {MAX_OPTIONAL} of one object can be "
                "followed: make some required, or spread them over nested objects",
            )
    for name, side in _BOUNDS.items():
        bound = part.get(name)
        if _is_number(bound) and bound * side > MAX_NUMBER:
            yield name, f"{bound!s:.40} is out of reach: numbers are followed to {MAX_NUMBER:.0e}"
    if ends_in_an_escape(part.get("pattern")):
        yield "pattern", HALF_ESCAPE
    named = part.get("patternProperties")
    for pattern in filter(ends_in_an_escape, named if isinstance(named, dict) else ()):
        yield f"patternProperties.{pattern}", HALF_ESCAPE
    for name in ("const", "enum"):
        for value in _numbers_in(part.get(name)):
            if _written(value) != value:
                yield (
                    name,
                    f"{value!s:.40} is no number that a float holds exactly: make it a string",
                )


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _states(multiple: float) -> int:
    """What a check for multiples of it has to keep apart."""
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    if not isinstance(exponent, int) or abs(exponent) > 20:
        return MAX_MULTIPLE + 1
    number = int("".join(map(str, digits)))
    states: int = max(number * 10 ** max(0, exponent), 10 ** max(0, -exponent))
    return states


def _numbers_in(value: Any) -> Iterator[int]:
    """Integers that are, or are in, a constant. (Floats are what they are.)"""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
        elif isinstance(one, int) and not isinstance(one, bool):
            yield one


def _written(value: float) -> Decimal:
    """What llguidance makes of a number: the nearest float, in the fewest digits that tell it."""
    try:
        return Decimal(repr(float(value)))
    except OverflowError:
        return Decimal("Infinity")


def countable(schema: Any) -> Any:
    """The schema with bounds of numbers that llguidance can count, none wider than before.

    Call it with what `problem_in` has nothing against. The schema itself stays as it is.
    """
    if not any(_moved_bounds(part) for _, part in schemas("", schema)):
        return schema
    schema = json.loads(json.dumps(schema))
    for _, part in schemas("", schema):
        part.update(_moved_bounds(part))
    return schema


def _moved_bounds(part: dict[str, Any]) -> dict[str, float]:
    """The bounds to replace or to add."""
    moved: dict[str, float] = {}
    inner: dict[int, tuple[float, bool]] = {}
    for name, side in _BOUNDS.items():
        bound = part.get(name)
        if not _is_number(bound):
            continue
        value = _inwards(bound, side)
        if value != bound:
            moved[name] = value
        exclusive = name.startswith("exclusive") or part.get(f"exclusive{name.title()}") is True
        if side not in inner or (value * side, exclusive) > (inner[side][0] * side, inner[side][1]):
            inner[side] = value, exclusive
    for side, name, opposite in ((1, "minimum", "maximum"), (-1, "maximum", "minimum")):
        if side not in inner:
            continue
        value, exclusive = inner[side]
        if -side not in inner:
            if value * side >= _LONG:
                moved[opposite] = MAX_NUMBER * side
            continue
        width = abs(inner[-side][0] - value)
        if exclusive and value.is_integer() and value * side >= 0 and width < 1:
            # Between 0 and 0.5, neither of them, llguidance would take 0.
            inside = value + side * width * _NEXT
            moved[name] = math.nextafter(value, side * math.inf) if inside == value else inside
    return moved


def _inwards(bound: float, side: int) -> float:
    """The nearest bound that llguidance reads as it is written, and that lets nothing more in."""
    if abs(bound) > MAX_NUMBER:
        return float(-MAX_NUMBER * side)
    if isinstance(bound, int) and abs(bound) <= 2**53:
        return float(bound)
    if 0 < abs(bound) < _MIN_NUMBER:
        return max(0.0, math.copysign(_MIN_NUMBER, bound * side)) * side
    rounding = ROUND_CEILING if side > 0 else ROUND_FLOOR
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(repr(bound)))
