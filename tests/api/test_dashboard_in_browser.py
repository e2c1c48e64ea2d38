"""The dashboard in a real browser: what it draws is what the block pool and the tables say.

The engine is a real one; its model is tests/unit's checksum model.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import fits_its_window, keep_picture, open_page
from fake_engine import FakeEngine
from playwright.async_api import Browser, Page, expect
from serving import Serve

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from checksum_model import Guesser, greedy, make_engine

from cuengine.block_pool import BlockPool
from cuengine.engine import Engine
from cuengine.engine_view import EngineView, SequenceView
from cuengine.stats import EngineStats

KINDS = ["free", "cached", "held", "shared"]

# What each cell looks like: its colour at the left edge, and in the middle.
READ_CELLS = """(numBlocks) => {
  const canvas = document.getElementById("map");
  const [columns, pitch] = [Number(canvas.dataset.columns), Number(canvas.dataset.pitch)];
  const ratio = canvas.width / canvas.clientWidth;
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, copy.width, copy.height);
  const at = (x, y) => {
    const i = 4 * (Math.floor(y * ratio) * canvas.width + Math.floor(x * ratio));
    return `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
  };
  const size = pitch - (pitch >= 9 ? 2 : pitch >= 4 ? 1 : 0);
  return Array.from({ length: numBlocks }, (_, block) => {
    const [x, y] = [(block % columns) * pitch, Math.floor(block / columns) * pitch];
    return [at(x + Math.min(1, size - 1), y + size * 0.3), at(x + size / 2, y + size / 2)];
  });
}"""
COUNT_LEFTS = """(cells) => {
  const counts = {};
  for (const [left] of cells) counts[left] = (counts[left] ?? 0) + 1;
  return counts;
}"""
READ_COLOURS = """() => {
  const style = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (name) => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color;
  };
  const colours = {};
  for (const name of ["free", "cached", "cached-mark"]) colours[name] = colour(`--${name}`);
  colours.hues = Array.from({ length: 8 }, (_, i) => colour(`--hue-${i}`));
  probe.remove();
  return colours;
}"""
READ_ROWS = """() => [...document.querySelectorAll("#rows li")].map((row) => ({
  name: row.querySelector(".name").textContent,
  figures: row.querySelector(".figures").textContent,
  colour: getComputedStyle(row.querySelector(".swatch")).backgroundColor,
  blocks: row.querySelector("canvas").getAttribute("aria-label"),
}))"""


class Live(FakeEngine):
    """A real engine that takes steps when the test says so."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.real = engine

    def stats(self) -> EngineStats:
        return self.real.stats()

    async def view(self, replica: str | None = None) -> EngineView:
        self.views += 1
        await self._news()
        return self.real.view()


@pytest.fixture
def live() -> Live:
    """Forks, a prefix in common, blocks of what is over, a prompt half way, and a queue."""
    engine, _ = make_engine(
        num_blocks=90, max_model_len=320, max_num_seqs=7, budget=40, proposer=Guesser([2, 0, 1])
    )
    engine.add_request("over", [9] * 60, greedy(max_tokens=3))
    for _ in range(8):
        engine.step()
    engine.add_request("forked", [1] * 44, greedy(n=3, max_tokens=60))
    for _ in range(4):
        engine.step()
    engine.add_request("prefix", [1] * 40 + [2] * 9, greedy(max_tokens=60))
    engine.add_request("long", [3, 4] * 100, greedy(max_tokens=20))
    for name in ("waits", "waits-too"):
        engine.add_request(name, [5] * 300, greedy(max_tokens=5))
    for _ in range(5):
        engine.step()
    return Live(engine)


def expected_kinds(pool: BlockPool) -> list[str]:
    def kind(block: int) -> str:
        if pool.ref_count(block) > 1:
            return "shared"
        if pool.ref_count(block) == 1:
            return "held"
        return "cached" if pool.is_cached(block) else "free"

    return [kind(block) for block in range(pool.num_blocks)]


def drawn_kind(left: str, middle: str, colours: dict[str, Any]) -> str:
    if (left, middle) == (colours["free"], colours["free"]):
        return "free"
    if (left, middle) == (colours["cached"], colours["cached-mark"]):
        return "cached"
    assert left in colours["hues"]
    return "shared" if middle in ("rgb(0, 0, 0)", "rgb(255, 255, 255)") else "held"


async def _first_picture(page: Page) -> None:
    await expect(page.locator("#state")).to_have_text("live")
    await expect(page.locator("#count-free")).not_to_have_text("0")


async def _check(page: Page, engine: Engine) -> None:
    """All that is drawn is as the engine's own parts say."""
    pool, running = engine.pool, engine.scheduler.running
    kinds = expected_kinds(pool)
    assert set(kinds) == set(KINDS)
    for kind in KINDS:
        await expect(page.locator(f"#count-{kind}")).to_have_text(str(kinds.count(kind)))
    cells = await page.evaluate(READ_CELLS, pool.num_blocks)
    colours = await page.evaluate(READ_COLOURS)
    assert [drawn_kind(*cell, colours) for cell in cells] == kinds

    rows = await page.evaluate(READ_ROWS)
    assert [row["name"] for row in rows] == [s.request.request_id for s in running]
    for row, sequence in zip(rows, running, strict=True):
        shared = sum(pool.ref_count(block) > 1 for block in sequence.table.blocks)
        numbers = ", ".join(map(str, sequence.table.blocks))
        count = len(sequence.table.blocks)
        assert row["blocks"] == f"{count} blocks, {shared} of them shared: {numbers}"
        fill = sequence.table.num_tokens - (count - 1) * pool.block_size
        assert row["figures"].endswith(f"last block {fill}/{pool.block_size}")
        for block in sequence.table.blocks:
            if pool.ref_count(block) == 1:
                assert cells[block][0] == row["colour"]
    colour_of = {row["name"]: row["colour"] for row in rows}
    assert len(set(colour_of.values())) == len(colour_of) >= 3


@pytest.mark.parametrize("size", ["desktop", "phone"])
async def test_what_is_drawn_is_what_the_pool_and_the_tables_say(
    serve: Serve, browser: Browser, live: Live, size: str
) -> None:
    engine = live.real
    served = await serve(live)
    for dark in (False, True):
        name = f"dashboard-{size}-{'dark' if dark else 'light'}"
        async with open_page(browser, served.server.url + "/dashboard", size, dark=dark) as page:
            await _first_picture(page)
            await _check(page, engine)
            assert await fits_its_window(page)
            await keep_picture(page, name)
            # It goes on by itself.
            for _ in range(3):
                engine.step()
            steps = engine.stats().num_steps
            await expect(page.locator("#steps-last")).to_contain_text(f"step {steps}:")
            await _check(page, engine)


async def test_figures_are_those_of_the_engine(serve: Serve, browser: Browser, live: Live) -> None:
    served = await serve(live)
    async with open_page(browser, served.server.url + "/dashboard") as page:
        await _first_picture(page)
        stats, view = live.real.stats(), live.real.view()
        hits = f"{100 * stats.prefix_hits / stats.prefix_queries:.0f}%"
        right = f"{100 * stats.num_accepted_tokens / stats.num_draft_tokens:.0f}%"
        figures = {
            "running": str(stats.num_running),
            "waiting": "2",
            "hits": hits,
            "acceptance": right,
            "preemptions": "0",
        }
        for field, text in figures.items():
            await expect(page.locator(f"#{field}")).to_have_text(text)
        last = view.steps[-1]
        await expect(page.locator("#steps-last")).to_contain_text(
            f"{last.prefill} prompt, {last.decode} decoded, {last.guessed} guessed"
        )
        names = page.locator("#queue .name")
        assert await names.all_text_contents() == ["waits", "waits-too"]


async def test_blocks_and_sequences_are_pointed_at_by_keyboard_and_by_mouse(
    serve: Serve, browser: Browser, live: Live
) -> None:
    engine = live.real
    pool, running = engine.pool, engine.scheduler.running
    served = await serve(live)
    async with open_page(browser, served.server.url + "/dashboard") as page:
        await _first_picture(page)
        pointed = page.locator("#pointed")
        await page.focus("#map")
        await page.keyboard.press("Home")
        shared = next(b for b in range(pool.num_blocks) if pool.ref_count(b) == 4)
        for _ in range(shared):
            await page.keyboard.press("ArrowRight")
        await expect(pointed).to_contain_text(f"Block {shared} · shared, reference count 4:")
        for sequence in running:
            if shared in sequence.table.blocks:
                await expect(pointed).to_contain_text(sequence.request.request_id)
        await expect(page.locator("#said")).to_contain_text(f"Block {shared} · shared")
        # Enter keeps the first of them lit, again the next one.
        await page.keyboard.press("Enter")
        rows = page.locator("#rows button")
        await expect(rows.nth(0)).to_have_attribute("aria-pressed", "true")
        await page.keyboard.press("Enter")
        await expect(rows.nth(1)).to_have_attribute("aria-pressed", "true")
        await expect(rows.nth(0)).to_have_attribute("aria-pressed", "false")
        await page.keyboard.press("Escape")

        free = next(b for b in range(pool.num_blocks) if expected_kinds(pool)[b] == "free")
        columns, pitch = [
            int(await page.get_attribute("#map", f"data-{name}") or 0)
            for name in ("columns", "pitch")
        ]
        place = {"x": free % columns * pitch + 3, "y": free // columns * pitch + 3}
        await page.locator("#map").hover(position=place)  # type: ignore[arg-type]
        await expect(pointed).to_have_text(f"Block {free} · free")

        await rows.last.click()
        long = running[-1]
        await expect(pointed).to_contain_text(
            f"{long.request.request_id}, sample 0: {long.table.num_tokens} tokens"
        )
        await page.mouse.move(2, 2)
        colours = await page.evaluate(READ_COLOURS)
        cells = await page.evaluate(READ_CELLS, pool.num_blocks)
        full = {b for b, (left, _) in enumerate(cells) if left in colours["hues"]}
        assert full == set(long.table.blocks)


async def test_nothing_is_asked_of_the_server_while_the_page_is_hidden_or_gone(
    serve: Serve, browser: Browser, live: Live
) -> None:
    served = await serve(live)
    async with open_page(browser, served.server.url + "/dashboard") as page:
        await _first_picture(page)
        hide = """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        await page.evaluate(hide, True)
        await _nobody_watches(served)
        live.real.step()
        await page.evaluate(hide, False)
        steps = live.real.stats().num_steps
        await expect(page.locator("#steps-last")).to_contain_text(f"step {steps}:")
    await _nobody_watches(served)


async def _nobody_watches(served: Any) -> None:
    async with asyncio.timeout(60):
        while served.server.in_flight:
            await asyncio.sleep(0.01)


async def test_pause_holds_the_picture_until_it_is_over(
    serve: Serve, browser: Browser, live: Live
) -> None:
    served = await serve(live)
    async with open_page(browser, served.server.url + "/dashboard") as page:
        await _first_picture(page)
        shown = await page.text_content("#steps-last")
        await page.click("#pause")
        views = live.views
        live.real.step()
        await live.until(lambda: live.views > views)
        await page.wait_for_timeout(300)
        assert await page.text_content("#steps-last") == shown
        await page.click("#pause")
        steps = live.real.stats().num_steps
        await expect(page.locator("#steps-last")).to_contain_text(f"step {steps}:")


async def test_the_api_key_is_asked_for_once_and_serves_both_pages(
    serve: Serve, browser: Browser
) -> None:
    served = await serve(api_keys=("secret",))
    async with open_page(browser, served.server.url + "/dashboard", sound=False) as page:
        for key, then in (("wrong", page.locator("#refused")), ("secret", page.locator("#state"))):
            await page.fill("#key", key)
            await page.press("#key", "Enter")
            await expect(then).to_have_text(re.compile("The API key is wrong|live"))
        await expect(page.locator("#ask")).to_be_hidden()
        await page.click("header a")
        await expect(page.locator("#model")).to_have_value("fake-model")
        await page.click("header a")
        await expect(page.locator("#state")).to_have_text("live")


async def test_a_large_pool_is_drawn_whole(serve: Serve, browser: Browser) -> None:
    num_blocks = 100_000
    refs = np.zeros(num_blocks, np.uint8)
    rng = np.random.default_rng(0)
    order = rng.permutation(num_blocks).astype("<i4")
    tables = [order[i * 500 : (i + 1) * 500] for i in range(64)]
    for table in tables:
        refs[table] = 1
    flags = np.zeros(num_blocks, np.bool_)
    flags[order[:50_000]] = True
    stats = EngineStats(num_running=64, num_blocks=num_blocks)
    engine = FakeEngine(figures=stats)
    engine.seen = EngineView(
        time=1.0, block_size=16, ref_counts=refs.tobytes(),
        cached=np.packbits(flags, bitorder="little").tobytes(),
        running=[SequenceView(f"r{i}", 0, 1, 100, 8000, 7999, 8000, table.tobytes())
                 for i, table in enumerate(tables)],
        queue=[], queued={}, num_host_blocks=0, num_free_host_blocks=0, steps=[],
        token_budget=512, speculative=False, stats=stats,
    )  # fmt: skip
    served = await serve(engine)
    async with open_page(browser, served.server.url + "/dashboard") as page:
        await expect(page.locator("#count-held")).to_have_text("32,000")
        await expect(page.locator("#count-cached")).to_have_text("18,000")
        await expect(page.locator("#count-free")).to_have_text("50,000")
        drawn = await page.evaluate(f"(numBlocks) => ({COUNT_LEFTS})(({READ_CELLS})(numBlocks))",
                                    num_blocks)  # fmt: skip
        colours = await page.evaluate(READ_COLOURS)
        assert drawn[colours["free"]] == 50_000
        assert drawn[colours["cached"]] == 18_000
        assert [drawn[hue] for hue in colours["hues"]] == [4000] * 8
        await expect(page.locator("#rows li")).to_have_count(64)
        await keep_picture(page, "dashboard-large")


async def test_of_several_engines_one_is_chosen_from_a_list_and_another_shown_when_it_is_gone(
    browser: Browser, serve: Serve
) -> None:
    engine = FakeEngine(figures_of={name: EngineStats() for name in ("one", "two")})
    served = await serve(engine)
    async with open_page(browser, served.server.url + "/dashboard") as page:
        choice = page.get_by_label("Replica")
        await expect(choice).to_have_value("one")
        await choice.select_option("two")
        await engine.until(lambda: engine.viewed == "two")
        await expect(choice).to_have_value("two")
        engine.figures_of = {"one": EngineStats()}
        engine.figures = EngineStats(num_steps=1)
        await expect(choice).to_have_value("one")


async def test_there_is_nothing_to_choose_where_there_is_one_engine(
    browser: Browser, serve: Serve
) -> None:
    served = await serve(FakeEngine())
    async with open_page(browser, served.server.url + "/dashboard") as page:
        await expect(page.locator("#state")).to_have_text("live")
        await expect(page.get_by_label("Replica")).to_be_hidden()
