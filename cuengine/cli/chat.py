"""`cuengine chat`: a conversation in the terminal, or with a pipe: one message a line."""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import secrets
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from cuengine.cli.arguments import engine_config, sampling_params
from cuengine.cli.start import build_engine, note
from cuengine.errors import ModelError, RequestError

if TYPE_CHECKING:
    from cuengine.async_engine import AsyncEngine
    from cuengine.sampling_params import SamplingParams

PROMPT = ">>> "
HELP = """/reset  forget the conversation
/exit   leave; so does Ctrl-D
/help   this
Ctrl-C stops an answer, what it said so far stays in the conversation."""
ANSWER_ROOM = 512
"""Tokens kept free for an answer, or --max-tokens if less; at most a quarter of the context."""

Message = dict[str, str]


def run(args: argparse.Namespace) -> int:
    sampling_params(args)
    config = engine_config(args)
    if args.seed is None:
        config.seed = secrets.randbits(31)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() its line editing and history)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    name, engine = build_engine(config)
    if engine.tokenizer is None or engine.chat_template is None:
        raise ModelError(
            f"{name}: has no {'chat template' if engine.tokenizer else 'tokenizer.json'}, "
            "which chat needs. --chat-template names one; `cuengine generate` sends plain text"
        )
    # A Runner turns Ctrl-C during an answer into its cancellation, and can then go on.
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            chat = Chat(engine, sampling_params(args, engine.generation_defaults), args.system)
            if interactive:
                note(f"{name}, context {engine.max_model_len} tokens. /help lists the commands.")
            _talk(chat, runner, interactive)
        finally:
            runner.run(engine.stop())
    return 0


def _talk(chat: Chat, runner: asyncio.Runner, interactive: bool) -> None:
    while True:
        try:
            line = input(PROMPT if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("\nCtrl-D or /exit leaves.")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
            note("The conversation is forgotten.")
        elif line == "/help":
            note(HELP)
        elif line.startswith("/") and " " not in line:
            note(f"No command {line}.\n{HELP}")
        elif line:
            _answer(chat, line, runner, interactive)


def _answer(chat: Chat, line: str, runner: asyncio.Runner, interactive: bool) -> None:
    try:
        runner.run(chat.answer(line))
    except KeyboardInterrupt:
        if not interactive:
            raise
        note("\n(stopped)")
    except RequestError as error:
        note(f"cuengine: {error}")


class Chat:
    """A conversation and the engine that continues it.

    messages  what was said, without the system message; oldest turns go when they fill the context
    """

    def __init__(self, engine: AsyncEngine, params: SamplingParams, system: str | None) -> None:
        self.engine = engine
        self.params = params
        self.system: list[Message] = []
        if system is not None:
            self.system.append({"role": "system", "content": system})
        self.messages: list[Message] = []
        self._request_ids = map("chat-{}".format, itertools.count())

    def reset(self) -> None:
        self.messages.clear()

    async def answer(self, text: str) -> None:
        """Streams the answer to `text` to stdout. A stopped one stays as far as it came.

        Raises RequestError, and forgets the message, where it alone is too long.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        token_ids, dropped = self._fit(messages)
        if dropped:
            note(f"({dropped} oldest messages dropped: the context is full)")
        said: list[str] = []
        finish_reason = None
        deltas = self.engine.generate(token_ids, self.params, request_id=next(self._request_ids))
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    for sequence in delta.sequences:
                        said.append(sequence.text)
                        finish_reason = sequence.finish_reason
                        sys.stdout.write(sequence.text)
                        sys.stdout.flush()
        finally:
            if said:
                answer = {"role": "assistant", "content": "".join(said)}
                self.messages = [*messages[dropped:], answer]
        print(flush=True)
        if finish_reason == "length":
            note("(cut off: --max-tokens or the context was reached)")

    def _fit(self, messages: list[Message]) -> tuple[list[int], int]:
        """The prompt's tokens and how many of the oldest messages had to go to leave room."""
        context = self.engine.max_model_len
        room = min(self.params.max_tokens or ANSWER_ROOM, ANSWER_ROOM, context // 4)
        for dropped in range(0, len(messages), 2):
            token_ids = self._render(messages[dropped:])
            if len(token_ids) + room <= context:
                return token_ids, dropped
        return token_ids, len(messages) - 1

    def _render(self, messages: list[Message]) -> list[int]:
        template, tokenizer = self.engine.chat_template, self.engine.tokenizer
        assert template is not None
        assert tokenizer is not None
        text = template.render([*self.system, *messages])
        return tokenizer.encode(text, add_special_tokens=False)
