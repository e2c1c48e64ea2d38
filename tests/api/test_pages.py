"""The chat page: served with a strict content policy that its own files keep to."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from serving import Serve

STATIC = Path(str(resources.files("cuengine.api").joinpath("static")))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1][0] if self.tags else ""
        self.texts[tag] = self.texts.get(tag, "") + data


@pytest.fixture
def page() -> _Tags:
    tags = _Tags()
    tags.feed((STATIC / "index.html").read_text())
    return tags


async def test_the_page_and_its_files_are_served_with_a_strict_policy(
    serve: Serve, page: _Tags
) -> None:
    served = await serve()
    links = [
        attrs.get("src") or attrs.get("href")
        for tag, attrs in page.tags
        if tag in ("script", "link")
    ]
    assert len(links) == 3
    for path in ["", *links]:
        async with served.session.get(f"{served.server.url}/{path}") as response:
            assert response.status == 200
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            etag = response.headers["ETag"]
        async with served.session.get(
            f"{served.server.url}/{path}", headers={"If-None-Match": etag}
        ) as response:
            assert response.status == 304


@pytest.mark.parametrize("path", ["/static/nothing.js", "/static/..%2fserver.py", "/static/"])
async def test_nothing_but_the_pages_files_is_served(serve: Serve, path: str) -> None:
    served = await serve()
    assert (await served.get(path))[0] == 404


def test_the_page_has_nothing_inline_and_no_outside_hosts(page: _Tags) -> None:
    assert not page.texts.get("script", "").strip()
    assert "style" not in [tag for tag, _ in page.tags]
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name == "style"], (
            tag,
            attrs,
        )
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]", text), file


def test_the_script_never_makes_html_of_text_and_finds_what_it_looks_for(page: _Tags) -> None:
    script = (STATIC / "app.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= ids


def test_every_field_of_the_page_has_a_label(page: _Tags) -> None:
    source = (STATIC / "index.html").read_text()
    labelled = "".join(re.findall(r"<label.*?</label>", source, re.DOTALL))
    for tag, attrs in page.tags:
        if tag in ("input", "select", "textarea"):
            assert f'id="{attrs["id"]}"' in labelled


def test_the_script_parses() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: install nodejs")
    subprocess.run([node, "--check", str(STATIC / "app.js")], check=True)
