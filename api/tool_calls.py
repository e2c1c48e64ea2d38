"""Tool calls out of a model's text, while it comes. How tools get into a prompt is the template's
business; which of the formats a model writes is read from its template, or set by the operator.

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>, also Qwen's
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], and the newer
                 [TOOL_CALLS]f[ARGS]{...}
    llama3_json  {"name": "f", "parameters": {...}} alone or after <|python_tag|>, more after a ";"

Text that turns out to be no call is given back as text: nothing the model said is lost, but for
white space around calls. A whole answer is parsed by the same code as a streamed one.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from cuengine.api.settings import ToolCallFormat

_ARGUMENTS = ("arguments", "parameters")
_WHITE = " \t\r\n"
_NAME = re.compile(r"[\w.-]{1,256}")


@dataclass(frozen=True, slots=True)
class Text:
    """Content of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; index counts the answer's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments, which are JSON as the model wrote it."""

    index: int
    text: str


Piece = Text | CallStart | CallArguments


class ToolCallParser:
    """Splits one sample's text into content and calls.

    known     names of the request's tools: a bare JSON object is a call only if it names one
    parallel  false: calls after the first are dropped
    """

    def __init__(self, style: ToolCallFormat, known: Iterable[str], *, parallel: bool) -> None:
        self._known = frozenset(known)
        self._parallel = parallel
        self._style = style
        self._tag = {
            "hermes": "<tool_call>",
            "mistral": "[TOOL_CALLS]",
            "llama3_json": "<|python_tag|>",
        }[style]
        self._text = ""
        self._state: Callable[[bool], bool] = (
            self._at_start if style == "llama3_json" else self._outside
        )
        self._call: _JsonCall | None = None
        self._opened_by = ""
        self._in_array = False
        self._white = ""
        self._after_a_call = False
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """What is still held back when the sample has ended."""
        pieces = self._run(final=True)
        if self._white and not self.num_calls:
            pieces.append(Text(self._white))
            self._white = ""
        return pieces

    def _run(self, *, final: bool) -> list[Piece]:
        self._pieces = []
        while self._state(final):
            pass
        return self._pieces

    # Each state takes what it can from `_text` and says whether to go on at once.

    def _at_start(self, final: bool) -> bool:
        """llama3_json: an answer that is nothing but calls begins with a brace."""
        stripped = self._text.lstrip(_WHITE)
        if not stripped and not final:
            return False
        if stripped.startswith("{"):
            self._begin_call(self._text[: len(self._text) - len(stripped)], stripped)
        else:
            self._state = self._outside
        return True

    def _outside(self, final: bool) -> bool:
        before, tag, after = self._text.partition(self._tag)
        if tag:
            self._say(before)
            if self._style == "mistral":
                self._opened_by, self._text, self._state = tag, after, self._after_mistral_tag
            else:
                self._begin_call(tag, after)
            return True
        held = 0 if final else _overlap(self._text, self._tag)
        shown = len(self._text) - held
        self._say(self._text[:shown])
        self._text = self._text[shown:]
        return False

    def _begin_call(self, opened_by: str, rest: str) -> None:
        self._opened_by, self._text = opened_by, rest
        self._call, self._state = _JsonCall(), self._inside

    def _inside(self, final: bool) -> bool:
        call = self._call
        assert call is not None
        self._text = self._text[call.feed(self._text) :]
        if not call.announced and call.name and self._accepts(call.name):
            self._announce(call)
        self._forward(call)
        if call.failed or (final and not call.done) or (call.done and not call.announced):
            self._give_up(call)
            return True
        if call.done:
            self._state = self._after_call
        return call.done

    def _accepts(self, name: str) -> bool:
        bare = self._style == "llama3_json" and self._tag not in self._opened_by
        return name in self._known or not (bare and self.num_calls == 0)

    def _give_up(self, call: _JsonCall) -> None:
        """What looked like a call is none; one that was announced already stays as far as it is."""
        if not call.announced:
            self._say(self._opened_by + call.raw)
        self._in_array, self._call, self._state = False, None, self._outside

    def _after_call(self, final: bool) -> bool:
        """Between two calls, or after the last one."""
        stripped = self._text.lstrip(_WHITE)
        if self._style == "hermes":
            return self._after_hermes_call(stripped, final)
        separator = {"llama3_json": ";", "mistral": ","}[self._style]
        if not stripped and not final:
            return False
        if self._style == "mistral" and not self._in_array:
            self._text, self._state = stripped, self._outside
        elif stripped.startswith(separator):
            self._begin_call(separator, stripped[1:])
        else:
            self._in_array = False
            self._text = stripped.removeprefix("]" if self._style == "mistral" else "")
            self._state = self._outside
        return True

    def _after_hermes_call(self, stripped: str, final: bool) -> bool:
        closing = "</tool_call>"
        if closing.startswith(stripped) and stripped != closing and not final:
            return False
        whole = stripped.startswith(closing) or (final and closing.startswith(stripped))
        self._text = stripped[len(closing) :] if whole else stripped
        self._state = self._outside
        return True

    def _after_mistral_tag(self, final: bool) -> bool:
        stripped = self._text.lstrip(_WHITE)
        if not stripped and not final:
            return False
        opened_by = self._opened_by + self._text[: len(self._text) - len(stripped)]
        self._in_array = stripped.startswith("[")
        if self._in_array:
            self._begin_call(opened_by + "[", stripped[1:])
            return True
        if stripped.startswith("{"):
            self._begin_call(opened_by, stripped)
            return True
        return self._mistral_name(final)

    def _mistral_name(self, final: bool) -> bool:
        """`f[ARGS]{...}`, with `[CALL_ID]...` between in some versions."""
        head, brace, _ = self._text.partition("{")
        name = head.removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
        good = _NAME.fullmatch(name) is not None
        if brace and good:
            call = _JsonCall.of_name(name, head)
            self._call, self._state, self._text = call, self._inside, self._text[len(head) :]
            return True
        if not brace and not final and len(head) < 512 and "\n" not in head.strip():
            return False
        self._say(self._opened_by)
        self._state = self._outside
        return True

    # What becomes of it.

    def _say(self, text: str) -> None:
        """Content, without the white space beside calls."""
        text = self._white + text
        if self._after_a_call:
            text = text.lstrip(_WHITE)
            self._after_a_call = not text
        kept = text.rstrip(_WHITE)
        self._white = text[len(kept) :]
        if kept:
            self._pieces.append(Text(kept))

    def _announce(self, call: _JsonCall) -> None:
        call.announced = True
        call.index = self.num_calls
        self.num_calls += 1
        self._white, self._after_a_call = "", True
        if self._wanted(call):
            self._pieces.append(CallStart(call.index, self._new_id(), call.name))

    def _forward(self, call: _JsonCall) -> None:
        if call.announced and (text := call.take_arguments()) and self._wanted(call):
            self._pieces.append(CallArguments(call.index, text))

    def _wanted(self, call: _JsonCall) -> bool:
        return self._parallel or call.index == 0

    def _new_id(self) -> str:
        if self._style == "mistral":  # whose templates insist on nine letters and digits
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class _JsonCall:
    """One call, a JSON object that comes in pieces. The order of its keys does not matter.

    raw     all it has taken, in case that it is no call
    failed  it is no JSON object
    """

    def __init__(self) -> None:
        self.name = ""
        self.index = 0
        self.announced = self.done = self.failed = False
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = False
        self._expect: Literal["{", "key", ":", "value", ",", "in value"] = "{"
        self._key: str | None = None
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._only_arguments = False

    @classmethod
    def of_name(cls, name: str, head: str) -> _JsonCall:
        """A call whose name is known: the object that comes is its arguments."""
        call = cls()
        call.name, call._raw = name, [head]
        call._expect, call._key, call._only_arguments = "value", _ARGUMENTS[0], True
        return call

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        if self.done and not self._has_arguments:
            self._has_arguments = True
            return text or "{}"
        return text

    def feed(self, text: str) -> int:
        """Takes what belongs to the object; returns how many characters that was."""
        taken = 0
        while taken < len(text) and not (self.done or self.failed):
            self._take(text[taken])
            taken += 1
        self._raw.append(text[:taken])
        return taken

    def _take(self, character: str) -> None:
        if self._expect == "in value":
            self._take_value(character)
        elif character in _WHITE:
            return
        elif self._expect == "{" and character == "{":
            self._expect = "key"
        elif character == "}" and self._expect in ("key", ","):
            self.done = True
        elif (self._expect == "key" and character == '"') or self._expect == "value":
            if character in "}],:":
                self.failed = True
            else:
                self._expect = "in value"
                self._take_value(character)
        elif self._expect == ":" and character == ":":
            self._expect = "value"
        elif self._expect == "," and character == ",":
            self._expect = "key"
        else:
            self.failed = True

    def _take_value(self, character: str) -> None:
        """One character of a value, or of a key, which is a value too."""
        if not self._value:
            self._in_string = character == '"'
            self._depth = character in "{["
            self._escaped = False
            self._add(character)
            return
        if self._in_string:
            self._add(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if not self._depth:
                    self._end_value()
            return
        if not self._depth and character in ",}" + _WHITE:  # the end of a number or of null
            self._end_value()
            if not self.failed:
                self._take(character)
            return
        self._add(character)
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        if not self._depth and character in "}]":
            self._end_value()

    def _add(self, character: str) -> None:
        self._value.append(character)
        if self._key in _ARGUMENTS and self._value[0] in "{[":
            self._arguments.append(character)

    def _end_value(self) -> None:
        text, self._value = "".join(self._value), []
        if self._key in _ARGUMENTS and text[0] in "{[":
            self._has_arguments = True
            self._after_value()
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if self._key is None:
            self._key, self._expect = value, ":"
            return
        if self._key == "name" and isinstance(value, str):
            self.name = self.name or value
        elif self._key in _ARGUMENTS and value is not None:
            # Some models write the arguments as JSON within a string.
            self._arguments.append(value if isinstance(value, str) else text)
            self._has_arguments = True
        self._after_value()

    def _after_value(self) -> None:
        self._key, self._expect = None, ","
        self.done = self._only_arguments


def _overlap(text: str, tag: str) -> int:
    """Characters at the text's end that may become `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
