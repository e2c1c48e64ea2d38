"""How log lines look: text for people, or JSON for machines. To stderr, set up once by main.py."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message; with what the call
    gave as `extra={"fields": {...}}`, and `exception` with its traceback where there was one.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:  # of the engine's process there is only the text
            line["exception"] = record.exc_text
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str, *, explain_waits: bool = False) -> None:
    """Our own messages at the level asked for, other libraries' warnings.

    level  of LOG_LEVELS in arguments.py
    form   "text" or "json"
    explain_waits  whatever the level, say what lets a first start take most of a minute
    """
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
    logging.getLogger("cuengine").setLevel(level.upper())
    if explain_waits:
        logging.getLogger("cuengine.device.numba_setup").setLevel(logging.INFO)
