"""How much of a step's time `cuengine profile` accounts for by name, and what profiling costs.

    python bench/profile_share.py --require 0.95

Runs it on the CPU, at a batch of 1 and of 8, and prints one line of JSON for each. Exits with 1
where less than the required share of prefill's or decode's time has a name, or where a median step
takes more than --cost longer with profiling than without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CUENGINE = str(Path(sys.executable).with_name("cuengine"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--require", type=float, default=0.0, help="least share with a name, 0 to 1"
    )
    parser.add_argument("--cost", type=float, default=0.1, help="most added to a step, as a share")
    arguments = parser.parse_args()
    held = True
    for batch in (1, 8):
        flags = ["--device", "cpu", "--batch", str(batch), "--context", "256", "--steps", "48"]
        command = [CUENGINE, "profile", arguments.model, *flags, "--json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        for section in json.loads(done.stdout)["sections"]:
            median = section["median_step"]
            share = section["named_share"]
            cost = median["profiled"] / median["unprofiled"] - 1
            held &= share >= arguments.require and cost <= arguments.cost
            result = {
                "batch": batch,
                "steps": section["kind"],
                "named_share": round(share, 4),
                "profiled_ms": round(1e3 * median["profiled"], 2),
                "unprofiled_ms": round(1e3 * median["unprofiled"], 2),
                "cost": round(cost, 4),
            }
            print(json.dumps(result), flush=True)
    sys.exit(not held)


if __name__ == "__main__":
    main()
