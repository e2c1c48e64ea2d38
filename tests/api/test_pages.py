"""The pages: served with a strict content policy that their own files keep to."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from serving import Serve

PAGES = {"": "index.html", "dashboard": "dashboard.html"}
"""Path -> file."""
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


def _tags(file: str) -> _Tags:
    tags = _Tags()
    tags.feed((STATIC / file).read_text())
    return tags


@pytest.fixture(params=PAGES.values())
def page(request: pytest.FixtureRequest) -> _Tags:
    return _tags(request.param)


def _imports(script: str) -> set[str]:
    """Names of the files that a script imports, and of those that these import."""
    named = set(re.findall(r'from "\./([\w.]+)"', (STATIC / script).read_text()))
    return named.union(*map(_imports, named))


async def test_the_pages_and_their_files_are_served_with_a_strict_policy(serve: Serve) -> None:
    served = await serve()
    files = set()
    for file in PAGES.values():
        for tag, attrs in _tags(file).tags:
            if tag in ("script", "link"):
                files.add(attrs.get("src") or attrs.get("href") or "")
    scripts = {name for name in files if name.endswith(".js")}
    for script in scripts:
        files |= {f"static/{name}" for name in _imports(script.removeprefix("static/"))}
    # Nothing is shipped that nobody uses.
    assert files == {f"static/{file.name}" for file in STATIC.iterdir()} - {
        f"static/{file}" for file in PAGES.values()
    }
    for path in [*PAGES, *files]:
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


def test_the_scripts_never_make_html_of_text() -> None:
    for script in STATIC.glob("*.js"):
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
        assert not re.search(forbidden, script.read_text()), script


@pytest.mark.parametrize(
    ("file", "script"), [("index.html", "chat.js"), ("dashboard.html", "dashboard.js")]
)
def test_a_script_finds_what_it_looks_for(file: str, script: str) -> None:
    ids = {attrs["id"] for _, attrs in _tags(file).tags if "id" in attrs}
    looked_for = set(re.findall(r'\$\("([\w-]+)"\)', (STATIC / script).read_text()))
    assert looked_for
    assert looked_for <= ids


def test_every_field_has_a_label_and_the_pages_lead_to_each_other() -> None:
    for file in PAGES.values():
        source = (STATIC / file).read_text()
        labelled = "".join(re.findall(r"<label.*?</label>", source, re.DOTALL))
        named = set(re.findall(r'<label for="([\w-]+)"', source))
        for tag, attrs in _tags(file).tags:
            if tag in ("input", "select", "textarea"):
                assert attrs["id"] in named or f'id="{attrs["id"]}"' in labelled
    assert ("a", {"href": "dashboard"}) in _tags("index.html").tags
    assert ("a", {"href": "./"}) in _tags("dashboard.html").tags


@pytest.mark.parametrize("script", sorted(file.name for file in STATIC.glob("*.js")))
def test_a_script_parses(script: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: install nodejs")
    module = tmp_path / "script.mjs"  # as its name would say
    shutil.copy(STATIC / script, module)
    subprocess.run([node, "--check", str(module)], check=True)
