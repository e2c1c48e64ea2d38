"""Output tokens per second on a trace of real request lengths, side by side with other engines.

    python bench/throughput.py --engine all --python vllm=/venvs/vllm/bin/python

Every engine gets the same random prompts, all at once, and gives exactly the trace's output lengths
(cut at --max-output), greedily, past any end-of-sequence token, in float32. Each runs in a process
of its own, one after the other, and prints one line of JSON; loading and a first short request are
not in the timed part. With several engines a line of ratios follows. What runs in those processes
is in bench/engines/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
DEFAULT_TRACE = BENCH / "data" / "sharegpt_lengths.json"


@dataclass(frozen=True, slots=True)
class Engine:
    """script: in bench/engines/; module: what its interpreter must be able to import."""

    script: str
    module: str


ENGINES = {
    "cuengine": Engine("cuengine_offline.py", "cuengine"),
    "vllm": Engine("vllm_offline.py", "vllm"),
    "hf": Engine("hf_static.py", "transformers"),
}


def read_trace(path: Path, num: int, max_output: int) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of the first `num` requests, outputs cut at `max_output`."""
    requests = json.loads(path.read_text())["requests"]
    if not 1 <= num <= len(requests):
        raise SystemExit(f"--num {num}: {path} has {len(requests)} requests")
    return [(prompt, min(output, max_output)) for prompt, output in requests[:num]]


def ordinary_tokens(model: Path) -> list[int]:
    """The model's token ids, less those that its tokenizer adds as special."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = model / "tokenizer.json"
    added = json.loads(tokenizer.read_text())["added_tokens"] if tokenizer.exists() else []
    special = {token["id"] for token in added}
    return [token for token in range(vocab_size) if token not in special]


def random_prompts(lengths: Sequence[int], tokens: Sequence[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(tokens, k=length) for length in lengths]


def model_folder(name: str) -> Path:
    """A folder that cuengine loads: a GGUF model is converted to one first."""
    path = Path(name)
    if (path / "config.json").is_file():
        return path.resolve()
    from cuengine.model.find import find_model
    from cuengine.model.gguf import convert_gguf

    files = find_model(name)
    if files.folder is not None:
        return files.folder
    assert files.gguf is not None
    return convert_gguf(files.gguf)


def folder_for(engine: str, folder: Path) -> Path:
    """The same model as the engine reads it: others have no use for quantized tensors."""
    if engine == "cuengine":
        return folder
    from float32_folder import float32_folder

    return float32_folder(folder)


def interpreter(engine: str, given: Mapping[str, str]) -> str:
    """Its Python: --python, else $CUENGINE_BENCH_PYTHON_<ENGINE>, else this one."""
    variable = f"CUENGINE_BENCH_PYTHON_{engine.upper()}"
    return given.get(engine) or os.environ.get(variable) or sys.executable


def is_installed(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False, cwd="/").returncode == 0
    except OSError:
        return False


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in found:
            yield from descendants(int(child))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants now; Linux only, 0 elsewhere."""
    pages = 0
    for process in descendants(pid):
        try:
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except OSError:  # it has ended
            continue
    return pages * resource.getpagesize()


def run_engine(engine: str, python: str, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Result lines of one engine; its own output goes to stderr. SystemExit when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "workload.json", Path(folder) / "results.json"
        given.write_text(json.dumps(workload))
        script = BENCH / "engines" / ENGINES[engine].script
        process = subprocess.Popen([python, script, given, results], stdout=sys.stderr)
        peak = 0
        ended = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.25):
                peak = max(peak, resident_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        ended.set()
        watcher.join()
        if code != 0:
            raise SystemExit(f"{engine}: {script.name} ended with status {code}")
        return [result_line(result, workload, peak) for result in json.loads(results.read_text())]


def result_line(
    result: Mapping[str, Any], workload: Mapping[str, Any], peak_rss: int
) -> dict[str, Any]:
    """What is printed for a run, and its tokens. SystemExit if any are missing."""
    got, wanted = [len(ids) for ids in result["token_ids"]], workload["max_tokens"]
    if got != wanted:
        raise SystemExit(f"{result['engine']}: gave {got} output tokens, not {wanted}")
    tokens_out = sum(got)
    return {
        "engine": result["engine"],
        "requests": len(got),
        "tokens_in": sum(map(len, workload["prompts"])),
        "tokens_out": tokens_out,
        "seconds": round(result["seconds"], 2),
        "output_tokens_per_second": round(tokens_out / result["seconds"], 1),
        "peak_rss_mib": round(peak_rss / 2**20),
        "steps": result["steps"],
        "mean_batch": result["mean_batch"] and round(result["mean_batch"], 1),
        "load_seconds": round(result["load_seconds"], 1),
        "settings": result["settings"],
        "token_ids": result["token_ids"],
    }


def compare(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The first line's speed over each other's, and the share of tokens before any difference.

    Tokens can differ where two logits are within rounding; a share near 0 would mean other work.
    """
    first = lines[0]
    ratios, same = {}, {}
    for line in lines[1:]:
        name = f"{first['engine']}/{line['engine']}"
        speeds = first["output_tokens_per_second"], line["output_tokens_per_second"]
        ratios[name] = round(speeds[0] / speeds[1], 2)
        common = sum(map(common_prefix, first["token_ids"], line["token_ids"]))
        same[name] = round(common / first["tokens_out"], 3)
    return {"ratios": ratios, "same_tokens": same}


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            return position
    return len(left)


def pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """["vllm=X", ...] -> {"vllm": "X", ...}"""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise SystemExit(f"{option} {text!r}: write ENGINE=VALUE")
        found[name] = value
    return found


def missed(ratios: Mapping[str, float], required: Mapping[str, float]) -> list[str]:
    """Complaints about ratios below what is required; an engine that did not run has none."""
    return [
        f"{name}: {ratio} is below the required {required[other]}"
        for name, ratio in ratios.items()
        if (other := name.partition("/")[2]) in required and ratio < required[other]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--num", type=int, default=48, help="requests, from the trace's start")
    parser.add_argument("--max-output", type=int, default=256, help="cut outputs at so many tokens")
    parser.add_argument("--engine", nargs="+", default=["cuengine"], choices=[*ENGINES, "all"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts' tokens")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENGINE=PATH",
        help="interpreter of an engine that lives in another environment",
    )
    parser.add_argument(
        "--require",
        nargs="+",
        default=[],
        metavar="ENGINE=RATIO",
        help="exit with 1 where the first engine is not so many times as fast as another that ran",
    )
    arguments = parser.parse_args()
    pythons = pairs(arguments.python, "--python")
    required = {name: float(x) for name, x in pairs(arguments.require, "--require").items()}
    engines = list(ENGINES) if "all" in arguments.engine else arguments.engine

    requests = read_trace(arguments.trace, arguments.num, arguments.max_output)
    folder = model_folder(arguments.model)
    lengths = [prompt for prompt, _ in requests]
    workload = {
        "prompts": random_prompts(lengths, ordinary_tokens(folder), arguments.seed),
        "max_tokens": [output for _, output in requests],
    }
    lines: list[dict[str, Any]] = []
    for engine in engines:
        python = interpreter(engine, pythons)
        module = ENGINES[engine].module
        if not is_installed(python, module):
            print(json.dumps({"engine": engine, "skipped": f"no {module} in {python}"}))
            continue
        model = str(folder_for(engine, folder))
        for line in run_engine(engine, python, {"model": model, **workload}):
            lines.append(line)
            shown = {key: value for key, value in line.items() if key != "token_ids"}
            print(json.dumps(shown), flush=True)
    if len(lines) > 1:
        comparison = compare(lines)
        print(json.dumps(comparison))
        if complaints := missed(comparison["ratios"], required):
            raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main()
