"""Malformed requests against `cuengine serve`: none may be answered with a 5xx, or leave a trace.

    python bench/malformed.py                     1,000 requests, 16 at a time, seed 0
    python bench/malformed.py --seed 7 --only 42  one of them, with what was sent and answered

Ten kinds, in turn (bad_requests.py): bytes that are no HTTP, broken headers, broken chunked bodies,
clients that send a byte now and then and never end, bodies that are no JSON, wrong types, wild
numbers, deep nesting, halves of surrogate pairs, five megabytes where a word is expected.

After each hundred a good request must be answered as it was at first. No status of 500 or more is
allowed, none at all, nor an answer that is cut off, hangs or is no error of OpenAI's shape. In the
end nothing may run, every KV block must be free and every file closed, the memory may be no more
than 2 % + 32 MiB above the most that the first half needed, and the log must hold no failure.
Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from bad_requests import BODIES, Case, case, cases
from served import (
    Answer,
    CutOff,
    ServedModel,
    figures,
    is_idle,
    lowest,
    model_path,
    post,
    read_answer,
)

GOOD = post(
    "/v1/completions",
    json.dumps({"prompt": "One, two,", "max_tokens": 8, "temperature": 0}).encode(),
)
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""One that has a place for tools: the default model's has none, and refuses them at once."""

# For a request that the server may still be waiting for, before the client closes its side.
HALF_CLOSE_SECONDS = 0.25
# Between two bytes of a client that dawdles.
SLOW_SECONDS = 0.5
HUNDRED = 100


@dataclass(slots=True)
class Findings:
    """answers   how often each kind had which status; 0: hung up on
    problems  what was wrong, in words
    """

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def by_kind(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (kind, status), count in sorted(self.answers.items()):
            found.setdefault(kind, {})[str(status or "none")] = count
        return found


class Sender:
    """Sends cases to the server at a port of localhost.

    patience  seconds within which each answer must be there
    """

    def __init__(self, port: int, patience: float) -> None:
        self._port = port
        self._patience = patience

    async def send(self, sent: Case) -> tuple[Answer | None, str | None]:
        """The answer, where there was one, and what is wrong with it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writing = asyncio.create_task(_write(writer, sent))
        try:
            async with asyncio.timeout(self._patience):
                answer = await _answer(reader, writer, sent)
        except TimeoutError:
            return None, f"no answer within {self._patience:g} s"
        except CutOff as error:
            # Who closes a side has left, which ends what is being sent.
            return None, None if not sent.complete else f"the answer was cut off: {error}"
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            writer.transport.abort()
        return answer, _verdict(sent, answer)

    async def good(self) -> bytes:
        """The text of a good request's answer. Raises RuntimeError where there is none."""
        answer, problem = await self.send(Case("good", (GOOD,)))
        if problem is not None or answer is None or answer.status != 200:
            raise RuntimeError(f"a good request fails: {problem or answer}")
        return bytes(json.loads(answer.body)["choices"][0]["text"].encode())


async def _write(writer: asyncio.StreamWriter, sent: Case) -> None:
    try:
        for number, data in enumerate(sent.data):
            if number:
                await asyncio.sleep(sent.pause)
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the server has heard enough: its answer says why


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: Case
) -> Answer | None:
    if sent.complete:
        return await read_answer(reader)
    reading = asyncio.ensure_future(read_answer(reader))
    try:
        await asyncio.wait([reading], timeout=HALF_CLOSE_SECONDS)
        if not reading.done() and not writer.transport.is_closing():
            with suppress(OSError):  # the server has closed it meanwhile
                writer.write_eof()
        return await reading
    finally:
        reading.cancel()


def _verdict(sent: Case, answer: Answer | None) -> str | None:
    if answer is None:
        return "hung up without an answer" if sent.complete else None
    if answer.status >= 500 or b'"server_error"' in answer.body:
        return "an error of the server"
    if sent.refused and answer.status < 400:
        return "not refused"
    if answer.status >= 400:
        try:
            error = json.loads(answer.body)["error"]
            if set(error) != {"message", "type", "param", "code"} or not error["message"]:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            return "an error without OpenAI's shape"
    return None


async def send_hundreds(
    sender: Sender, all_cases: list[Case], workers: int, after_each: Callable[[], None]
) -> Findings:
    """Send everything; those that dawdle do so beside the others, to the very end.

    after_each  is called after each hundred, when the good request was answered
    """
    findings = Findings()
    expected = await sender.good()
    for path, body in BODIES.items():
        answer, _ = await sender.send(Case("unbroken", (post(path, json.dumps(body).encode()),)))
        if answer is None or answer.status != 200:
            raise RuntimeError(f"what is to be broken is not good: {path}, {answer}")
    slow: list[asyncio.Task[None]] = []
    room = asyncio.Semaphore(workers)

    async def one(number: int, sent: Case) -> None:
        answer, problem = await sender.send(sent)
        findings.answers[sent.kind, answer.status if answer else 0] += 1
        if problem is not None:
            findings.problems.append(
                f"request {number} ({sent.kind}): {problem}; {answer and answer.status} "
                f"{answer and answer.body[:300]!r}, to {b''.join(sent.data)[:200]!r}"
            )

    async def in_turn(number: int, sent: Case) -> None:
        async with room:
            await one(number, sent)

    for start in range(0, len(all_cases), HUNDRED):
        numbered = list(enumerate(all_cases[start : start + HUNDRED], start))
        slow += [asyncio.create_task(one(*pair)) for pair in numbered if pair[1].kind == "slow"]
        await asyncio.gather(*(in_turn(*pair) for pair in numbered if pair[1].kind != "slow"))
        if (text := await sender.good()) != expected:
            findings.problems.append(f"after {start + HUNDRED}: {text!r}, not {expected!r}")
        after_each()
    await asyncio.gather(*slow)
    await sender.good()
    return findings


@contextmanager
def server(model: str) -> Iterator[ServedModel]:
    """Little context and few samples: what turns out to be no malformed request ends soon, too."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        options = ["--max-model-len", "256", "--max-n", "4", "--tool-call-parser", "hermes"]
        options += ["--chat-template", template.name, "--device", "cpu"]
        with ServedModel(model_path(model), *options) as served:
            yield served


def run(model: str, seed: int, count: int, workers: int, patience: float) -> dict[str, object]:
    with server(model) as served:
        sender = Sender(served.port, patience)
        asyncio.run(sender.good())
        files = served.open_files()
        memory: list[int] = []
        start = time.monotonic()
        findings = asyncio.run(
            send_hundreds(
                sender,
                list(cases(seed, count, SLOW_SECONDS)),
                workers,
                lambda: memory.append(served.resident_bytes()),
            )
        )
        seconds = time.monotonic() - start
        problems = findings.problems
        if not is_idle(last := figures(served.url)):
            problems.append(f"something is left: {last}")
        files_left = lowest(served.open_files, files)
        if files_left > files:
            problems.append(f"{files_left - files} files are left open")
        # The megabytes of some requests leave holes, so it goes up and down.
        half = max(memory[: len(memory) // 2] or memory)
        if memory[-1] > half * 1.02 + 32 * 2**20:
            problems.append(f"memory grew: {[round(size / 2**20) for size in memory]} MiB")
        problems += served.problems()
    if served.status != 0:
        problems.append(f"the server ended with status {served.status}")
    return {
        "requests": count,
        "seed": seed,
        "answers": findings.by_kind(),
        "rss_first_half_mib": round(half / 2**20, 1),
        "rss_end_mib": round(memory[-1] / 2**20, 1),
        "open_files": files_left,
        "seconds": round(seconds, 1),
        "problems": problems,
    }


def send_one(model: str, seed: int, index: int, patience: float) -> None:
    """For whoever looks for the reason: one request, its answer, and the server's log."""
    sent = case(seed, index, SLOW_SECONDS)
    print(b"".join(sent.data)[:5000])
    with server(model) as served:
        print(*asyncio.run(Sender(served.port, patience).send(sent)), sep="\n")
    print(*served.log, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="a multiple of 100")
    parser.add_argument("--workers", type=int, default=16, help="requests at once")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="I", help="send request I alone, and show it")
    args = parser.parse_args()
    if args.only is not None:
        send_one(args.model, args.seed, args.only, args.patience)
        return
    result = run(args.model, args.seed, args.requests, args.workers, args.patience)
    print(json.dumps(result), flush=True)
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
