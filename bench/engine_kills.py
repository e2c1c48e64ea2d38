"""50 streams of a server whose engine process is killed three times: all end as if it were not.

    python bench/engine_kills.py                  smollm2-135m, 50 streams, 3 kills
    python bench/engine_kills.py --seed 7         other moments

Each stream is run before, undisturbed: greedy ones, seeded ones, some with two samples, some with
log-probabilities. Then all run again at once, and the engine's process is killed with SIGKILL at
random moments while they do. Fails where a stream ends with an error, without its end, or with
another text; where a kill came to nothing, or the engine's process outlives the server. Prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

SECONDS = 600.0
"""For each part: starting, the undisturbed run, the disturbed one."""

SUBJECTS = ("rivers", "bread", "the moon", "chess", "winter", "a lighthouse", "trains", "salt")


def request(number: int, max_tokens: int) -> dict[str, Any]:
    subject = SUBJECTS[number % len(SUBJECTS)]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Tell me {number + 2} things about {subject}."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    match number % 5:
        case 0 | 1:
            return body | {"temperature": 0}
        case 2:
            return body | {"temperature": 1, "seed": number}
        case 3:
            return body | {"temperature": 0.7, "seed": number, "n": 2}
        case _:
            return body | {"temperature": 0, "logprobs": True, "top_logprobs": 2}


class Progress:
    """Pieces of text that have come, over all streams, and streams that run."""

    def __init__(self) -> None:
        self.pieces = 0
        self.running = 0


async def stream(session: aiohttp.ClientSession, url: str, body: Any, progress: Progress) -> Any:
    """Text and reason of the end by sample. RuntimeError for a stream that breaks."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    last = ""
    progress.running += 1
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                last = line[6:].decode().strip()
                if last == "[DONE]":
                    break
                event = json.loads(last)
                if "error" in event:
                    raise RuntimeError(f"the stream ends with {last}")
                for choice in event["choices"]:
                    index = choice["index"]
                    texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
                    progress.pieces += 1
                    if choice["finish_reason"]:
                        reasons[index] = choice["finish_reason"]
    finally:
        progress.running -= 1
    if last != "[DONE]":
        raise RuntimeError("the stream was cut off")
    return texts, reasons


def child_of(pid: int) -> int | None:
    """The engine's process of the server with this id; one of its threads has started it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if children := (task / "children").read_text().split():
            return int(children[0])
    return None


async def status_of(session: aiohttp.ClientSession, url: str) -> int:
    try:
        async with session.get(url + "/ready") as answer:
            return answer.status
    except aiohttp.ClientError:
        return 0


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(SECONDS):
        while await status_of(session, url) != 200:
            await asyncio.sleep(0.02)


async def kill(
    server: int, session: aiohttp.ClientSession, url: str, progress: Progress, pieces: int
) -> float:
    """Kill the engine once so many pieces have come; returns the seconds until it is back."""
    while progress.pieces < pieces:
        await asyncio.sleep(0.002)
    engine = child_of(server)
    if engine is None or not progress.running:
        raise RuntimeError("a kill came too late: all streams are through")
    os.kill(engine, signal.SIGKILL)
    start = time.monotonic()
    while await status_of(session, url) == 200:
        await asyncio.sleep(0.002)
    await until_ready(session, url)
    return time.monotonic() - start


async def measure(arguments: argparse.Namespace, server: int, url: str) -> dict[str, Any]:
    bodies = [request(i, arguments.max_tokens) for i in range(arguments.streams)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await until_ready(session, url)
        before = Progress()
        expected = await asyncio.gather(*(stream(session, url, b, before) for b in bodies))
        rng = random.Random(arguments.seed)
        # Not at the very end, where only few streams still run.
        moments = sorted(rng.randrange(int(before.pieces * 0.9)) for _ in range(arguments.kills))
        progress = Progress()
        tasks = [asyncio.create_task(stream(session, url, b, progress)) for b in bodies]
        downtimes = [await kill(server, session, url, progress, at) for at in moments]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        async with session.get(url + "/metrics") as answer:
            metrics = dict(
                line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#"
            )
    problems = [f"stream {i}: {a!r}" for i, a in enumerate(answers) if isinstance(a, Exception)]
    problems += [
        f"stream {i} differs: {a!r:.300}, expected {e!r:.300}"
        for i, (a, e) in enumerate(zip(answers, expected, strict=True))
        if not isinstance(a, Exception) and a != e
    ]
    restarts = int(float(metrics["cuengine_engine_restarts_total"]))
    if restarts != arguments.kills:
        problems.append(f"{restarts} restarts after {arguments.kills} kills")
    return {
        "streams": len(bodies),
        "equal": sum(a == e for a, e in zip(answers, expected, strict=True)),
        "pieces": before.pieces,
        "killed_at": moments,
        "seconds_until_ready": [round(seconds, 2) for seconds in downtimes],
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--port", type=int, default=8765)
    arguments = parser.parse_args()
    cuengine = str(Path(sys.executable).with_name("cuengine"))
    command = [cuengine, "serve", arguments.model, "--port", str(arguments.port)]
    with subprocess.Popen([*command, "--no-access-log", "--log-level", "error"]) as server:
        try:
            url = f"http://127.0.0.1:{arguments.port}"
            result = asyncio.run(measure(arguments, server.pid, url))
            engine = child_of(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
        server.wait()
    if engine is not None and Path(f"/proc/{engine}").exists():
        result["problems"].append("the engine's process outlives the server")
    print(json.dumps(result))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
