"""Reading the JSON files of a model folder, with one clear line for whatever is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuengine.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError where it is missing, unreadable or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content
