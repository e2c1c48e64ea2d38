"""A load from llama-benchy, a benchmark for OpenAI-compatible servers, against `cuengine serve`.

    python bench/client_load.py --python /venvs/benchy/bin/python

It runs where its interpreter (--python, else $CUENGINE_BENCH_PYTHON_LLAMA_BENCHY, else this one)
has the package llama-benchy, 0.4 or newer; else that is said, and nothing is measured. Its
tokenizer is the model's folder, its text one that is served here: it needs no network. Fails where
a request of it fails, where answers lack tokens, or where anything is left in the server. Prints
one line of JSON.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from served import ServedModel, figures, seconds_until_idle
from throughput import is_installed, model_folder

ROOT = Path(__file__).resolve().parent.parent
PROMPT_TOKENS, OUTPUT_TOKENS, RUNS = 64, 16, 2
CONCURRENCY = (1, 8)


@contextmanager
def text_server(folder: Path) -> Iterator[str]:
    """URL of a text, of which the prompts are parts."""
    words = (ROOT / "README.md").read_text() + (ROOT / "LICENSE").read_text()
    (folder / "text.txt").write_text(words * 4)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/text.txt"
        server.shutdown()


def load(python: str, served: ServedModel, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """What llama-benchy found. SystemExit where it fails."""
    result = folder / "result.json"
    with text_server(folder) as text:
        options = {
            "--base-url": f"{served.url}/v1",
            "--model": "smollm2",
            "--tokenizer": tokenizer,
            "--book-url": text,
            "--pp": PROMPT_TOKENS,
            "--tg": OUTPUT_TOKENS,
            "--runs": RUNS,
            "--format": "json",
            "--save-result": result,
        }
        # SmolLM2-135M does not always know its way through the coherence test's question.
        flags = ("--exact-tg", "--exit-on-first-fail", "--skip-coherence")
        command = [python, "-m", "llama_benchy", *flags]
        command += [str(part) for option in options.items() for part in option]
        command += ["--concurrency", *map(str, CONCURRENCY)]
        # Its own cache of texts, and no model hub.
        environment = os.environ | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, check=False, stdout=sys.stderr, env=environment)
    if done.returncode != 0 or not result.exists():
        raise SystemExit(f"llama-benchy ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--python", help="an interpreter that has llama-benchy")
    args = parser.parse_args()
    variable = os.environ.get("CUENGINE_BENCH_PYTHON_LLAMA_BENCHY")
    python = args.python or variable or sys.executable
    if not is_installed(python, "llama_benchy"):
        print(json.dumps({"skipped": f"no llama-benchy in {python}"}))
        return
    folder = model_folder(args.model)
    options = ["--device", "cpu", "--max-model-len", "1024", "--served-model-name", "smollm2"]
    with ServedModel(str(folder), *options) as served, tempfile.TemporaryDirectory() as scratch:
        before = figures(served.url)
        found = load(python, served, folder, Path(scratch))
        after = figures(served.url)
        problems = served.problems()
        if seconds_until_idle(served.url, 10) is None:
            problems.append(f"something is left: {after}")
    name = "cuengine_generation_tokens_total"
    tokens = int(after[name] - before[name])
    least = sum(CONCURRENCY) * RUNS * OUTPUT_TOKENS
    if tokens < least:
        problems.append(f"{tokens} tokens, fewer than the {least} that were asked for")
    aborted = after.get('cuengine_requests_finished_total{finished_reason="abort"}', 0.0)
    if aborted:
        problems.append(f"{aborted:g} requests were given up")
    speeds = {
        str(run["concurrency"]): round(run["tg_throughput"]["mean"], 1)
        for run in found["benchmarks"]
        if run.get("tg_throughput")
    }
    if set(speeds) != {str(count) for count in CONCURRENCY}:
        problems.append(f"no speed for each of {CONCURRENCY}: {found}")
    print(json.dumps({"output_tokens": tokens, "tokens_per_s": speeds, "problems": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
