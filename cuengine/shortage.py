"""What a machine or a limit of this process is short of, in one line that says what to do.

Whoever happens to ask for one thing too many is not to blame: its traceback would help nobody.
"""

from __future__ import annotations

import errno

_OPEN_FILES = "raise the limit of open files (`ulimit -n`): 1024 will do"
_PROCESSES = (
    "raise the limit of processes and threads (`ulimit -u`, or the pids limit of a container), or "
    "run fewer"
)
_MEMORY = (
    "give it more (`ulimit -v`, a container's limit), or ask for less with --kv-cache-memory, "
    "--max-num-seqs or a smaller model"
)
_DISK = "free some room, or set CUENGINE_CACHE to a folder on another disk"

_ADVICE = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: "the machine has no file handle left: close some, or raise fs.file-max",
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: _MEMORY,
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EROFS: "set CUENGINE_CACHE to a folder that can be written",
}


def shortage(error: BaseException) -> str | None:
    """One line where `error` comes of a shortage, else None."""
    if isinstance(error, MemoryError):
        what = f"out of memory: {error}" if str(error) else "out of memory"
        return f"{what}: {_MEMORY}"
    if isinstance(error, OSError) and error.errno in _ADVICE:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}: {_ADVICE[error.errno]}"
    # Python raises nothing more particular, when a thread cannot be started.
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return f"no further thread can be started: {_PROCESSES}, or give threads less memory"
    return None
