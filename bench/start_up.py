"""Seconds from starting `cuengine generate` to its first token, in a new process each time.

    python bench/start_up.py --runs 5 --limit 3

The first run warms the model's and the kernels' caches and does not count. Prints one line of JSON
and exits with 1 where the median is above the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CUENGINE = Path(sys.executable).with_name("cuengine")


def first_token(model: str) -> float:
    """Seconds until the first byte of the text. SystemExit where there is none."""
    start = time.perf_counter()
    command = [CUENGINE, "generate", model, "-p", "hi", "--max-tokens", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit(f"{CUENGINE} generate ended with status {process.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, help="most seconds to the first token")
    arguments = parser.parse_args()
    cold = first_token(arguments.model)
    warm = [first_token(arguments.model) for _ in range(arguments.runs)]
    median = statistics.median(warm)
    result = {"first": cold, "warm_median": median, "warm_worst": max(warm)}
    print(json.dumps({name: round(seconds, 2) for name, seconds in result.items()}))
    if arguments.limit is not None and median > arguments.limit:
        raise SystemExit(f"first token after {median:.2f} s: more than {arguments.limit:g} s")


if __name__ == "__main__":
    main()
