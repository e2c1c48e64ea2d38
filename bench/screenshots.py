"""The pictures of both pages for README.md: the real server and model in a real browser.

    python bench/screenshots.py [--out docs] [--chromium PATH]

Writes chat_desktop.png, chat_phone.png, dashboard_desktop.png and dashboard_phone.png. A dozen
streams run while the dashboard is seen: chats with one system prompt, samples of one request,
others, and some that wait. Needs what the extra `test` installs, Chromium, and the model
smollm2-135m.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import Browser, Page, async_playwright

from cuengine.api.server import ServerSettings, running_server
from cuengine.async_engine import AsyncEngine
from cuengine.config import EngineConfig

DESKTOP = {"width": 1280, "height": 1060}
PHONE = {"width": 390, "height": 844}
MAX_BYTES = 200_000
TOKENS = 3500
"""Drawn before the dashboard is seen: some requests are through, others have begun."""


GUIDE = (
    "You are the guide of a museum of navigation. You answer visitors of all ages, kindly and in "
    "plain words. The museum shows compasses, astrolabes, sextants, chronometers, charts and "
    "models of ships. The oldest piece is a Norse sunstone, the newest a satellite receiver. "
    "Visitors like stories: tell one wherever it fits. Never give a price, and send those who ask "
    "for one to the desk at the entrance. Opening hours are from nine to six, on Mondays closed. "
    "The cafe is beside the hall of ships, the lift behind the globe of 1690. Children may touch "
    "everything in the room of knots, and nothing in the hall of instruments."
)
VISITORS = (
    "How did sailors find their latitude?",
    "What is a sextant, and how do I hold it?",
    "Why does a compass not point to the true north?",
    "Tell me about the chronometer that solved the longitude.",
    "Who drew the first charts of the oceans?",
)
ESSAYS = (
    "Write a long letter from a lighthouse keeper to his sister.",
    "Explain how tides come about, with the moon and the sun.",
)
STORY = "Once upon a time, in a village at the edge of the sea, there lived a boat builder who"


def requests() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of what runs at once."""
    chats = [
        ("/v1/chat/completions", {"messages": [
            {"role": "system", "content": GUIDE}, {"role": "user", "content": question}]})
        for question in VISITORS
    ]  # fmt: skip
    essays = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
        for text in ESSAYS
    ]
    samples = [("/v1/completions", {"prompt": STORY * 6, "n": 3})]
    others = [
        ("/v1/completions", {"prompt": STORY + " did not know that" * i}) for i in range(1, 4)
    ]
    return chats[:3] + samples + essays + chats[3:] + others


async def run_load(url: str) -> None:
    """Keep the engine busy, with a request in the place of each that is through."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:

        async def again(index: int, path: str, body: dict[str, Any]) -> None:
            await asyncio.sleep(0.3 * index)
            for number in itertools.count(index, 12):
                length = 80 + 67 * number % 240
                further = {"stream": True, "max_tokens": length, "seed": number,
                           "temperature": 0.8, "ignore_eos": True}  # fmt: skip
                async with session.post(url + path, json=body | further) as answer:
                    answer.raise_for_status()
                    await answer.read()

        for index, request in enumerate(requests()):
            group.create_task(again(index, *request))


async def open_page(browser: Browser, url: str, size: dict[str, int], **options: Any) -> Page:
    context = await browser.new_context(
        viewport=size,  # type: ignore[arg-type]
        device_scale_factor=1.5 if size is PHONE else 1,
        is_mobile=size is PHONE,
        has_touch=size is PHONE,
        **options,
    )
    context.set_default_timeout(0)  # the machine may have other work
    page = await context.new_page()
    await page.goto(url)
    return page


async def take(page: Page, path: Path) -> None:
    await page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has more than {MAX_BYTES:,} bytes")


async def show_dashboard(browser: Browser, url: str, engine: AsyncEngine, out: Path) -> None:
    load = asyncio.create_task(run_load(url))
    desktop = await open_page(browser, url + "/dashboard", DESKTOP)
    phone = await open_page(browser, url + "/dashboard", PHONE)
    before = engine.stats().generation_tokens
    while engine.stats().generation_tokens < before + TOKENS:
        await asyncio.sleep(0.1)
    await take(desktop, out / "dashboard_desktop.png")
    await phone.locator("#rows button", has_text="sample 1").first.click()
    await phone.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    await asyncio.sleep(0.5)
    await take(phone, out / "dashboard_phone.png")
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)


async def show_chat(browser: Browser, url: str, out: Path) -> None:
    for name, size in (("chat_desktop", {"width": 1280, "height": 800}), ("chat_phone", PHONE)):
        page = await open_page(browser, url + "/", size)
        await page.click("#toggle")
        await page.fill("#temperature", "0")
        await page.fill("#max_tokens", "90")
        await page.check("#logprobs")
        if size is PHONE:
            await page.click("#toggle")
        for question in ("What is a block table good for?", "Name three rivers of Europe."):
            await page.fill("#input", question)
            await page.press("#input", "Enter")
            await page.wait_for_selector("#stopping", state="visible")
            await page.wait_for_selector("#send", state="visible")
        await page.locator(".toggle").last.click()
        await page.locator(".token").nth(3 if size is PHONE else 6).click()
        await page.evaluate("document.getElementById('log').scrollTop = 1e9")
        await take(page, out / f"{name}.png")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--only", choices=["chat", "dashboard"])
    arguments = parser.parse_args()
    config = EngineConfig(
        model="smollm2-135m", device="cpu", num_blocks=300, max_num_seqs=11, max_model_len=2048
    )
    engine = AsyncEngine.from_config(config)
    async with (
        running_server(engine, ServerSettings(port=0, access_log=False)) as server,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(
            executable_path=arguments.chromium, args=["--no-sandbox"]
        )
        if arguments.only != "dashboard":
            await show_chat(browser, server.url, arguments.out)
        if arguments.only != "chat":
            await show_dashboard(browser, server.url, engine, arguments.out)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
