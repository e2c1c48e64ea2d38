"""Requests that schemathesis makes up from /openapi.json: the document and the server agree."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from serving import Serve

pytestmark = [
    pytest.mark.accept,
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None, reason="needs the package schemathesis"
    ),
]


# Ranges that depend on the model or on the operator's limits are not in the document: what it
# allows may be a 400 (which names the field). All other checks hold.
_EXCLUDED = "positive_data_acceptance"


async def test_what_the_document_allows_is_answered_as_it_says(
    serve: Serve, tmp_path: Path
) -> None:
    served = await serve(FakeEngine(text="ab"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", f"{served.server.url}/openapi.json",
        "--checks", "all", "--exclude-checks", _EXCLUDED, "--phases", "coverage,fuzzing",
        "--max-examples", "25", "--seed", "1",
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-8000:]
    assert served.server.in_flight == 0
