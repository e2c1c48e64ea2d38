"""The flags of every command, and the settings that they come to.

Imports nothing heavy: `cuengine --help` is answered from here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cuengine.cli.server_arguments import add_server
from cuengine.cli.values import count, memory_size, number, text, whole
from cuengine.config import BLOCK_SIZES, DEFAULT_MODEL, DEVICES, DTYPES, EngineConfig
from cuengine.device.kernel_variants import DTYPES as KERNEL_DTYPES
from cuengine.device.kernel_variants import HEAD_DIMS
from cuengine.errors import ConfigError, CuengineError, RequestError

if TYPE_CHECKING:
    from cuengine.model.generation_config import GenerationDefaults
    from cuengine.sampling_params import SamplingParams

LOG_LEVELS = ("debug", "info", "warning", "error")
TERMINAL_TEMPERATURE = 0.7
"""For `chat` and `generate` where neither a flag nor the model's generation_config.json says."""


class UsageError(CuengineError):
    """Something on the command line that cannot be used; exit code 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """What settings refuse was typed: UsageError in place of ConfigError and RequestError."""
    try:
        yield
    except (ConfigError, RequestError) as error:
        raise UsageError(str(error)) from error


class _Parser(argparse.ArgumentParser):
    """Answers wrong usage with one line that says where to look."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _CommandParser(_Parser):
    """Of one command: what it does not know is its own error, and not that of all commands."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Version(argparse.Action):
    """Looks the version up only when asked: importlib.metadata costs more than all of --help."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from importlib.metadata import version

        print(f"cuengine {version('cuengine')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cuengine",
        description="A small serving engine for LLaMA-family models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:], allow_abbrev=False
        )
        added.add_argument(
            "--log-level",
            choices=LOG_LEVELS,
            help="what is logged to stderr (default: $CUENGINE_LOG, else info for serve and "
            "warning for the others)",
        )
        return added

    serve = command("serve", "serve a model through OpenAI's HTTP interface")
    _add_model(serve)
    _add_engine(serve)
    add_server(serve)

    chat = command("chat", "talk to a model in the terminal")
    _add_model(chat)
    chat.add_argument(
        "--system", type=text, metavar="TEXT", help="what the model is told before all else"
    )
    _add_sampling(chat, max_tokens=1024)
    _add_engine(chat)

    generate = command("generate", "continue a text, to stdout")
    _add_model(generate)
    generate.add_argument(
        "-p", "--prompt", required=True, metavar="TEXT", help="text to go on from; -: all of stdin"
    )
    generate.add_argument(
        "--chat",
        action="store_true",
        help="send the text as a user's message, through the model's chat template",
    )
    generate.add_argument("--system", type=text, metavar="TEXT", help="system message, with --chat")
    generate.add_argument(
        "--json", action="store_true", help="print the whole result as one line of JSON"
    )
    _add_sampling(generate, max_tokens=256)
    _add_engine(generate)

    profile = command("profile", "show where the time of prefill and decode steps goes")
    _add_model(profile)
    _add_profile(profile)

    pull = command("pull", "fetch a model and prepare it, so that it starts at once")
    _add_model(pull)

    compile_ = command("compile", "build kernels ahead: CUDA's, with no GPU present, or the CPU's")
    _add_compile(compile_)

    info = command("info", "show what cuengine finds on this machine; for bug reports")
    info.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=count,
        default=8,
        metavar="N",
        help="sequences at once (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=count,
        default=256,
        metavar="TOKENS",
        help="length of each prompt, with which decoding begins (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=32,
        metavar="N",
        help="decode steps; prefill takes those that the prompts need (default: %(default)s)",
    )
    parser.add_argument(
        "--trace", type=_path, metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="print all of it as one line of JSON")
    _add_machine(parser.add_argument_group("engine"))


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: for $NUMBA_CPU_NAME, or this CPU; takes no more than --out (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--arch", type=_architectures, metavar="sm_80,sm_90", help="GPU architectures, with commas"
    )
    parser.add_argument(
        "--out",
        type=_path,
        metavar="DIR",
        help="folder to write the kernels to (cpu: default the user's cache)",
    )
    parser.add_argument(
        "--head-dim",
        type=_choices(*map(str, HEAD_DIMS)),
        metavar="64,128",
        help="head sizes (default: all)",
    )
    parser.add_argument(
        "--dtype",
        type=_choices(*KERNEL_DTYPES),
        metavar="bfloat16,float16",
        help="dtypes of weights and activations (default: all)",
    )
    parser.add_argument(
        "--cuda",
        type=whole,
        choices=(12, 13),
        help="CUDA version to compile with (default: newest)",
    )


def _architectures(names: str) -> list[int]:
    if not re.fullmatch(r"sm_\d+(,sm_\d+)*", names):
        raise argparse.ArgumentTypeError(f"{names!r} is not a list such as sm_80,sm_90")
    return [int(name[3:]) for name in names.split(",")]


def _path(path: str) -> Path:
    return Path(text(path))


def _choices(*allowed: str) -> Callable[[str], list[Any]]:
    """Reads a list with commas of the values allowed; numbers come as int."""

    def read(value: str) -> list[Any]:
        names = value.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: not one of {', '.join(allowed)}"
            )
        return [int(name) if name.isdecimal() else name for name in names]

    return read


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=text,
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a folder, a .gguf file, a hub name (org/name, org/name:FILE.gguf) or a built-in "
        "name (default: %(default)s)",
    )
    parser.add_argument("--revision", type=text, help="branch, tag or commit of a hub name")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    """What an engine runs on, and the sizes that its speed depends on."""
    default = EngineConfig()
    group.add_argument(
        "--device",
        choices=DEVICES,
        default=default.device,
        help="auto: cuda where a GPU can be used, else cpu; emulated: the CUDA kernels on the "
        "host, for work on them (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default=default.dtype,
        help="of weights, activations and KV cache (default: the checkpoint's; float32 on cpu)",
    )
    group.add_argument(
        "--block-size",
        type=whole,
        choices=BLOCK_SIZES,
        default=default.block_size,
        help="tokens per KV block (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=whole,
        metavar="N",
        default=default.max_num_batched_tokens,
        help="tokens in one step; longer prompts are split (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory for the KV cache, as 2GiB (of 1024^3 bytes) or 512MB (of 1000^2 bytes); "
        "default: a share of what is free",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=number,
        metavar="SHARE",
        default=default.gpu_memory_utilization,
        help="part of the GPU's memory to use in all (default: %(default)s)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="launch each kernel of a decode step, not a CUDA graph of them",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    default = EngineConfig()
    _add_machine(group)
    group.add_argument(
        "--max-model-len",
        type=whole,
        metavar="TOKENS",
        help="longest prompt and output together (default: the model's limit)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=whole,
        metavar="N",
        default=default.max_num_seqs,
        help="sequences that run at once (default: %(default)s)",
    )
    group.add_argument(
        "--swap-space",
        type=number,
        metavar="GIB",
        default=default.swap_space,
        help="host memory for the KV blocks of preempted requests, instead of computing them again "
        "(default: %(default)g GiB)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=default.enable_prefix_caching,
        help="reuse the KV blocks of prompts that begin alike (default: on)",
    )
    group.add_argument(
        "--speculative-config",
        type=text,
        metavar="JSON",
        help="guess tokens and verify several in one step, for example "
        '\'{"method": "ngram", "num_speculative_tokens": 4}\' or '
        '\'{"model": "folder", "num_speculative_tokens": 4}\'',
    )
    group.add_argument(
        "--chat-template",
        type=text,
        metavar="FILE",
        help="Jinja template to use instead of the model's",
    )


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=whole,
        metavar="N",
        default=max_tokens,
        help="longest output (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help=f"0: greedy (default: the model's, else {TERMINAL_TEMPERATURE})",
    )
    group.add_argument(
        "--top-p",
        type=number,
        metavar="P",
        help="draw from the likeliest tokens that together reach this probability (default: the "
        "model's, else 1)",
    )
    group.add_argument(
        "--top-k",
        type=whole,
        metavar="K",
        help="draw from so many of the likeliest tokens; 0: all (default: the model's, else 0)",
    )
    group.add_argument(
        "--min-p",
        type=number,
        metavar="P",
        default=0.0,
        help="draw none that is less likely than this share of the likeliest (default: 0)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=number,
        metavar="R",
        help="above 1: less of what prompt and output have (default: the model's, else 1)",
    )
    group.add_argument(
        "--presence-penalty",
        type=number,
        metavar="R",
        default=0.0,
        help="above 0: less of what the output has (default: 0)",
    )
    group.add_argument(
        "--frequency-penalty",
        type=number,
        metavar="R",
        default=0.0,
        help="above 0: less of it the more often it is there (default: 0)",
    )
    group.add_argument(
        "--stop",
        type=text,
        action="append",
        metavar="TEXT",
        default=[],
        help="ends the output; may be repeated for several",
    )
    group.add_argument(
        "--seed", type=whole, help="of what is drawn at random (default: another one each time)"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's end-of-sequence token"
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings; UsageError for a value out of range."""
    names = {field.name for field in fields(EngineConfig)} & vars(args).keys()
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    with usage_errors():
        return EngineConfig(**given)


def sampling_params(
    args: argparse.Namespace, model: GenerationDefaults | None = None
) -> SamplingParams:
    """How to sample: by flag, else as the model's generation_config.json says.

    Raises UsageError for a value out of range; call it once without a model, before one is loaded.
    """
    from cuengine.sampling_params import SamplingParams

    def first(flag: Any, name: str, otherwise: Any) -> Any:
        values = (flag, getattr(model, name, None), otherwise)
        return next(value for value in values if value is not None)

    with usage_errors():
        return SamplingParams(
            temperature=first(args.temperature, "temperature", TERMINAL_TEMPERATURE),
            top_p=first(args.top_p, "top_p", 1.0),
            top_k=first(args.top_k, "top_k", 0),
            min_p=args.min_p,
            repetition_penalty=first(args.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            max_tokens=args.max_tokens,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
            seed=args.seed,
        )
