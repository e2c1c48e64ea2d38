"""The chat page in a real browser: typed to, streamed to, stopped, at desktop and phone width.

CUENGINE_SCREENSHOTS=DIR keeps what was seen.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine
from serving import Serve

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium")


class Browser:
    """One tab, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.problems.append(json.dumps(message["params"]))

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        for _ in range(400):
            if await self.value(f"!!({expression})"):
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"{expression} never came true; {self.problems}")

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState == 'complete' && $('model').value != ''")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    async def screenshot(self, name: str) -> None:
        folder = os.environ.get("CUENGINE_SCREENSHOTS")
        if folder:
            picture = await self.call("Page.captureScreenshot")
            Path(folder, f"{name}.png").write_bytes(base64.b64decode(picture["data"]))


@asynccontextmanager
async def _browser(profile: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (port_file.exists() and "\n" in port_file.read_text()):
                await asyncio.sleep(0.1)
        port = port_file.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = await answer.json()
            tab = next(tab for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await browser.call(f"{domain}.enable")
                yield browser
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize(("name", "width", "height"), [("desktop", 1200, 800), ("phone", 390, 780)])
async def test_a_question_is_asked_streamed_stopped_and_asked_again_by_keyboard(
    serve: Serve, tmp_path: Path, name: str, width: int, height: int
) -> None:
    engine = FakeEngine(text="A list:\n```\n<b>not bold</b>\n```\nThat is all of it.")
    served = await serve(engine)
    engine.gate.clear()
    async with _browser(tmp_path) as browser:
        await browser.size(width, height)
        await browser.open(served.server.url)
        await browser.screenshot(f"{name}-empty")
        # The box has the focus from the beginning.
        await browser.type("What is a <b>block table</b>?")
        await browser.press("Enter", 13)
        await browser.until("document.querySelector('.message.waiting')")
        assert await browser.value("$('send').hidden && !$('stopping').hidden")
        await browser.press("Escape", 27)
        await browser.until("document.querySelector('.figures')?.textContent == 'stopped'")
        await engine.until(lambda: engine.calls[0].aborted)

        engine.gate.set()
        # The question without an answer is back in the box.
        assert await browser.value("$('input').value") == "What is a <b>block table</b>?"
        await browser.value("$('input').select()")
        await browser.type("Once more")
        await browser.press("Enter", 13)
        await browser.until("document.querySelectorAll('.figures').length == 2")
        texts = "[...document.querySelectorAll('.assistant .text')].map(n => n.textContent)"
        assert (await browser.value(texts))[1] == "A list:\n<b>not bold</b>That is all of it."
        assert await browser.value("document.querySelectorAll('#log pre').length") == 1
        assert await browser.value("document.querySelectorAll('#log b').length") == 0
        assert "tokens/s" in await browser.value(
            "document.querySelectorAll('.figures')[1].textContent"
        )
        await browser.screenshot(f"{name}-chat")

        await browser.value("$('toggle').click()")
        await browser.value("$('temperature').value = 0.25; $('system').value = 'Be brief.'")
        await browser.screenshot(f"{name}-settings")
        assert await browser.value("document.documentElement.scrollWidth <= innerWidth")
        await browser.value("$('clear').click()")
        await browser.type("New")
        await browser.press("Enter", 13)
        await browser.until("document.querySelectorAll('.figures').length == 1")
        prompt = bytes(engine.calls[-1].prompt_token_ids).decode()
        assert prompt == "<system>Be brief.<user>New<assistant>"
        assert engine.calls[-1].params.temperature == 0.25
        assert browser.problems == []


async def test_an_error_is_shown_and_the_question_given_back(serve: Serve, tmp_path: Path) -> None:
    served = await serve(api_keys=("secret",))
    async with _browser(tmp_path) as browser:
        await browser.call("Page.navigate", url=served.server.url)
        await browser.until("document.readyState == 'complete' && $('status').textContent != ''")
        assert "API key" in await browser.value("$('status').textContent")
        await browser.type("Hello?")
        await browser.press("Enter", 13)
        await browser.until("document.querySelector('.error')")
        assert "API key" in await browser.value("document.querySelector('.error').textContent")
        assert await browser.value("$('input').value") == "Hello?"
        await browser.value(
            "$('key').value = 'secret'; $('key').dispatchEvent(new Event('change'))"
        )
        await browser.until("$('model').value != ''")
        await browser.value("$('compose').requestSubmit()")
        await browser.until(
            "[...document.querySelectorAll('.assistant .text')].at(-1).textContent == 'Hello!'"
        )
