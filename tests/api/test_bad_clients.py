"""Malformed requests and clients that vanish, before the real engine on a tiny model.

The long runs, against `cuengine serve`, are bench/malformed.py and bench/vanishing.py.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from serving import Served

from cuengine.api.server import ServerSettings, running_server
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of bench/ as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture
async def served(
    tiny_chat_model: Path, bench: Callable[[str], ModuleType], tmp_path: Path
) -> AsyncIterator[Served]:
    template = tmp_path / "template.jinja"
    template.write_text(bench("malformed").TEMPLATE)
    config = EngineConfig(
        model=str(tiny_chat_model), device="cpu", num_blocks=200, max_model_len=512, max_num_seqs=8,
        chat_template=str(template),
    )  # fmt: skip
    settings = ServerSettings(
        port=0, max_n=4, header_timeout=1, body_timeout=1, tool_call_parser="hermes"
    )
    async with (
        running_server(AsyncEngine.from_config(config), settings) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Served(server._state.engine, server, session)


async def _is_idle(served: Served) -> bool:
    stats = served.engine.stats()
    return not (
        stats.num_running
        or stats.num_waiting
        or stats.num_used_blocks
        or served.server.in_flight
        or served.server._state.limits.waiting
    )


async def _until_idle(served: Served, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await _is_idle(served):
            await asyncio.sleep(0.01)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_hundred_malformed_requests_leave_nothing_behind(
    served: Served, bench: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    malformed, bad_requests = bench("malformed"), bench("bad_requests")
    sender = malformed.Sender(served.server.port, patience=60)
    await sender.good()
    files, hundreds = _open_files(), []
    with caplog.at_level(logging.WARNING):
        findings = await malformed.send_hundreds(
            sender, list(bad_requests.cases(1, 100, 0.02)), 8, lambda: hundreds.append(1)
        )
    assert not findings.problems
    assert len(hundreds) == 1
    assert set(findings.by_kind()) == set(bad_requests.KINDS)
    assert findings.by_kind()["slow"].keys() <= {"400", "408"}
    await _until_idle(served, 20)
    assert not [record for record in caplog.records if record.exc_info]
    async with asyncio.timeout(60):
        while _open_files() > files:
            await asyncio.sleep(0.01)


async def test_what_is_wrong_with_an_answer_is_seen(bench: Callable[[str], ModuleType]) -> None:
    malformed, served = bench("malformed"), bench("served")
    case = bench("bad_requests").Case("types", (b"",), refused=True)
    for status, body, says in (
        (500, b"{}", "error of the server"),
        (200, b'data: {"error": {"type": "server_error"}}', "error of the server"),
        (200, b"{}", "not refused"),
        (400, b"<html>", "OpenAI's shape"),
        (400, b'{"error": {"message": "x"}}', "OpenAI's shape"),
    ):
        assert says in malformed._verdict(case, served.Answer(status, {}, body))
    assert "hung up" in malformed._verdict(case, None)
    good = b'{"error": {"message": "x", "type": "y", "param": null, "code": null}}'
    assert malformed._verdict(case, served.Answer(400, {}, good)) is None


async def test_cases_of_a_seed_are_the_same_each_time_and_each_by_itself(
    bench: Callable[[str], ModuleType],
) -> None:
    bad_requests = bench("bad_requests")
    first = list(bad_requests.cases(3, 20, 1.0))
    assert first == list(bad_requests.cases(3, 20, 1.0))
    assert first[17] == bad_requests.case(3, 17, 1.0)
    assert first != list(bad_requests.cases(4, 20, 1.0))


async def test_blocks_are_free_a_second_after_clients_read_three_tokens_and_vanish(
    served: Served, bench: Callable[[str], ModuleType]
) -> None:
    half_open = await bench("vanishing").all_vanish(served.server.port, 30, 3)
    await _until_idle(served, 1)
    assert len(half_open) == 10
    for peer in half_open:
        peer.close()
