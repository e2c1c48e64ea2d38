"""`cuengine`: runs one command and turns what goes wrong into one line and an exit code.

0 done, 1 failed, 2 used wrongly, 130 interrupted. CUENGINE_DEBUG=1 shows the traceback of errors
that are otherwise one line; errors that nobody expected always show theirs.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TypeGuard

from cuengine.errors import CuengineError
from cuengine.shortage import shortage

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: the process's arguments); returns its exit code."""
    _open_standard_streams()
    _write_anything()
    argv = sys.argv[1:] if argv is None else argv
    args: argparse.Namespace | None = None
    try:
        # In here, so that Ctrl-C is quiet from the first moment on.
        from cuengine.cli.arguments import build_parser

        args = build_parser().parse_args(argv)
        _set_up_logging(args)
        command = importlib.import_module(f"cuengine.cli.{args.command}")
        code: int = command.run(args)
        sys.stdout.flush()
    except CuengineError as error:
        if os.environ.get("CUENGINE_DEBUG") == "1":
            raise
        from cuengine.cli.arguments import UsageError
        from cuengine.cli.flags import in_flags

        message = str(error) if args is None else in_flags(str(error), args, argv)
        print(f"cuengine: {' '.join(message.split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()  # whoever read it has gone
        return 1
    except (OSError, MemoryError, RuntimeError) as error:
        if _of_output(error):
            _discard_output()
            why = f"the output cannot be written: {error.strerror}"
        elif (short_of := shortage(error)) and os.environ.get("CUENGINE_DEBUG") != "1":
            why = short_of
        else:
            raise
        print(f"cuengine: {why}", file=sys.stderr)
        return 1
    return code


def _of_output(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS and error.filename is None


def _open_standard_streams() -> None:
    """Python has None for streams that the caller closed; nothing here is to trip over that, and no
    process that is started from here: else the next file that is opened would be its stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (to the process's end)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _write_anything() -> None:
    """No text and no name of a file is to fail for the terminal's encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """The interpreter must not try to flush at exit what could not be written before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_up_logging(args: argparse.Namespace) -> None:
    """By flag, else by $CUENGINE_LOG, else what fits the command."""
    from cuengine.cli.arguments import LOG_LEVELS, UsageError
    from cuengine.cli.log import log_to_stderr

    level = args.log_level or os.environ.get("CUENGINE_LOG", "").lower()
    if not level:
        level = "info" if args.command == "serve" else "warning"
    if level not in LOG_LEVELS:
        raise UsageError(f"CUENGINE_LOG={level!r} is not one of: {', '.join(LOG_LEVELS)}")
    asked = args.log_level or "CUENGINE_LOG" in os.environ
    log_to_stderr(
        level,
        getattr(args, "log_format", "text"),
        explain_waits=not asked and sys.stderr.isatty(),
    )


if __name__ == "__main__":
    sys.exit(main())
