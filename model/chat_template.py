"""Messages to a prompt, by the Jinja template that a model brings along.

Behaves like `apply_chat_template` of transformers: same globals, filters and whitespace rules.
Templates are code from strangers: they run in Jinja's sandbox, their loops within a limit of time
and their output within one of size. (What the limits do not see: a macro that calls itself twice,
and a string that one filter makes huge.) Validating messages is the API's business.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cuengine.errors import ModelError, RequestError
from cuengine.model.json_file import read_json_object
from cuengine.model.tokenizer import SPECIAL_TOKEN_NAMES, token_content

MAX_PROMPT_CHARACTERS = 16 * 1024 * 1024
MAX_POWER_BITS = 2**16
MAX_CPU_SECONDS = 5.0

_IN_TIME = "in_time"
_cpu_deadline: ContextVar[float] = ContextVar("cpu_deadline")


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks, for training, what the model wrote."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses products and powers that would not fit into memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            whole = isinstance(left, int) and isinstance(right, int)
            if whole and left.bit_length() * right > MAX_POWER_BITS:
                raise SecurityError(f"a power with the exponent {right}")
        else:
            for value, count in ((left, right), (right, left)):
                copied = isinstance(value, str | list | tuple) and isinstance(count, int)
                if copied and len(value) * count > MAX_PROMPT_CHARACTERS:
                    raise SecurityError(f"{count} copies of {len(value)} items")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A model's chat template, or several by name ("default", "tool_use").

    takes_tools       it shows the model the tools of a request
    tool_call_format  how a model with this template writes its calls; None: not known
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ModelError, with the line, for a template that is not Jinja."""
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        self._templates: dict[str, jinja2.Template] = {}
        self.takes_tools = False
        self.tool_call_format = _tool_call_format("\n".join(templates.values()))
        for name, source in templates.items():
            try:
                tree = environment.parse(source)
                self.takes_tools |= any(name.name == "tools" for name in tree.find_all(nodes.Name))
                for loop in tree.find_all(nodes.For):
                    loop.iter = nodes.Filter(loop.iter, _IN_TIME, [], [], None, None)
                self._templates[name] = environment.from_string(tree)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}"
                ) from None
            except (RecursionError, SyntaxError, ValueError) as error:
                raise ModelError(f"chat template {name!r}: cannot be compiled: {error}") from None

    @classmethod
    def from_folder(cls, folder: Path, override: str | None = None) -> ChatTemplate | None:
        """The template of a model folder, or None where it has none.

        override: a template to use instead, as text or as the path of a file with it. Where both
        are there, chat_template.jinja wins over tokenizer_config.json.
        Raises ModelError for a file that cannot be read and for a broken template.
        """
        config = _read_if_there(folder / "tokenizer_config.json")
        tokens = _special_tokens(_read_if_there(folder / "special_tokens_map.json") | config)
        templates = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
        if (folder / "chat_template.json").is_file():
            path = folder / "chat_template.json"
            templates |= _named_templates(read_json_object(path).get("chat_template"), path)
        if (folder / "chat_template.jinja").is_file():
            templates["default"] = _read_text(folder / "chat_template.jinja")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = _read_text(path)
        if override is not None:
            templates = {"default": _text_or_file(override)}
        return cls(templates, tokens) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`.

        continue_final_message  end within the last message, for the model to go on with it
        tools, documents, kwargs  are handed to the template
        Raises RequestError where the template refuses the messages or fails on them.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        context = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._run(self._pick(tools), context)
        return _up_to_final_content(prompt, messages) if continue_final_message else prompt

    def _pick(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise RequestError(
            f"the model has the chat templates {', '.join(sorted(self._templates))} but no "
            "default; choose one with --chat-template"
        )

    def _run(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        _cpu_deadline.set(time.thread_time() + MAX_CPU_SECONDS)
        try:
            for part in template.generate(context):
                parts.append(part)
                size += len(part)
                if size > MAX_PROMPT_CHARACTERS:
                    raise RequestError(
                        f"the chat template made more than {MAX_PROMPT_CHARACTERS} characters"
                    )
        except RequestError:
            raise
        except SecurityError as error:
            raise RequestError(f"the chat template did what it must not: {error}") from None
        except Exception as error:  # a template may raise whatever Python can
            raise RequestError(
                f"the chat template failed on these messages: {error or type(error).__name__}",
                param="messages",
            ) from None
        return "".join(parts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_IN_TIME] = _in_time
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML characters, which a model has never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _in_time(items: Iterable[Any]) -> Iterator[Any]:
    """What a loop runs over, until the time is over."""
    deadline = _cpu_deadline.get()
    for item in items:
        if time.thread_time() > deadline:
            raise RequestError(
                f"the chat template ran for more than {MAX_CPU_SECONDS:g} s on these messages",
                param="messages",
            )
        yield item


def _raise_exception(message: str) -> None:
    raise RequestError(f"the chat template refuses these messages: {message}", param="messages")


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def _up_to_final_content(prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cuts what the template puts behind the last message's content."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message needs a last message with text in `content`", param="messages"
        )
    start = prompt.rfind(content.strip())
    if start < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the last message's content, so it "
            "is not known where to go on",
            param="continue_final_message",
        )
    end = start + len(content.strip())
    if prompt.startswith(content.lstrip(), start):
        end = start + len(content.lstrip())
    return prompt[:end]


ToolCallFormat = Literal["hermes", "mistral", "llama3_json"]

# What a template contains, in the calls of earlier turns or in what it tells the model to write.
_CALL_MARKS: tuple[tuple[str, ToolCallFormat], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)


def _tool_call_format(source: str) -> ToolCallFormat | None:
    return next((style for mark, style in _CALL_MARKS if mark in source), None)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    tokens: dict[str, Any] = {}
    for name in SPECIAL_TOKEN_NAMES:
        content = token_content(config.get(name))
        if content is not None:
            tokens[name] = content
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens["additional_special_tokens"] = [token_content(token) for token in more]
    return tokens


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """A template as text, or a list of {"name", "template"}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (KeyError, TypeError):
        templates = {"": None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ModelError(f"{path}: chat_template is neither text nor a list of named templates")
    return templates


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8 text") from None


def _text_or_file(override: str) -> str:
    """Text with Jinja's braces or a line break is a template; anything else must be a file."""
    if any(mark in override for mark in ("{{", "{%", "{#", "\n")):
        return override
    path = Path(os.path.expanduser(override))
    if not os.path.isfile(path):
        raise ModelError(f"--chat-template {override}: no such file, and no Jinja template either")
    return _read_text(path)
