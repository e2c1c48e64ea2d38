"""JSON-schema requests on a real model: does each answer that finishes fit, and at what cost?

    python bench/structured.py                      200 requests on smollm2-135m, 32 at a time
    python bench/structured.py --requests 20        fewer

Random, seeded schemas: nested objects, enums, arrays, numbers, strings within and beyond ASCII,
with `$ref`, `anyOf`, `const`, formats and bounds. Each answer that finishes is parsed and validated
with the package `jsonschema`. Prints one line of JSON; fails where an answer is not valid, where
fewer than `--finished` of the requests finish, or where a block of the pool is not free at the end.

mask_us is the time that the masks of a step take, divided by its rows under a grammar: what a token
of such a request costs on the host besides the model's own work. step_ms is a whole step's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

from cuengine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, batch_builder

Schema = dict[str, Any]

_NAMES = ("name", "age", "city", "größe", "名前", "tags", "size", "kind of thing", "e-mail", "next")
_WORDS = ("red", "green", "naïve", "Zürich", "東京", "🎉", 'say "hi"', "back\\slash", "", "a\nb")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
_PATTERNS = ("[A-Z]{2}[0-9]{3}", "(yes|no|maybe)", "[a-zà-ü]{1,8}", "#[0-9a-f]{6}")


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """An object with a few properties, `depth` levels deep at most."""
    schema = _object(rng, depth, ["#/$defs/shared"])
    schema["$defs"] = {"shared": _leaf(rng)}
    return schema


def _any(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    if depth <= 0 or rng.random() < 0.45:
        return _leaf(rng)
    return rng.choice([_object, _object, _array, _array, _union, _reference])(rng, depth - 1, refs)


def _object(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth, refs) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["title"], schema["description"] = "A thing", "Für alle Fälle"
    return schema


def _array(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    low = rng.randint(0, 2)
    items = {"items": _any(rng, depth, refs), "minItems": low, "maxItems": low + rng.randint(0, 3)}
    if rng.random() < 0.2:
        items = {"prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "minItems": 2}
    return {"type": "array", **items}


def _union(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    return {"anyOf": [_any(rng, depth, refs), rng.choice([{"type": "null"}, _leaf(rng)])]}


def _reference(rng: random.Random, depth: int, refs: list[str]) -> Schema:
    return {"$ref": rng.choice(refs)}


def _leaf(rng: random.Random) -> Schema:
    low = rng.randint(-20, 20)
    leaves: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "maxLength": rng.randint(1, 20)},
        lambda: {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 12)},
        lambda: {"type": "string", "pattern": f"^{rng.choice(_PATTERNS)}$"},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
        lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        lambda: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 5},
        lambda: {"type": "number", "minimum": low / 4, "maximum": low / 4 + rng.randint(1, 100)},
        lambda: {"type": "boolean"},
        lambda: {"type": ["string", "null"], "maxLength": 6},
        lambda: {"enum": rng.sample([*_WORDS, None, True, 3, -2.5], rng.randint(1, 4))},
        lambda: {"type": "string", "enum": rng.sample(_WORDS, rng.randint(1, 5))},
        lambda: {"const": rng.choice(["Ünïcode", 7, {"a": [1, "é"]}])},
    ]
    return rng.choice(leaves)()


class MaskClock:
    """Times what fills the masks of each step, through the batch builder's own call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rows = 0
        self._inner = batch_builder.allowed_mask
        batch_builder.allowed_mask = self

    def __call__(self, rows: Any) -> Any:
        start = time.perf_counter()
        masks = self._inner(rows)
        if masks is not None:
            self.seconds += time.perf_counter() - start
            self.rows += sum(row is not None for row in rows)
        return masks


def problem_with(output: RequestOutput, schema: Schema) -> str | None:
    """What is wrong with an answer that finished."""
    text = output.outputs[0].text
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(text), schema, format_checker=checker)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error!s:.200}: {text!r:.300} for {json.dumps(schema)}"
    return None


def run(model: str, count: int, concurrency: int, seed: int, max_tokens: int) -> dict[str, Any]:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    llm = LLM(model, device="cpu", max_num_seqs=concurrency, max_model_len=max_tokens + 1024)
    asks = [f"Invent a thing. Answer in JSON, with: {', '.join(s['properties'])}" for s in schemas]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=i,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for i, schema in enumerate(schemas)
    ]
    start = time.perf_counter()
    for one in params:
        llm.engine.compile_grammar(one)
    compiling = time.perf_counter() - start
    clock = MaskClock()
    start = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": ask}] for ask in asks], params)
    seconds = time.perf_counter() - start
    reasons = Counter(str(output.outputs[0].finish_reason) for output in outputs)
    finished = [(o, s) for o, s in zip(outputs, schemas, strict=True)
                if o.outputs[0].finish_reason == "stop"]  # fmt: skip
    problems = [p for output, schema in finished if (p := problem_with(output, schema))]
    stats = llm.stats()
    if stats.num_used_blocks or stats.num_running or stats.num_waiting:
        problems.append(f"the engine is not empty: {stats}")
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    return {
        "model": Path(model).name,
        "requests": count,
        "finished": len(finished),
        "valid": len(finished) - len(problems),
        "finish_reasons": dict(reasons),
        "tokens": sum(tokens),
        "median_tokens": statistics.median(tokens),
        "compile_ms": round(1e3 * compiling / count, 2),
        "mask_us": round(1e6 * clock.seconds / max(1, clock.rows), 1),
        "step_ms": round(1e3 * seconds / stats.num_steps, 1),
        "mask_share": round(clock.seconds / seconds, 4),
        "seconds": round(seconds, 1),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--finished", type=float, default=0.9, help="part that must finish")
    args = parser.parse_args()
    result = run(args.model, args.requests, args.concurrency, args.seed, args.max_tokens)
    print(json.dumps(result, ensure_ascii=False))
    sys.exit(bool(result["problems"]) or result["finished"] < args.finished * args.requests)


if __name__ == "__main__":
    main()
