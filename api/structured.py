"""What an answer must look like, out of a request: response_format, structured_outputs,
text.format, and tool calls that have to be made, in the shape in which tool_calls.py reads them.

The engine compiles what comes of it (cuengine/grammar.py). What it finds wrong there is told to the
client under the name of the client's own field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cuengine.api.checks import refuse
from cuengine.api.protocol import ResponseFormat, StructuredOutputs, Tool
from cuengine.api.responses_protocol import TextFormat
from cuengine.api.settings import ToolCallFormat
from cuengine.errors import RequestError
from cuengine.structured_outputs import StructuredOutputsParams

_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# JSON as templates show it to the models: {"a": 1, "b": [2, 3]}.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LINE = re.compile(r"at (?P<line>\d+)\(\d+\): ")
_WITHIN = "failed to compile JSON schema: "


@dataclass(frozen=True, slots=True)
class Demand:
    """params for the engine; None: any answer will do.

    place  the client's name of what the engine calls structured_outputs.json
    lines  the client's fields that the lines of `params.grammar` come from, where we wrote it
    """

    params: StructuredOutputsParams | None = None
    place: str | None = None
    lines: Sequence[str] = ()

    def as_sent(self, error: RequestError) -> RequestError:
        """The same error about the field as the client knows it."""
        param, message = error.param or "", str(error)
        if self.place is not None and param.startswith("structured_outputs.json"):
            place = self.place + param.removeprefix("structured_outputs.json")
            return RequestError(message.replace(param, place, 1), param=place)
        if self.lines and param == "structured_outputs.grammar":
            problem = message.removeprefix(f"{param}: ").partition("\n")[0]
            line = _LINE.match(problem)
            place = self.lines[0 if line is None else int(line["line"]) - 1]
            problem = problem.removeprefix("" if line is None else line[0])
            return RequestError(f"{place}: {problem.removeprefix(_WITHIN)}", param=place)
        return error


def from_response_format(wanted: ResponseFormat | None) -> Demand:
    """Raises ApiError 400 for a json_schema without one."""
    if wanted is None or wanted.type == "text":
        return Demand()
    if wanted.type == "json_object":
        return Demand(StructuredOutputsParams(json_object=True))
    if wanted.json_schema is None:
        raise refuse(
            "response_format.json_schema", "response_format.json_schema: required, but missing"
        )
    schema = _ANY_OBJECT if wanted.json_schema.schema is None else wanted.json_schema.schema
    return Demand(StructuredOutputsParams(json=schema), "response_format.json_schema.schema")


def from_text_format(wanted: TextFormat | None) -> Demand:
    """`text.format` of /v1/responses. Raises ApiError 400 for a json_schema without one."""
    if wanted is None or wanted.type == "text":
        return Demand()
    if wanted.type == "json_object":
        return Demand(StructuredOutputsParams(json_object=True))
    if wanted.schema is None:
        raise refuse("text.format.schema", "text.format.schema: required, but missing")
    return Demand(StructuredOutputsParams(json=wanted.schema), "text.format.schema")


def from_structured_outputs(wanted: StructuredOutputs | None, other: Demand, name: str) -> Demand:
    """vLLM's field, or `other`, which came from the field `name`. Raises ApiError 400 for both."""
    if wanted is None:
        return other
    if other.params is not None:
        raise refuse(name, f"{name} and structured_outputs exclude each other.")
    if wanted.structural_tag is not None or wanted.disable_additional_properties:
        unknown = "structural_tag" if wanted.structural_tag else "disable_additional_properties"
        param = f"structured_outputs.{unknown}"
        raise refuse(param, f"{param} is not supported by this server.")
    return Demand(
        StructuredOutputsParams(
            json=wanted.json,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            json_object=wanted.json_object,
            disable_any_whitespace=bool(wanted.disable_any_whitespace),
            whitespace_pattern=wanted.whitespace_pattern,
        )
    )


class TokenizerOfMarks(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def of_tool_calls(
    style: ToolCallFormat,
    tools: Sequence[Tool],
    tokenizer: TokenizerOfMarks,
    *,
    only: str | None = None,
    several: bool,
    instead: Demand | None = None,
) -> Demand:
    """Answers that are tool calls, as a model of this style writes them.

    only     the one function to call
    several  more than one call may be made
    instead  what the answer may also be, from `from_response_format`
    """

    def mark(text: str) -> str:
        """A mark is one token in most models that write it, and as text it would not be that."""
        ids = tokenizer.encode(text, add_special_tokens=False)
        return f"<[{ids[0]}]>" if len(ids) == 1 else _json(text)

    key = "parameters" if style == "llama3_json" else "arguments"
    listed = [(i, tool.function) for i, tool in enumerate(tools)]
    offered = [(i, function) for i, function in listed if only in (None, function.name)]
    one = " | ".join(f"f{i}" for i, _ in offered)
    more = {"hermes": '("\\n" call)*', "mistral": '(", " call)*', "llama3_json": '("; " call)*'}
    calls = f"call {more[style]}" if several else "call"
    if style == "mistral":
        calls = f'{mark("[TOOL_CALLS]")} "[" {calls} "]"'
    call = f"({one})"
    if style == "hermes":
        call = f'{mark("<tool_call>")} "\\n" {call} "\\n" {mark("</tool_call>")}'
    rules = {f"start: {'calls' if instead is None else 'calls | answer'}": "tools"}
    rules |= {f"calls: {calls}": "tools", f"call: {call}": "tools"}
    for i, function in offered:
        before = _json(f'{{"name": {_json(function.name)}, "{key}": ')
        parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
        schema = {"type": "object"} | parameters | {"x-guidance": _ONE_LINE}
        rules[f'f{i}: {before} %json {_json(schema)} "}}"'] = f"tools[{i}].function.parameters"
    if instead is not None:
        answer = _ANY_OBJECT if instead.params is None else instead.params.json or _ANY_OBJECT
        rules[f"answer: %json {_json(answer)}"] = instead.place or "response_format"
    return Demand(StructuredOutputsParams(grammar="\n".join(rules)), lines=list(rules.values()))


def _json(value: Any) -> str:
    """JSON; of a string, also a string of a Lark grammar."""
    return json.dumps(value, ensure_ascii=False)
