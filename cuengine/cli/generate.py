"""`cuengine generate`: one prompt in, its continuation out as the tokens come."""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from cuengine.cli.arguments import UsageError, engine_config, sampling_params
from cuengine.cli.start import model_folder
from cuengine.errors import ModelError

if TYPE_CHECKING:
    from cuengine.engine import Engine
    from cuengine.model.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat: without it the prompt is sent as it is")
    sampling_params(args)
    config = engine_config(args)
    if args.seed is None:
        config.seed = secrets.randbits(31)
    prompt = _prompt(args)
    name, folder = model_folder(config)

    from cuengine.loading import load_engine

    # In this process: one request needs no engine that may die and come back.
    engine = load_engine(dataclasses.replace(config, model=str(folder), revision=None))
    loaded = time.perf_counter() - started
    result = _generate(engine, args, prompt)
    if args.json:
        result["model"] = name
        result["seconds"] = {"load": round(loaded, 3), **result["seconds"]}
        print(json.dumps(result, ensure_ascii=not _is_unicode(sys.stdout)))
    return 0


def _is_unicode(stream: TextIO) -> bool:
    """It takes any text; elsewhere JSON has a spelling of its own for it."""
    return (stream.encoding or "").lower().startswith("utf")


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt != "-":
        given = args.prompt.encode("utf-8", "surrogateescape")
    else:
        given = sys.stdin.buffer.read()
    try:
        prompt: str = given.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not prompt:
        raise UsageError("the prompt is empty")
    return prompt


def _prompt_token_ids(
    engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace, prompt: str
) -> list[int]:
    if not args.chat:
        return tokenizer.encode(prompt)
    if engine.model.chat_template is None:
        raise ModelError("the model has no chat template; name one with --chat-template")
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    rendered = engine.model.chat_template.render(messages)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _generate(engine: Engine, args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """Streams the text to stdout, unless the whole result is asked for; returns that result."""
    from cuengine.output_processor import OutputProcessor

    tokenizer = engine.model.tokenizer
    if tokenizer is None:
        raise ModelError("the model has no tokenizer.json, without which there is no text")
    token_ids = _prompt_token_ids(engine, tokenizer, args, prompt)
    params = sampling_params(args, engine.model.generation_defaults)
    processor = OutputProcessor(tokenizer, engine.finish_sequence)
    started = time.perf_counter()
    processor.check_request(params)
    engine.add_request("generate", token_ids, params)
    processor.add_request("generate", token_ids, params)
    first: float | None = None
    text: list[str] = []
    num_tokens = 0
    finish_reason = stop_reason = None
    while engine.has_unfinished():
        for delta in processor.process(engine.step()):
            for sequence in delta.sequences:
                if first is None and sequence.token_ids:
                    first = time.perf_counter() - started
                num_tokens += len(sequence.token_ids)
                text.append(sequence.text)
                if sequence.finish_reason is not None:
                    finish_reason = sequence.finish_reason
                    stop_reason = sequence.stop_reason
                if not args.json:
                    sys.stdout.write(sequence.text)
                    sys.stdout.flush()
    if not args.json:
        print()
    return {
        "prompt": prompt,
        "text": "".join(text),
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "usage": {"prompt_tokens": len(token_ids), "completion_tokens": num_tokens},
        "seconds": {
            "first_token": first and round(first, 3),
            "total": round(time.perf_counter() - started, 3),
        },
    }
