"""A server on a free port before an engine that does what the test says."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine
from playwright.async_api import Browser, async_playwright
from serving import Serve, Served

from cuengine.api.server import ServerSettings, running_server


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve(engine, **settings) -> Served; all are stopped when the test ends."""
    async with AsyncExitStack() as stack:

        async def start(engine: Any = None, **settings: Any) -> Served:
            engine = FakeEngine() if engine is None else engine
            server = await stack.enter_async_context(
                running_server(engine, ServerSettings(**{"port": 0} | settings))
            )
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Served(engine, server, session)

        yield start


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Chromium without a window, as the distribution has it."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a browser: install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"], timeout=120_000
        )
        yield browser
        await browser.close()
