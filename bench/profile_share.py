"""How much of a step's time `cuengine profile` accounts for by name, and what profiling costs.

    python bench/profile_share.py --require 0.95

Runs it on the CPU, at a batch of 1 and of 8, and prints one line of JSON for each kind of step.
Exits with 1 where less than the required share of the time has a name, or where the median decode
step takes more than --cost longer with profiling than without (prompts make only a step or two,
which prove nothing). A machine with other work can make any run look so, hence up to --runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CUENGINE = str(Path(sys.executable).with_name("cuengine"))


def profile(model: str, batch: int, steps: int, *, require: float, most: float) -> bool:
    """Whether one run holds both; prints what it gave."""
    flags = ["--device", "cpu", "--batch", str(batch), "--context", "128", "--steps", str(steps)]
    command = [CUENGINE, "profile", model, *flags, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    held = True
    for section in json.loads(done.stdout)["sections"]:
        median = section["median_step"]
        share, cost = section["named_share"], median["profiled"] / median["unprofiled"] - 1
        held &= share >= require and (section["kind"] == "prefill" or cost <= most)
        result = {
            "batch": batch,
            "steps": section["kind"],
            "named_share": round(share, 4),
            "profiled_ms": round(1e3 * median["profiled"], 2),
            "unprofiled_ms": round(1e3 * median["unprofiled"], 2),
            "cost": round(cost, 4),
        }
        print(json.dumps(result), flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument(
        "--require", type=float, default=0.0, help="least share with a name, 0 to 1"
    )
    parser.add_argument("--cost", type=float, default=0.1, help="most added to a step, as a share")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    for batch in (1, 8):
        if not any(
            profile(given.model, batch, given.steps, require=given.require, most=given.cost)
            for _ in range(given.runs)
        ):
            sys.exit(1)


if __name__ == "__main__":
    main()
