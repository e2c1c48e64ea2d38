"""What HTTP costs: this server and vLLM's, each before an engine that emits tokens at a fixed rate.

    python bench/http_overhead.py --python vllm=/venvs/vllm/bin/python

In both, the model alone is replaced (engines/fixed_rate_*.py): each step takes 20 ms on a device
that works while the host prepares the next one, and brings every sequence a token. Scheduler,
tokenizer, text, the engine's own process and HTTP are the server's own, with the same model.
Server and client share this machine's cores.

Two figures: how many streams run at full rate at once, of those tried (`--streams`), and the time
to the first token of requests that come while 100 streams run. A stream is at full rate where its
tokens come at 95 % of the rate or more. One line of JSON per server, then one that compares.
vLLM runs where its interpreter, from --python or $CUENGINE_BENCH_PYTHON_VLLM, has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from throughput import (
    BENCH,
    ENGINES,
    folder_for,
    interpreter,
    is_installed,
    model_folder,
    pairs,
)

RATE = 50.0
WORD = " the"
TOKENS = 250
FULL = 0.95
START_SECONDS = 900.0
TTFT_STREAMS = 100
MESSAGES = [{"role": "user", "content": "Say a word again and again, please."}]

SCRIPTS = {"cuengine": "fixed_rate_cuengine.py", "vllm": "fixed_rate_vllm.py"}
OPTIONS = {
    "cuengine": ["--device", "cpu", "--no-access-log", "--kv-cache-memory", "1GiB"],
    "vllm": ["--dtype", "float32", "--enforce-eager"],
}
COMMON = ["--max-num-seqs", "2048", "--max-num-batched-tokens", "65536", "--max-model-len", "512"]


@dataclass(slots=True)
class Stream:
    """Times in seconds of the clock `time.perf_counter`.

    times  when pieces of text came
    words  how many tokens were in each
    """

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    words: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0] - self.sent

    @property
    def rate(self) -> float:
        return (sum(self.words) - self.words[0]) / (self.times[-1] - self.times[0])

    @property
    def longest_gap(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


class _Reader(asyncio.Protocol):
    """Reads one answer and counts the words in it: the client must not be what limits."""

    def __init__(self, request: bytes, stream: Stream, ended: asyncio.Future[None]) -> None:
        self._request, self._stream, self._ended = request, stream, ended
        self._word = json.dumps(WORD)[1:-1].encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stream.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if words := data.count(self._word):
            self._stream.times.append(time.perf_counter())
            self._stream.words.append(words)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def stream(port: int, model: str, tokens: int) -> Stream:
    """One chat answer of so many tokens, streamed. RuntimeError where they do not come."""
    body = json.dumps(
        {"model": model, "messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True,
         "temperature": 0, "stream": True}
    ).encode()  # fmt: skip
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    found, ended = Stream(), loop.create_future()
    await loop.create_connection(
        lambda: _Reader(head.encode() + body, found, ended), "127.0.0.1", port
    )
    await ended
    if sum(found.words) != tokens:
        raise RuntimeError(f"{sum(found.words)} tokens came of {tokens}")
    return found


async def many(port: int, model: str, count: int, tokens: int) -> list[Stream]:
    """So many streams, whose starts are spread over a second."""

    async def one(number: int) -> Stream:
        await asyncio.sleep(number / count)
        return await stream(port, model, tokens)

    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def first_tokens(port: int, model: str) -> list[float]:
    """Seconds to the first token of 100 requests, one after the other, beside 100 streams."""
    background = asyncio.create_task(many(port, model, TTFT_STREAMS, 400))
    await asyncio.sleep(1.5)
    found = []
    while len(found) < 100 and not background.done():
        found.append((await stream(port, model, 2)).first)
    await background
    return found


def measure(port: int, model: str, counts: list[int], tokens: int) -> dict[str, Any]:
    asyncio.run(many(port, model, 10, 20))  # warm-up
    first = asyncio.run(first_tokens(port, model))
    tried = {}
    best = 0
    for count in counts:
        streams = asyncio.run(many(port, model, count, tokens))
        rates = sorted(found.rate for found in streams)
        gaps = sorted(found.longest_gap for found in streams)
        full = sum(rate >= FULL * RATE for rate in rates)
        tried[count] = {
            "at_full_rate": full,
            "slowest": round(rates[0], 1),
            "median_rate": round(statistics.median(rates), 1),
            "median_longest_gap_ms": round(statistics.median(gaps) * 1e3),
        }
        print(json.dumps({"streams": count} | tried[count]), file=sys.stderr, flush=True)
        if full < count:
            break
        best = count
    return {
        "streams_at_full_rate": best,
        "ttft_ms": round(statistics.median(first) * 1e3, 1),
        "ttft_p90_ms": round(sorted(first)[len(first) * 9 // 10] * 1e3, 1),
        "ttft_requests": len(first),
        "tried": tried,
    }


def run(engine: str, python: str, folder: Path, counts: list[int], tokens: int) -> dict[str, Any]:
    """Start the server of an engine, measure, and end it. SystemExit where it does not start."""
    word = subprocess.run(
        [sys.executable, "-c", _TOKEN, str(folder), WORD],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    port = free_port()
    script = BENCH / "engines" / SCRIPTS[engine]
    model = [str(folder)] if engine == "cuengine" else ["--model", str(folder)]
    command = [python, str(script), *model, "--port", str(port), "--served-model-name", "model"]
    environment = os.environ | {
        "FIXED_RATE": str(RATE),
        "FIXED_RATE_TOKEN": word,
        "PYTHONPATH": str(script.parent),
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *COMMON, *OPTIONS[engine]], stdout=log, stderr=log, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_ready(process, port)
            return {"engine": engine} | measure(port, "model", counts, tokens)
        except Exception:
            log.seek(0)
            print(log.read()[-10_000:], file=sys.stderr)
            raise
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_TOKEN = """
import sys
from pathlib import Path
from cuengine.model.tokenizer import Tokenizer
[token] = Tokenizer.from_folder(Path(sys.argv[1])).encode(sys.argv[2], add_special_tokens=False)
print(token)
"""


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start within {START_SECONDS:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", nargs="+", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument(
        "--streams", nargs="+", type=int, default=[25, 50, 75, 100, 125, 150, 200, 250, 300, 400]
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream (%(default)s)")
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH")
    parser.add_argument(
        "--require", action="store_true", help="exit with 1 where vLLM does better in one of them"
    )
    args = parser.parse_args()
    folder = model_folder(args.model)
    lines = {}
    for engine in args.engine:
        python = interpreter(engine, pairs(args.python, "--python"))
        if not is_installed(python, ENGINES[engine].module):
            print(json.dumps({"engine": engine, "skipped": f"not installed in {python}"}))
            continue
        model = folder_for(engine, folder)
        lines[engine] = run(engine, python, model, args.streams, args.tokens)
        print(json.dumps(lines[engine]), flush=True)
    if len(lines) < 2:
        return
    ours, theirs = lines["cuengine"], lines["vllm"]
    print(
        json.dumps(
            {
                "streams": [line["streams_at_full_rate"] for line in (ours, theirs)],
                "ttft_ms": [line["ttft_ms"] for line in (ours, theirs)],
            }
        )
    )
    better = (
        ours["streams_at_full_rate"] >= theirs["streams_at_full_rate"]
        and ours["ttft_ms"] < theirs["ttft_ms"]
    )
    sys.exit(args.require and not better)


if __name__ == "__main__":
    main()
