"""Pages in a real browser: as people open them, with what the browser found wrong with them.

CUENGINE_SCREENSHOTS=DIR keeps what was seen.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, expect

expect.set_options(timeout=60_000)

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@asynccontextmanager
async def open_page(
    browser: Browser, url: str, size: str = "desktop", *, dark: bool = False, sound: bool = True
) -> AsyncIterator[Page]:
    """A page in a window of its own. sound: nothing may be in the console in the end."""
    width, height = SIZES[size]
    options: dict[str, Any] = {"is_mobile": True, "has_touch": True} if size == "phone" else {}
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        **options,
    )
    context.set_default_timeout(60_000)
    page = await context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    await page.goto(url)
    yield page
    if sound:
        assert not problems, problems
    await context.close()


async def keep_picture(page: Page, name: str) -> None:
    folder = os.environ.get("CUENGINE_SCREENSHOTS")
    if folder:
        await page.screenshot(path=Path(folder, f"{name}.png"))


async def fits_its_window(page: Page) -> bool:
    """There is nothing to scroll to at the side."""
    return bool(await page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
