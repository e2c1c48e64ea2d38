"""Malformed requests of ten kinds, made up from a seed: what `malformed.py` sends.

Case i of a seed is always the same and does not depend on the others, so that one that shows a bug
can be sent again alone.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from served import post

Json = Any
Random = random.Random

MEGABYTES = 5 * 2**20

_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {
        "model": "",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi!"}], "name": "me"},
        ],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "seed": 1,
        "stop": ["xyz"],
        "logprobs": True,
        "top_logprobs": 1,
        "logit_bias": {"65": -1},
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [_TOOL],
        "tool_choice": "none",
        "chat_template_kwargs": {"thinking": False},
    },
    "/v1/completions": {
        "model": "",
        "prompt": ["Hi!", "Ho!"],
        "max_tokens": 2,
        "echo": True,
        "logprobs": 1,
        "presence_penalty": 0.1,
        "min_p": 0.1,
        "top_k": 5,
        "stop_token_ids": [3],
        "prompt_logprobs": 1,
        "structured_outputs": {"regex": "[a-z]+"},
    },
    "/v1/responses": {
        "model": "",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi!"}]}],
        "instructions": "Be brief.",
        "max_output_tokens": 2,
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
    },
    "/tokenize": {"model": "", "prompt": "Hi!", "add_special_tokens": False},
    "/detokenize": {"model": "", "tokens": [65, 66]},
}
"""A good request for each route that reads a body: what the malformed ones are made from."""
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}

_WRONG: tuple[Json, ...] = (
    None, True, False, 0, -1, 1.5, "", "x", "1", [], [None], [[1]], ["a", 1], {}, {"a": 1},
    {"type": "json_schema"}, {"type": []}, [{}], [[[]]], "null", "\x00",
)  # fmt: skip
_NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-0", "-0.0", "1e-400",
    "9" * 19, "9" * 40, "-" + "9" * 400, "9" * 5000, "0." + "1" * 5000, "1" + "0" * 310,
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616",
    "2147483648", "4294967296", "01", "+1", "1.", ".5", "0x10", "1e", "1_000", "--1", "1,5",
)  # fmt: skip
_NO_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10", "1e",
                         "1_000", "--1"})  # fmt: skip
_SURROGATES = (b"\\ud800", b"\\udfff", b"a\\uDC00b", b"\\ud83d", b"\\ud83d\\ud83d",
               b"\\udc00\\ud800", b"\xed\xa0\x80", b"\xed\xbf\xbf",
               b"\xf0\x9f\x98", b"\xc0\x80", b"\xff")  # fmt: skip
_DEPTHS = (20, 200, 900, 1100, 5000, 100_000)
_PLACE = "@@place@@"


@dataclass(frozen=True, slots=True)
class Case:
    """kind      one of KINDS
    data      what is sent, `pause` seconds apart
    complete  the server can tell where the request ends and must answer; else it may just hang up
    refused   a success would be wrong
    """

    kind: str
    data: tuple[bytes, ...]
    complete: bool = True
    refused: bool = False
    pause: float = 0.0


def cases(seed: int, count: int, pause: float) -> Iterator[Case]:
    """All kinds in turn. pause: seconds between two bytes of those that dawdle."""
    for index in range(count):
        yield case(seed, index, pause)


def case(seed: int, index: int, pause: float) -> Case:
    rng = Random(f"{seed} {index}")
    kind = list(KINDS)[index % len(KINDS)]
    made = KINDS[kind](rng)
    return replace(made, pause=pause) if kind == "slow" else made


# --- what is no HTTP ----------------------------------------------------------------------------


def _noise(rng: Random) -> Case:
    """Bytes that no request begins with."""
    data = rng.randbytes(rng.choice([1, 20, 300, 20_000]))
    return Case("noise", (b"\x80" + data + rng.choice([b"", b"\r\n\r\n"]),), complete=False)


def _broken_http(rng: Random) -> Case:
    data = _good(rng)
    head, _, body = data.partition(b"\r\n\r\n")
    breaks = rng.choice([_flip_bytes, _flip_bytes, _cut, _change_lines, _odd_lines])
    return Case("http", (breaks(rng, head) + b"\r\n\r\n" + body,), complete=False)


def _flip_bytes(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _change_lines(rng: Random, head: bytes) -> bytes:
    lines = head.split(b"\r\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        match rng.randrange(3):
            case 0:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 1 if len(lines) > 1:
                del lines[at]
            case _:
                rng.shuffle(lines)
    return rng.choice([b"\r\n", b"\n", b"\r", b"\r\n "]).join(lines)


def _odd_lines(rng: Random, head: bytes) -> bytes:
    line = rng.choice([
        b"Content-Length: -5", b"Content-Length: 99999999999999999999", b"Content-Length: 1, 2",
        b"Content-Length: 0x10", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
        b"Content-Encoding: gzip", b"Content-Encoding: br", b"Content-Type: text/\xff",
        b"Content-Type: application/json; charset=no-such", b"Content-Type: ;;;=", b"NoColon",
        b": no name", b"A b: c", b"X: " + b"y" * 100_000, b"\r\n".join([b"X: y"] * 2000),
        b"Expect: 100-continue", b"Expect: the-unexpected", b"Upgrade: websocket", b"Host: \x00",
        b"Connection: upgrade, close", b"Authorization: Bearer \xff\xfe", b"X-Request-Id: \x01",
        b"Cookie: " + b"a=b;" * 1000, b"traceparent: 00-zz-zz-zz",
    ])  # fmt: skip
    first, *rest = head.split(b"\r\n")
    rest.insert(rng.randrange(len(rest) + 1), line)
    if rng.random() < 0.3:
        method, path, version = first.split(b" ")
        path = rng.choice([path, b"*", b"/%", b"/%00", b"/../../etc/passwd", b"//x", b"/v1/models/"
                           + b"a" * 20_000, b"http://[::1", b"/static/..%2f..%2fetc"])  # fmt: skip
        version = rng.choice([version, b"HTTP/9.9", b"HTTP/1.0", b"HTTP/0.9", b"", b"HTTP/2"])
        method = rng.choice([method, b"GET", b"BREW", b"get", b"", b"CONNECT", b"TRACE"])
        first = b" ".join([method, path, version])
    return b"\r\n".join([first, *rest])


def _broken_chunks(rng: Random) -> Case:
    path, body = _route(rng)
    data = json.dumps(body).encode()
    half = len(data) // 2
    size = b"%x\r\n" % len(data)
    good = size + data + b"\r\n0\r\n\r\n"
    chunks = rng.choice([
        b"ZZ\r\n" + data, b"-5\r\n" + data, b"\r\n\r\n", b"0x5\r\n" + data,
        b"f" * 40 + b"\r\n" + data, b"%x\r\n" % (len(data) + 10) + data + b"\r\n0\r\n\r\n",
        b"%x\r\n" % half + data + b"\r\n0\r\n\r\n", size + data + b"0\r\n\r\n",
        size[:-2] + b";" + b"a" * 50_000 + b"\r\n" + data + b"\r\n0\r\n\r\n",
        good[:-2] + b"\r\n".join([b"Trailer: x"] * 3000) + b"\r\n\r\n",
        good[:-2] + b"Bad trailer\r\n\r\n",
        size.replace(b"\r\n", b"\n") + data + b"\n0\n\n", good[: rng.randrange(len(good))],
        _flip_bytes(rng, good), b"0\r\n\r\n", b"".join(b"1\r\n%c\r\n" % byte for byte in data),
    ])  # fmt: skip
    coding = rng.choice(
        ["chunked", "chunked", "chunked", "chunked, gzip", "gzip, chunked", "Chunked "]
    )
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nTransfer-Encoding: {coding}\r\n\r\n"
    return Case("chunked", (head.encode() + chunks,), complete=False)


def _dawdling(rng: Random) -> Case:
    """A request that comes a byte at a time and never ends: in its headers, or in its body."""
    data = _good(rng)
    end_of_head = data.index(b"\r\n\r\n")
    start = rng.randrange(1, end_of_head)
    if rng.random() < 0.5:
        start = end_of_head + 4 + rng.randrange(len(data) - end_of_head - 5)
        return Case("slow", (data[:start], *_each(data[start:-1])), refused=True)
    endless = b"\r\nX-Slow: " + b"y" * 1000
    return Case("slow", (data[:start], *_each(endless)), refused=True)


def _each(data: bytes) -> Iterator[bytes]:
    return (bytes([byte]) for byte in data)


# --- what is no request -------------------------------------------------------------------------


def _broken_json(rng: Random) -> Case:
    path, body = _route(rng)
    text = json.dumps(body).encode()
    breaks = rng.choice([_flip_bytes, _flip_bytes, _cut, lambda rng, _: rng.randbytes(200)])
    return Case("json", (post(path, breaks(rng, text)),))


def _wrong_types(rng: Random) -> Case:
    path, body = _route(rng)
    for _ in range(rng.randint(1, 3)):
        body = _replaced(rng, body, rng.choice(_WRONG))
    return Case("types", (post(path, json.dumps(body).encode()),))


def _wild_numbers(rng: Random) -> Case:
    number = rng.choice(_NUMBERS)
    path, body = _route(rng)
    text = json.dumps(_replaced(rng, body, _PLACE)).replace(f'"{_PLACE}"', number)
    return Case("numbers", (post(path, text.encode()),), refused=number in _NO_NUMBERS)


def _deep_nesting(rng: Random) -> Case:
    depth = rng.choice(_DEPTHS)
    opening, closing = rng.choice(
        [("[", "]"), ('{"a":', "}"), ('{"anyOf":[', "]}"), ('[{"":', "}]")]
    )
    whole = rng.random() < 0.7
    nest = opening * depth + "1" + (closing * depth if whole else "")
    path, body = _route(rng)
    body = rng.choice([
        lambda: _replaced(rng, body, _PLACE),
        lambda: body | {"nobody knows": _PLACE},
        lambda: body | {"structured_outputs": {"json": _PLACE}},
        lambda: body | {"metadata": _PLACE},
        lambda: _PLACE,
    ])()  # fmt: skip
    text = json.dumps(body).replace(f'"{_PLACE}"', nest)
    return Case("nesting", (post(path, text.encode()),), refused=not whole)


def _half_characters(rng: Random) -> Case:
    """Halves of surrogate pairs, escaped and not, and other bytes that are not UTF-8."""
    path, body = _route(rng)
    half = b"x" + rng.choice(_SURROGATES) + rng.choice([b"", b"y", b"\\u0041"])
    if rng.random() < 0.3:
        text = json.dumps(_replaced(rng, body, {_PLACE: 1})).encode()
    else:
        text = json.dumps(_replaced(rng, body, _PLACE)).encode()
    return Case("surrogates", (post(path, text.replace(_PLACE.encode(), half)),), refused=True)


def _megabytes(rng: Random) -> Case:
    """Five megabytes where a few bytes are expected; now and then more than a body may have."""
    path, body = _route(rng)
    letters = rng.choice(["a", "word ", "é", "\U0001f600", "\x00", "\n", " ", '"'])
    text = letters * (MEGABYTES // len(json.dumps(letters)[1:-1]))
    big = rng.choice([
        lambda: text,
        lambda: [65] * (MEGABYTES // 4),
        lambda: ["a"] * (MEGABYTES // 5),
        lambda: [[1]] * (MEGABYTES // 5),
        lambda: {str(number): 1 for number in range(MEGABYTES // 12)},
        lambda: [{"role": "user", "content": "a"}] * (MEGABYTES // 34),
        lambda: [{"type": "text", "text": "a"}] * (MEGABYTES // 30),
        lambda: text * 4,
    ])()  # fmt: skip
    if rng.random() < 0.6:
        field = _PROMPTS[path]
        wrapped = path == "/v1/chat/completions" and isinstance(big, str)
        body = body | {field: [{"role": "user", "content": big}] if wrapped else big}
    else:
        body = _replaced(rng, body, big)
    return Case(
        "megabytes", (post(path, json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()),)
    )


def _route(rng: Random) -> tuple[str, Json]:
    path = rng.choice(list(BODIES))
    body = copy.deepcopy(BODIES[path])
    if rng.random() < 0.5:
        for name in rng.sample(sorted(body), rng.randint(0, len(body) - 1)):
            if name not in ("max_tokens", "max_output_tokens"):
                del body[name]
    return path, body


def _good(rng: Random) -> bytes:
    path, body = _route(rng)
    return post(path, json.dumps(body).encode())


def _replaced(rng: Random, body: Json, value: Json) -> Json:
    """`body` with something in it, at any depth, replaced."""
    node = body
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner = node[key]
        if not (isinstance(inner, dict | list) and inner and rng.random() < 0.5):
            node[key] = value
            return body
        node = inner


KINDS: dict[str, Callable[[Random], Case]] = {
    "noise": _noise,
    "http": _broken_http,
    "chunked": _broken_chunks,
    "slow": _dawdling,
    "json": _broken_json,
    "types": _wrong_types,
    "numbers": _wild_numbers,
    "nesting": _deep_nesting,
    "surrogates": _half_characters,
    "megabytes": _megabytes,
}
