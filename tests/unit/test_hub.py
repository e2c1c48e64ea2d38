"""Models from a hub, against a stand-in for one; each in a process of its own, since
huggingface_hub reads its environment when it is imported."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" + 34 * "0"
FIND = """
import sys
from cuengine.errors import ModelError
from cuengine.model.find import find_model
try:
    files = find_model(sys.argv[1], revision=sys.argv[2] or None, progress=False)
    print("found", files.path)
except ModelError as error:
    print("error", error)
"""


@dataclass
class Hub:
    """What the stand-in serves, and what it was asked for.

    repos    name -> path -> content
    gated    names that need the token "good"
    breaks   how many downloads of a path break off, each in the middle of what it was to bring
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    breaks: dict[str, int] = field(default_factory=dict)
    status: int | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET"]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.status is not None:
                return self.reply(hub.status, b"")
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                return self.api(parts[2:])
            return self.file(parts)

        def api(self, parts: list[str]) -> None:
            name, files = "/".join(parts[:2]), hub.repos.get("/".join(parts[:2]))
            if files is None:
                return self.fail(404, "RepoNotFound")
            kind, revision = parts[2:4] if len(parts) > 2 else ("revision", "main")
            if revision not in ("main", COMMIT):
                return self.fail(404, "RevisionNotFound")
            if kind == "revision":
                siblings = [{"rfilename": path} for path in files]
                return self.json({"id": name, "sha": COMMIT, "siblings": siblings})
            return self.json(
                [
                    {
                        "type": "file",
                        "path": path,
                        "size": len(data),
                        "oid": hashlib.sha1(data).hexdigest(),
                    }
                    for path, data in files.items()
                ]
            )

        def file(self, parts: list[str]) -> None:
            name, path = "/".join(parts[:2]), "/".join(parts[4:])
            if name in hub.gated and self.headers.get("Authorization") != "Bearer good":
                return self.fail(401, "GatedRepo")
            if path not in hub.repos.get(name, {}):
                return self.fail(404, "EntryNotFound")
            data = hub.repos[name][path]
            etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            status, asked = 200, self.headers.get("Range")
            if asked and self.command == "GET":
                begin = int(asked.removeprefix("bytes=").partition("-")[0])
                etag["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
                status, data = 206, data[begin:]
            cut = None
            if self.command == "GET" and hub.breaks.get(path):
                hub.breaks[path] -= 1
                cut = len(data) // 2
            return self.reply(status, data, etag, cut=cut)

        def json(self, content: Any) -> None:
            self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def fail(self, status: int, code: str) -> None:
            self.reply(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def reply(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str] | None = None,
            cut: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            self.close_connection = cut is not None

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    content = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(content))
    content.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield content
    server.shutdown()
    thread.join()
    server.server_close()


Find = Callable[..., tuple[str, str]]


@pytest.fixture
def find(hub: Hub, tmp_path: Path) -> Find:
    """find(name, revision="", **environment) -> ("found", path) or ("error", message)."""

    def run(name: str, revision: str = "", **environment: str) -> tuple[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name[:2] != "HF"}
        done = subprocess.run(
            [sys.executable, "-c", FIND, name, revision],
            env=inherited
            | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
            | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        outcome, _, text = done.stdout.strip().partition(" ")
        return outcome, text

    return run


@pytest.fixture
def files(tiny_model: Callable[[str], Path]) -> dict[str, bytes]:
    """A small model as a repository holds it."""
    folder = tiny_model("linear_rope")
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".json", ".safetensors")
    }


def test_a_hub_name_becomes_a_folder_with_the_files_a_model_needs_and_no_others(
    hub: Hub, find: Find, files: dict[str, bytes]
) -> None:
    useless = ["pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors", "x.gguf"]
    hub.repos["org/tiny"] = files | dict.fromkeys([*useless, "README.md"], b"x")
    outcome, folder = find("org/tiny")
    assert outcome == "found"
    present = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    assert present == files


def test_a_model_that_is_there_is_found_offline_and_without_a_network(
    hub: Hub, find: Find, files: dict[str, bytes]
) -> None:
    hub.repos["org/tiny"] = files
    first = find("org/tiny")
    hub.requests.clear()
    assert find("org/tiny", HF_HUB_OFFLINE="1") == first
    assert find("org/tiny", HF_ENDPOINT="http://127.0.0.1:9") == first
    assert hub.requests == []
    assert find("org/tiny") == first
    assert "model.safetensors" not in hub.downloads()


def test_a_model_that_is_not_there_is_refused_offline_with_what_to_do(hub: Hub, find: Find) -> None:
    outcome, message = find("org/tiny", HF_HUB_OFFLINE="1")
    assert outcome == "error"
    assert "org/tiny" in message
    assert "HF_HUB_OFFLINE" in message
    assert hub.requests == []


def test_without_a_network_the_message_names_the_settings_to_check(find: Find) -> None:
    outcome, message = find("org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert outcome == "error"
    assert "cannot be reached" in message
    assert "HF_ENDPOINT" in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_download_that_breaks_off_goes_on_where_it_broke(
    hub: Hub, find: Find, files: dict[str, bytes], kind: str
) -> None:
    """With every huggingface_hub there is: those before 2.0 leave going on to the next call."""
    content = b"GGUF" + os.urandom(24_000_000)
    if kind == "gguf":
        hub.repos["org/large"] = {"large.gguf": content}
    else:
        hub.repos["org/large"] = files | {"large.safetensors": content}
    hub.breaks = {f"large.{kind}": 3}
    outcome, path = find("org/large")
    assert outcome == "found"
    found = Path(path) if kind == "gguf" else Path(path) / "large.safetensors"
    assert found.read_bytes() == content
    asked = [
        int(given.removeprefix("bytes=").rstrip("-")) if given else 0
        for method, path, given in hub.requests
        if method == "GET" and path.endswith(f"large.{kind}")
    ]
    # Never more than what a break had lost is asked for again.
    assert len(asked) == 4
    assert asked == sorted(asked)
    assert all(
        0 < begin <= before + (len(content) - before) // 2
        for before, begin in itertools.pairwise(asked)
    )


def test_a_model_of_another_architecture_is_refused_before_its_weights_are_fetched(
    hub: Hub, find: Find, files: dict[str, bytes]
) -> None:
    config = json.loads(files["config.json"]) | {"architectures": ["GPT2LMHeadModel"]}
    hub.repos["org/gpt"] = files | {"config.json": json.dumps(config).encode()}
    outcome, message = find("org/gpt")
    assert outcome == "error"
    assert "GPT2LMHeadModel" in message
    assert "model.safetensors" not in hub.downloads()


def test_an_unknown_name_says_so_and_mentions_the_token(hub: Hub, find: Find) -> None:
    outcome, message = find("org/nothing")
    assert outcome == "error"
    assert "org/nothing" in message
    assert "no such model on the hub" in message
    assert "HF_TOKEN" in message


def test_a_gated_model_asks_for_a_token_and_takes_it(
    hub: Hub, find: Find, files: dict[str, bytes]
) -> None:
    hub.repos["org/gated"] = files
    hub.gated = {"org/gated"}
    outcome, message = find("org/gated")
    assert outcome == "error"
    assert "is gated" in message
    assert "HF_TOKEN" in message
    assert find("org/gated", HF_TOKEN="good")[0] == "found"


def test_a_revision_that_does_not_exist_is_named(
    hub: Hub, find: Find, files: dict[str, bytes]
) -> None:
    hub.repos["org/tiny"] = files
    outcome, message = find("org/tiny", "v9")
    assert outcome == "error"
    assert "'v9'" in message
    assert find("org/tiny", COMMIT)[0] == "found"


def test_a_repository_with_one_gguf_gives_that_file(hub: Hub, find: Find) -> None:
    hub.repos["org/quantised"] = {"README.md": b"#", "model-q4.gguf": b"GGUF1"}
    outcome, path = find("org/quantised")
    assert outcome == "found"
    assert Path(path).name == "model-q4.gguf"
    assert find("org/quantised", HF_HUB_OFFLINE="1") == (outcome, path)


@pytest.mark.parametrize("separator", [":", "/"])
def test_of_several_ggufs_one_is_chosen_by_name(hub: Hub, find: Find, separator: str) -> None:
    hub.repos["org/quantised"] = {"a-q4.gguf": b"GGUF1", "b-q8.gguf": b"GGUF2"}
    outcome, message = find("org/quantised")
    assert outcome == "error"
    assert "a-q4.gguf, b-q8.gguf" in message
    outcome, path = find(f"org/quantised{separator}b-q8.gguf")
    assert outcome == "found"
    assert Path(path).read_bytes() == b"GGUF2"
    assert "a-q4.gguf" not in hub.downloads()


def test_a_gguf_that_the_repository_lacks_is_named(hub: Hub, find: Find) -> None:
    hub.repos["org/quantised"] = {"a-q4.gguf": b"GGUF1"}
    outcome, message = find("org/quantised:z.gguf")
    assert outcome == "error"
    assert "z.gguf" in message


def test_a_repository_without_readable_weights_says_what_is_read(hub: Hub, find: Find) -> None:
    hub.repos["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    outcome, message = find("org/pickled")
    assert outcome == "error"
    assert "*.safetensors" in message
    assert "*.gguf" in message


def test_a_hub_in_trouble_is_reported_in_one_line(hub: Hub, find: Find) -> None:
    hub.status = 500
    outcome, message = find("org/tiny")
    assert outcome == "error"
    assert "500" in message
    assert "\n" not in message
