"""300 clients connect, read three tokens and vanish: every KV block must be free a second later.

    python bench/vanishing.py

All connect at once and ask for a long stream, more of them than run at once. A third closes its
socket, a third resets the connection, a third closes its side alone and reads no more. From the
last one's end it is timed until /metrics says that nothing runs and no block is held. Fails where
that takes longer than `--limit`, where a file stays open or where the log holds a failure. Prints
one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import sys
import time

from served import ServedModel, lowest, model_path, post, seconds_until_idle

WAYS = ("close", "reset", "half-close")
EVENT = b"data: {"
_LINGER_0_SECONDS = struct.pack("ii", 1, 0)


async def read_and_vanish(port: int, number: int, tokens: int) -> socket.socket | None:
    """One client. Its socket, where it still has one: the one that closed its side alone.

    Raises RuntimeError where the stream ends before so many tokens have come.
    """
    loop = asyncio.get_running_loop()
    peer = socket.socket()
    peer.setblocking(False)
    # Prompts differ, so that they share no blocks.
    body = {"prompt": f"Story {number}:", "max_tokens": 400, "ignore_eos": True, "stream": True}
    await loop.sock_connect(peer, ("127.0.0.1", port))
    await loop.sock_sendall(peer, post("/v1/completions", json.dumps(body).encode()))
    data = b""
    while data.count(EVENT) < tokens:
        piece = await loop.sock_recv(peer, 65536)
        if not piece:
            raise RuntimeError(f"client {number}: the stream has ended: {data!r}")
        data += piece
    match WAYS[number % len(WAYS)]:
        case "half-close":
            peer.shutdown(socket.SHUT_WR)
            return peer
        case "reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0_SECONDS)
    peer.close()
    return None


async def all_vanish(port: int, clients: int, tokens: int) -> list[socket.socket]:
    """All of them at once, to the last one's end; the sockets that are half open."""
    runs = (read_and_vanish(port, number, tokens) for number in range(clients))
    return [peer for peer in await asyncio.gather(*runs) if peer is not None]


def run(model: str, clients: int, tokens: int, limit: float) -> dict[str, object]:
    with ServedModel(model_path(model), "--device", "cpu", "--max-model-len", "1024") as served:
        seconds_until_idle(served.url, 10)
        files = served.open_files()
        start = time.monotonic()
        half_open = asyncio.run(all_vanish(served.port, clients, tokens))
        seconds = time.monotonic() - start
        idle = seconds_until_idle(served.url, 60)
        files_left = lowest(served.open_files, files)
        for peer in half_open:
            peer.close()
        problems = served.problems()
        if idle is None or idle > limit:
            problems.append(f"not all blocks were free within {limit:g} s: {idle} s")
        if files_left > files:
            problems.append(f"{files_left - files} files are left open")
    return {
        "clients": clients,
        "seconds": round(seconds, 1),
        "seconds_to_all_free": idle and round(idle, 3),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds (%(default)s)")
    args = parser.parse_args()
    result = run(args.model, args.clients, args.tokens, args.limit)
    print(json.dumps(result), flush=True)
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
