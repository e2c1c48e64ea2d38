"""Bounds of numbers in schemas, moved to what llguidance can count; and what it cannot be told."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cuengine.errors import RequestError
from cuengine.grammar_schema import MAX_NUMBER, countable, problem_in

Schema = dict[str, Any]
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def allows(schema: Schema, number: Decimal) -> bool:
    """JSON Schema's bounds, for a number as it is written."""
    low, above, high, below = (
        Decimal(repr(schema[name])) if name in schema else None for name in BOUNDS
    )
    return (
        (low is None or number >= low)
        and (above is None or number > above)
        and (high is None or number <= high)
        and (below is None or number < below)
    )


numbers = st.one_of(
    st.integers(-(10**20), 10**20),
    st.integers(2**53 - 9, 2**54),
    st.floats(-1e22, 1e22, allow_nan=False),
    st.sampled_from([0, 0.25, -0.5, -0.0, 5e-324, -5e-324, 3, 3.5]),
    st.sampled_from([2**63, 2**63 - 1, -(2**63), 2**64 - 1, 10**18, 10**18 - 1, -(10**18)]),
)


@settings(deadline=None)
@given(
    schema=st.dictionaries(st.sampled_from(BOUNDS), numbers),
    near=st.integers(-3000, 3000) | st.just(0),
)
def test_bounds_are_moved_inwards_alone(schema: Schema, near: int) -> None:
    assume(problem_in("json", schema) is None)
    before = copy.deepcopy(schema)
    moved = countable(schema)
    assert schema == before
    assert all(abs(bound) <= MAX_NUMBER for bound in moved.values())
    for bound in (schema | moved).values():
        number = Decimal(repr(bound)) + near
        assert allows(schema, number) or not allows(moved, number)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"maximum": 2**64 - 1}, {"maximum": 9e18}),
        ({"minimum": -1e300, "maximum": 5}, {"minimum": -9e18, "maximum": 5}),
        ({"minimum": 10**18}, {"minimum": 10**18, "maximum": 9e18}),
        ({"exclusiveMaximum": -(10**18)}, {"exclusiveMaximum": -(10**18), "minimum": -9e18}),
        ({"maximum": 2**53 + 1}, {"maximum": 9007199254740990}),
        ({"minimum": 2**53 + 1}, {"minimum": 9007199254741000}),
        ({"minimum": 0.1 + 0.2, "maximum": 0.75}, {"minimum": 0.300000000000001, "maximum": 0.75}),
        ({"exclusiveMinimum": 0, "maximum": 0.5},
         {"exclusiveMinimum": 0, "maximum": 0.5, "minimum": 5e-10}),
        ({"minimum": -3.5, "exclusiveMaximum": -3},
         {"minimum": -3.5, "exclusiveMaximum": -3, "maximum": -3.0000000005}),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
         {"minimum": 5e-10, "exclusiveMinimum": True, "maximum": 0.5}),
        ({"minimum": 5e-324, "maximum": 5e-324}, {"minimum": 1e-50, "maximum": 0}),
        ({"minimum": -5e-324, "maximum": -5e-324}, {"minimum": 0, "maximum": -1e-50}),
    ],
)  # fmt: skip
def test_bounds_are_moved_no_farther_than_needed(schema: Schema, expected: Schema) -> None:
    assert countable(schema) == expected


def test_what_can_be_counted_stays_the_same_object() -> None:
    for schema in (True, {}, {"minimum": 0.1, "exclusiveMaximum": 10**15}, {"minimum": True}):
        assert countable(schema) is schema


def test_bounds_are_moved_wherever_schemas_are_and_nowhere_else() -> None:
    far = {"maximum": 2**64 - 1}
    schema = {
        "properties": {"maximum": far, "a": {"items": {"anyOf": [far, {"type": "null"}]}}},
        "$defs": {"b": {"additionalProperties": far}},
        "const": far,
        "description": "maximum",
    }
    moved = {"maximum": MAX_NUMBER}
    assert countable(schema) == {
        "properties": {"maximum": moved, "a": {"items": {"anyOf": [moved, {"type": "null"}]}}},
        "$defs": {"b": {"additionalProperties": moved}},
        "const": far,
        "description": "maximum",
    }


@pytest.mark.parametrize(
    ("schema", "place", "says"),
    [
        ({"items": {"minimum": 1e300}}, "json.items.minimum", "1e+300 is out of reach"),
        ({"exclusiveMinimum": 10**400}, "json.exclusiveMinimum", "out of reach"),
        ({"maximum": -(2**63)}, "json.maximum", "numbers are followed to 9e+18"),
        ({"exclusiveMaximum": -1e19}, "json.exclusiveMaximum", "out of reach"),
        ({"items": {"items": {"const": 2**53 + 1}}}, "json.items.items.const", "make it a string"),
        ({"enum": [0, {"a": [2**60]}]}, "json.enum", f"{2**60} is no number that a float holds"),
        ({"const": 10**400}, "json.const", "1000000"),
        ({"$ref": "#/a/b", "a": {"b": {"multipleOf": 99999937}}}, "json.a.b.multipleOf", "10000"),
        ({"items": {"$ref": "#/default/0/x~1y%25"}, "default": [{"x/y%": {"minimum": 1e300}}]},
         "json.default[0].x/y%.minimum", "out of reach"),
        ({"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"maximum": -1e19}}, "json.b.maximum", "9e+18"),
        ({"$defs": {"d": {"$id": "u:d", "a": {"const": 2**53 + 1}}}, "$ref": "u:d#/a"},
         "json.$defs.d.a.const", "make it a string"),
        ({"items": {"properties": {f"p{i}": {} for i in range(1503)}, "required": ["p0", "p1", 1]}},
         "json.items.properties", "1501 of them are optional, and at most 1500"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_or_followed_is_refused_with_its_place(
    schema: Schema, place: str, says: str
) -> None:
    found = problem_in("json", schema)
    assert found is not None
    assert found[0] == place
    assert says in found[1]
    assert len(found[1]) < 150


def test_references_to_nothing_and_to_themselves_come_to_an_end() -> None:
    for pointer in ("", "a", "a/b", "a/99999999999", "a/-1", "c", "$ref", "c/\u0663"):
        schema = {"$ref": f"#/{pointer}", "a": [{"$ref": "#/c"}], "c": {"items": {"$ref": "#/c"}}}
        assert problem_in("json", schema) is None


def test_bounds_are_moved_where_only_a_reference_leads() -> None:
    far = {"maximum": 2**64 - 1}
    moved = countable({"$ref": "#/const/x", "const": {"x": far, "y": far}})
    assert moved["const"] == {"x": {"maximum": MAX_NUMBER}, "y": far}


def test_references_are_not_looked_for_in_any_number_of_documents() -> None:
    documents = {f"d{i}": {"$id": f"u:{i}"} for i in range(300)}
    schema = {"$defs": documents, "anyOf": [{"$ref": f"u:0#/{i}"} for i in range(300)]}
    with pytest.raises(RequestError, match="too many schemas with `\\$id`"):
        problem_in("json", schema)
    assert problem_in("json", {**schema, "$defs": {}}) is None


def test_constants_that_floats_hold_are_fine() -> None:
    for value in (0, -5, 2**53, 10**18, 10**22, 10**30, 1.5e300, True, None, "9" * 30):
        assert problem_in("json", {"const": {"a": [value]}}) is None


def test_any_number_of_properties_may_be_required() -> None:
    names = [f"p{i}" for i in range(3000)]
    schema: Schema = {"properties": {name: {} for name in names}, "required": names}
    assert problem_in("json", schema) is None
    assert problem_in("json", {"properties": {name: {} for name in names[:1500]}}) is None
