"""The chat page in a real browser: typed to, streamed to, stopped, at desktop and phone width."""

from __future__ import annotations

import re

import pytest
from browsing import fits_its_window, keep_picture, open_page
from fake_engine import FakeEngine
from playwright.async_api import Browser, Page, expect
from serving import Serve

from cuengine.sampling_params import SamplingParams


async def _opened(page: Page) -> None:
    """The page has its model, so all of it runs."""
    await expect(page.locator("#model")).to_have_value("fake-model")


async def _ask(page: Page, text: str) -> None:
    await page.fill("#input", text)
    await page.press("#input", "Enter")


@pytest.mark.parametrize("size", ["desktop", "phone"])
async def test_a_question_is_asked_streamed_stopped_and_asked_again_by_keyboard(
    serve: Serve, browser: Browser, size: str
) -> None:
    engine = FakeEngine(text="A list:\n```\n<b>not bold</b>\n```\nThat is all of it.", delay=0.002)
    served = await serve(engine)
    engine.gate.clear()
    async with open_page(browser, served.server.url, size) as page:
        await _opened(page)
        await keep_picture(page, f"{size}-empty")
        # The box has the focus from the beginning.
        await page.keyboard.type("What is a <b>block table</b>?")
        await page.keyboard.press("Enter")
        await expect(page.locator(".message.waiting")).to_be_visible()
        await expect(page.locator("#send")).to_be_hidden()
        await expect(page.locator("#stopping")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator(".figures")).to_have_text("stopped")
        await engine.until(lambda: engine.calls[0].aborted)

        engine.gate.set()
        # The question without an answer is back in the box.
        await expect(page.locator("#input")).to_have_value("What is a <b>block table</b>?")
        await page.locator("#input").select_text()
        await page.keyboard.type("Once more")
        await page.keyboard.press("Enter")
        figures = page.locator(".figures").nth(1)
        await expect(figures).to_contain_text("first after")
        answer = page.locator(".assistant .text").nth(1)
        await expect(answer).to_have_text(
            "A list:\n<b>not bold</b>That is all of it.", use_inner_text=False
        )
        await expect(page.locator("#log pre")).to_have_count(1)
        await expect(page.locator("#log b")).to_have_count(0)
        await expect(figures).to_contain_text("tokens/s")
        await keep_picture(page, f"{size}-chat")

        await page.click("#toggle")
        await page.fill("#temperature", "0.25")
        await page.fill("#frequency_penalty", "0.5")
        await page.fill("#system", "Be brief.")
        await keep_picture(page, f"{size}-settings")
        assert await fits_its_window(page)
        await page.click("#clear")
        await _ask(page, "New")
        await expect(page.locator(".figures")).to_have_count(1)
        await expect(page.locator(".figures")).to_contain_text("first after")
        call = engine.calls[-1]
        assert bytes(call.prompt_token_ids).decode() == "<system>Be brief.<user>New<assistant>"
        assert isinstance(call.params, SamplingParams)
        assert call.params.temperature == 0.25
        assert call.params.frequency_penalty == 0.5
        assert call.params.logprobs is None


async def test_tokens_a_second_are_shown_while_they_come(serve: Serve, browser: Browser) -> None:
    engine = FakeEngine(text="many words " * 200, delay=0.01)
    served = await serve(engine)
    async with open_page(browser, served.server.url) as page:
        await _opened(page)
        await _ask(page, "Go on")
        figures = page.locator(".figures")
        await expect(figures).to_have_text(re.compile(r"\d+ out · [\d.]+ tokens/s · first after"))
        await expect(page.locator(".message.writing")).to_have_count(1)
        await page.click("#stopping")
        # What was counted until then stays.
        await expect(figures).to_have_text(re.compile(r"\d+ out · [\d.]+ tokens/s .* · stopped"))


@pytest.mark.parametrize("size", ["desktop", "phone"])
async def test_log_probabilities_are_there_where_they_are_asked_for_and_read_by_keyboard(
    serve: Serve, browser: Browser, size: str
) -> None:
    engine = FakeEngine(text="a <b>")
    served = await serve(engine)
    async with open_page(browser, served.server.url, size) as page:
        await _opened(page)
        await _ask(page, "One")
        await expect(page.locator(".figures")).to_contain_text("first after")
        await expect(page.locator(".toggle")).to_have_count(0)

        await page.click("#toggle")
        await page.check("#logprobs")
        await page.click("#toggle")
        await _ask(page, "Two")
        toggle = page.locator(".toggle")
        await expect(toggle).to_have_attribute("aria-expanded", "false")
        await toggle.focus()
        await page.keyboard.press("Enter")
        await expect(toggle).to_have_attribute("aria-expanded", "true")
        await expect(page.locator(".assistant .text").nth(1)).to_be_hidden()
        tokens = page.locator(".token")
        assert await tokens.all_text_contents() == [*"a <b>"]
        await page.keyboard.press("Shift+Tab")
        await page.keyboard.press("End")
        await page.keyboard.press("ArrowLeft")
        await expect(tokens.nth(3)).to_be_focused()
        await expect(tokens.nth(3)).to_have_attribute("aria-selected", "true")
        # The second most likely one was drawn, with log-probability -1, before it one with -0.5.
        rows = page.locator(".alternatives p")
        await expect(rows).to_have_count(5)
        drawn = page.locator(".alternatives .drawn")
        await expect(drawn).to_have_text("b36.8 %−1.00")
        await expect(rows.filter(has_text="c")).to_have_text("c60.7 %−0.50")
        # What cannot be is so likely as never.
        await expect(rows.filter(has_text="f")).to_have_text("f0.0 %−∞")
        await keep_picture(page, f"{size}-logprobs")
        assert await fits_its_window(page)
        await tokens.nth(0).click()
        await expect(drawn).to_have_text("a36.8 %−1.00")
        await toggle.click()
        await expect(page.locator(".assistant .text").nth(1)).to_have_text("a <b>")
        await expect(tokens.nth(0)).to_be_hidden()
    assert isinstance(engine.calls[1].params, SamplingParams)
    assert engine.calls[1].params.logprobs == 5


async def test_an_error_is_shown_and_the_question_given_back(
    serve: Serve, browser: Browser
) -> None:
    served = await serve(api_keys=("secret",))
    # The browser itself notes answers of 401 in the console.
    async with open_page(browser, served.server.url, sound=False) as page:
        await expect(page.locator("#status")).to_contain_text("API key")
        await _ask(page, "Hello?")
        await expect(page.locator(".error")).to_contain_text("API key")
        await expect(page.locator("#input")).to_have_value("Hello?")
        await page.click("#toggle")
        await page.fill("#key", "secret")
        await page.press("#key", "Tab")
        await _opened(page)
        await page.click("#send")
        await expect(page.locator(".assistant .text").last).to_have_text("Hello!")
