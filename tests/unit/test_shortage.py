"""What a machine is short of is one line, on the command line and from the engine's process."""

from __future__ import annotations

import errno
import os

import pytest

from cuengine.cli import info
from cuengine.cli.main import main
from cuengine.engine_process import load_failed
from cuengine.errors import ConfigError, CuengineError, ModelError
from cuengine.shortage import shortage


def of_system(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


SHORT = [
    (of_system(errno.EMFILE), "Too many open files: raise the limit of open files (`ulimit -n`)"),
    (of_system(errno.ENFILE), "raise fs.file-max"),
    (of_system(errno.EAGAIN), "raise the limit of processes and threads (`ulimit -u`"),
    (of_system(errno.ENOMEM), "Cannot allocate memory: give it more (`ulimit -v`"),
    (of_system(errno.ENOSPC, "/a/b"), "/a/b: No space left on device: free some room"),
    (of_system(errno.EROFS, "/a/b"), "/a/b: Read-only file system: set CUENGINE_CACHE"),
    (MemoryError(), "out of memory: give it more"),
    (MemoryError("Unable to allocate 4.00 GiB"), "out of memory: Unable to allocate 4.00 GiB: "),
    (RuntimeError("can't start new thread"), "no further thread can be started: raise the limit"),
]


@pytest.mark.parametrize(("error", "says"), SHORT, ids=lambda value: str(value)[:30])
def test_a_shortage_is_one_line_of_the_command(
    error: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert main(["info"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("cuengine: ")
    assert says in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(("error", "says"), SHORT, ids=lambda value: str(value)[:30])
def test_a_shortage_while_the_engine_is_loaded_is_told_to_the_server(
    error: Exception, says: str
) -> None:
    failed = load_failed(error)
    assert failed is not None
    assert failed.error == "ConfigError"
    assert says in failed.message


def test_each_error_that_is_raised_on_purpose_needs_no_traceback_of_the_engine() -> None:
    """Also of kinds that the wire does not know, as where no compiler for kernels is found."""

    class NotInstalledError(CuengineError):
        pass

    for error, kind in (
        (ModelError("x"), "ModelError"),
        (ConfigError("x"), "ConfigError"),
        (NotInstalledError("x"), "ConfigError"),
    ):
        failed = load_failed(error)
        assert failed is not None
        assert (failed.error, failed.message) == (kind, "x")


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), RuntimeError("dictionary changed size"), of_system(errno.ENOENT, "/a")],
    ids=repr,
)
def test_what_is_no_shortage_is_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shortage(error) is None
    assert load_failed(error) is None

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(info, "run", fail)
    with pytest.raises(type(error)):
        main(["info"])
