"""Seconds from starting `cuengine generate` to its first token, in a new process each time.

    python bench/start_up.py --runs 5 --limit 3

The first run warms the model's and the kernels' caches and does not count. Where this interpreter,
or the one in $CUENGINE_BENCH_PYTHON_VLLM, has vLLM, that starts on the same model too, once to warm
its caches and once to count. Prints one line of JSON and exits with 1 where cuengine's median is
above the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from throughput import BENCH, ENGINES, folder_for, interpreter, is_installed, model_folder

CUENGINE = str(Path(sys.executable).with_name("cuengine"))


def first_token(command: Sequence[str]) -> float:
    """Seconds until the first byte of the text on stdout. SystemExit where there is none."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit(f"{' '.join(command[:2])} ended with status {process.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, help="most seconds to the first token")
    arguments = parser.parse_args()
    command = [CUENGINE, "generate", arguments.model, "-p", "hi", "--max-tokens", "8"]
    cold = first_token(command)
    warm = [first_token(command) for _ in range(arguments.runs)]
    median = statistics.median(warm)
    result = {"first": cold, "warm_median": median, "warm_worst": max(warm)}
    python = interpreter("vllm", {})
    if is_installed(python, ENGINES["vllm"].module):
        script = str(BENCH / "engines" / "vllm_first_token.py")
        command = [python, script, str(folder_for("vllm", model_folder(arguments.model)))]
        first_token(command)
        result["vllm"] = first_token(command)
        result["vllm_ratio"] = result["vllm"] / median
    else:
        print(f"vllm: not installed in {python}", file=sys.stderr)
    print(json.dumps({name: round(seconds, 2) for name, seconds in result.items()}))
    if arguments.limit is not None and median > arguments.limit:
        raise SystemExit(f"first token after {median:.2f} s: more than {arguments.limit:g} s")


if __name__ == "__main__":
    main()
