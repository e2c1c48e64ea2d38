"""What llguidance says is wrong with a demand, in words for whoever made the demand.

Its own texts name options that only the server could set, show the grammar that a demand was turned
into, and say what is not there without what to use instead. What is not known here passes through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

TOO_LARGE = (
    "it outgrows the limits of what is computed for it: take fewer alternatives, optional "
    "properties and counted repetitions, and give what repeats an end"
)
TOO_SLOW = (
    "finding out what may come next takes too long: let a text be derived in one way only, and "
    "take fewer alternatives and optional properties"
)
NOTHING = "nothing can match it"
_NO_DETAILS = "<non-verbose/>"
"""What llguidance puts where it would describe its own state."""
_LINE, _LINES = 200, 12
"""Characters of a line, and lines, of llguidance's that are passed on."""
_WHILE = re.compile(r"\n  while processing json-schema:.*")
"""Where a schema is that a `$ref` names. We say where by `param`."""

_CASES = "use anyOf, with a part for each case"
_AFTERWARDS = "leave it out, and check the answer for it"
_INSTEAD = {
    "not": "say what is allowed, with enum, pattern or anyOf",
    "if": _CASES,
    "then": _CASES,
    "else": _CASES,
    "dependentRequired": _CASES,
    "dependentSchemas": _CASES,
    "dependencies": _CASES,
    "propertyNames": "use patternProperties",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
FORMATS = (
    *("date-time", "date", "time", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uri", "uuid"),
)


def in_own_words(error: str) -> str:
    """llguidance's error with what to do about it. "" stays ""."""
    # Behind the first line a panic shows its backtrace.
    error = error.partition("\n<backtrace>")[0].replace(_NO_DETAILS, "").strip()
    error = _WHILE.sub("", _around_marks(error))
    for pattern, words in _WORDS:
        if found := pattern.search(error):
            said = words if isinstance(words, str) else words(found)
            return error[: found.start()] + said + error[found.end() :]
    return error


def _around_marks(error: str) -> str:
    """The error with long lines, which are the client's, cut to where marks point at in them."""
    lines = error.split("\n")
    if all(len(line) <= _LINE for line in lines):
        return error
    for i, line in enumerate(lines):
        marks = lines[i + 1] if i + 1 < len(lines) else ""
        if len(line) <= _LINE:
            continue
        if "^" in marks and not marks.strip(" ^"):
            start = max(4, marks.index("^") - _LINE // 2)
            lines[i] = line[:4] + line[start : start + _LINE - 4]
            lines[i + 1] = marks[:4] + marks[start : start + _LINE - 4]
        else:
            lines[i] = f"{line[: _LINE // 2]} … {line[-_LINE // 2 :]}"
    return "\n".join(lines[:_LINES])


def without_lark(problem: str) -> str:
    """A problem without the grammar that the demand was turned into: the client knows none."""
    problem = re.sub(r"\n +\d+ \| .*", "", problem, flags=re.DOTALL)
    return re.sub(r"^at \d+\(\d+\): ", "", problem)


def _keywords(found: re.Match[str]) -> str:
    names: list[str] = json.loads(found[1])
    advice = {_INSTEAD.get(name, _AFTERWARDS): None for name in names}
    listed = " and ".join(map(repr, names))
    return f"{listed} {'is' if len(names) == 1 else 'are'} not supported: {'; '.join(advice)}"


def _regex(found: re.Match[str]) -> str:
    """With the part of the expression that is meant, where it is one line."""
    shown, marks, problem = found["shown"], found["marks"], found["problem"]
    where = ""
    if shown is not None:
        at = len(marks) - len(marks.lstrip())
        where = f", at {json.dumps(shown[at : at + 40], ensure_ascii=False)}"
    if "look-around" in problem:
        return f"look-around is not supported{where}: say what may be there, not what may not"
    if "backreferences" in problem:
        return f"backreferences are not supported{where}: write the alternatives out"
    if problem == "decimal literal invalid":
        problem = "a count is too large"
    return f"not a regular expression: {problem}{where}"


_WORDS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(
            r".*(?:items; max is|Too many items|too many expressions|too many states|"
            r"precomputation failed|too big \(limit|fuel|schema too large).*",
            re.DOTALL,
        ),
        TOO_LARGE,
    ),
    (re.compile(r"^NoExtensionBias$"), NOTHING),
    (re.compile(r"Unimplemented keys: (\[.*?\])"), _keywords),
    (
        re.compile(r"oneOf constraints are not supported.*"),
        "a oneOf is supported where its parts exclude each other, as by their types or by a "
        "required property with a const of its own: use anyOf, or add one",
    ),
    (
        re.compile(r"Unknown format: (.*)"),
        lambda found: (
            f"format {found[1]!r} is not supported: use pattern, or one of {', '.join(FORMATS)}"
        ),
    ),
    (
        re.compile(r"Invalid type: (.*)"),
        lambda found: (
            f"type {found[1]!r} is none of string, number, integer, boolean, null, array and object"
        ),
    ),
    (
        re.compile(r"Resource '(.*?)' is not present in a registry.*"),
        lambda found: f"{found[1]!r} is not fetched: put what it stands for under $defs",
    ),
    (
        re.compile(r"Pointer '(.*?)' does not exist"),
        lambda found: f"$ref: '#{found[1]}' is not in the schema",
    ),
    (
        re.compile(r"Expected f64 for '(\w+)', got (.*)"),
        lambda found: f"{found[1]} is a number, not {found[2]}",
    ),
    (
        re.compile(r"Expected (\w[\w ]*) for '(\w+)', got (.*)"),
        lambda found: f"{found[2]} needs a value of the type {found[1]}, not {found[3]}",
    ),
    (
        re.compile(r"Unsatisfiable schema: Regex is empty.*", re.DOTALL),
        f"{NOTHING}: its pattern, format and lengths exclude each other",
    ),
    (
        re.compile(r"Unable to determine if regex is empty.*", re.DOTALL),
        "its pattern, format and lengths are too much together: say with one of them what fits",
    ),
    (
        re.compile(r"circular references with sibling keys are not supported: json-schema:///(.*)"),
        lambda found: f"$ref {found[1]!r} leads back to itself: leave no other keys beside it",
    ),
    (
        re.compile(r"Unsatisfiable schema: anyOf is empty"),
        f"{NOTHING}: it has no alternatives",
    ),
    (re.compile(r"Unsatisfiable schema"), NOTHING),
    (
        re.compile(r"min/maxProperties only supported when.*"),
        "minProperties and maxProperties are supported where all properties are required: "
        f"{_AFTERWARDS}",
    ),
    (re.compile(r"invalid multiple of"), "multipleOf is a number above 0"),
    (
        re.compile(
            r"(?:invalid regex .*? \(in regex\): )?lookarounds not supported yet; [^\n]*", re.DOTALL
        ),
        r"boundaries as \b are not supported in a regular expression: leave them out, or say what "
        "may be there",
    ),
    (
        re.compile(
            r"(?:invalid regex .*? \(in regex\): )?regex parse error:\n"
            r"(?:    (?P<shown>[^\n]*)\n    (?P<marks> *\^+)\n|.*?\n)error: (?P<problem>[^\n]*)",
            re.DOTALL,
        ),
        _regex,
    ),
    (
        re.compile(r"(unknown special token: .*?); following special tokens[^\n]*"),
        lambda found: found[1],
    ),
)
