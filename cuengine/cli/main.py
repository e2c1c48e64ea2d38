"""`cuengine`: runs one command and turns what goes wrong into one line and an exit code.

0 done, 1 failed, 2 used wrongly, 130 interrupted. CUENGINE_DEBUG=1 shows the traceback of errors
that are otherwise one line; errors that nobody expected always show theirs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from cuengine.cli.arguments import LOG_LEVELS, UsageError, build_parser
from cuengine.cli.log import log_to_stderr
from cuengine.errors import CuengineError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: the process's arguments); returns its exit code."""
    try:
        args = build_parser().parse_args(argv)
        _set_up_logging(args)
        command = importlib.import_module(f"cuengine.cli.{args.command}")
        code: int = command.run(args)
        sys.stdout.flush()
    except CuengineError as error:
        if os.environ.get("CUENGINE_DEBUG") == "1":
            raise
        print(f"cuengine: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _set_up_logging(args: argparse.Namespace) -> None:
    """By flag, else by $CUENGINE_LOG, else what fits the command."""
    level = args.log_level or os.environ.get("CUENGINE_LOG", "").lower()
    if not level:
        level = "info" if args.command == "serve" else "warning"
    if level not in LOG_LEVELS:
        raise UsageError(f"CUENGINE_LOG={level!r} is not one of: {', '.join(LOG_LEVELS)}")
    log_to_stderr(level, getattr(args, "log_format", "text"))


if __name__ == "__main__":
    sys.exit(main())
