"""A replica's log records, for the servers that use it to show among their own.

Ray would show what replicas print, too, but not in our log's form, and of all that the cluster has.
Imports no Ray.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from cuengine.wire import Log

MAX_RECORDS = 200
"""That are kept; a server asks about once a second."""


class ReplicaLog(logging.Handler):
    """The last records, numbered from 1."""

    def __init__(self) -> None:
        super().__init__()
        self._formatter = logging.Formatter()
        self._records: deque[Log] = deque(maxlen=MAX_RECORDS)
        self._count = 0
        self._counting = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        exception = record.exc_text or (
            record.exc_info and self._formatter.formatException(record.exc_info)
        )
        log = Log(
            record.name, record.levelno, record.getMessage(), record.created, exception or None
        )
        with self._counting:
            self._records.append(log)
            self._count += 1

    def since(self, number: int) -> tuple[int, list[Log]]:
        """The last one's number, and the records after `number`, as far as they are kept."""
        with self._counting:
            new = min(self._count - number, len(self._records))
            return self._count, list(self._records)[-new:] if new > 0 else []
