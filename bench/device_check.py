"""What to run first where there is a GPU: is every kernel right, and how near to the limit is it?

    python bench/device_check.py                        all parts, some minutes
    python bench/device_check.py kernels golden         some
    python bench/device_check.py --dry-run              on the emulated device, with small sizes

kernels     every kernel against its formula in float64, with random data that is new at each run
rates       copy bandwidth and matrix rate of this machine, and each kernel's share of them
decode      a decode step of a Llama-3-8B-shaped model over the bytes that it must read
throughput  tokens per second on a trace of real request lengths, beside transformers
golden      the golden tiny models

Each part runs in a process of its own, so one that fails, hangs or leaves the GPU in a bad state
does not stop the others. At the end comes a table, and with --out the same as JSON. Exits with 1
where something is wrong or a figure misses what is asked of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH / "device"), str(BENCH.parent / "tests" / "kernels")]

from check_report import Report, Row, format_row  # noqa: E402

PARTS = {
    "kernels": ("check_kernels", 200),
    "rates": ("check_rates", 120),
    "decode": ("check_decode", 120),
    "throughput": ("check_throughput", 300),
    "golden": ("check_golden", 120),
}
"""Name: the module in bench/device/, and after how many seconds it is stopped."""

DRY_RUN_SECONDS = 1800
"""The same for the emulated device, where a busy machine is no fault."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write device_check.json there")
    parser.add_argument("--seed", type=int, help="of the random data; printed if not given")
    parser.add_argument("--dry-run", action="store_true", help="emulated device, small sizes")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PARTS)}")
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    if arguments.child:
        run_part(names[0], arguments.child, seed, dry=arguments.dry_run)
        return

    started = time.monotonic()
    print(f"seed {seed}", flush=True)
    results = []
    for name in names:
        limit = DRY_RUN_SECONDS if arguments.dry_run else PARTS[name][1]
        results.append(start_part(name, seed, dry=arguments.dry_run, limit=limit))
    failed = print_table(results, time.monotonic() - started)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = {"seed": seed, "dry_run": arguments.dry_run, "parts": results}
        (arguments.out / "device_check.json").write_text(json.dumps(content, indent=1))
    sys.exit(failed > 0)


def start_part(name: str, seed: int, *, dry: bool, limit: float) -> dict[str, Any]:
    """Run a part in a process, for so many seconds at most; its rows, whatever became of it."""
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        command = [sys.executable, __file__, name, "--child", str(path), "--seed", str(seed)]
        error = ""
        try:
            process = subprocess.run([*command, *["--dry-run"] * dry], check=False, timeout=limit)
            if process.returncode:
                error = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit} s"
        result: dict[str, Any] = {"part": name, "seconds": None, "facts": {}, "rows": []}
        if path.exists():
            result = json.loads(path.read_text())
    if error:
        failure = Row(name, ok=False, note=error)
        result["rows"].append({field: getattr(failure, field) for field in Row.__slots__})
    return result


def run_part(name: str, path: Path, seed: int, *, dry: bool) -> None:
    report = Report(name, path)
    from check_target import Target

    from cuengine.device.cuda.find import usable_gpu

    usable, why = usable_gpu()
    if not dry and not usable:
        report.add(Row(name, ok=False, note=f"{why}; --dry-run needs no GPU"))
        return
    target = Target(dry=dry, seed=seed)
    with report.trying(name):
        importlib.import_module(PARTS[name][0]).run(target, report)
    runtime = target.__dict__.get("runtime")
    if runtime is not None:
        report.facts = {"device": runtime.name, "architecture": f"sm_{runtime.architecture}"}
        if not dry:
            report.facts |= {
                "multiprocessors": str(runtime.multiprocessors),
                "memory": f"{runtime.memory_info()[1] / 2**30:.1f} GiB",
                "cublas": f"{runtime.cublas.version}, {runtime.cublas.library}",
            }
    report.save()


def print_table(results: list[dict[str, Any]], seconds: float) -> int:
    """All rows; how many are not as they should be."""
    failed = 0
    for result in results:
        facts = ", ".join(f"{name} {value}" for name, value in result["facts"].items())
        print(f"\n{result['part']}: {result['seconds']} s  {facts}")
        for fields in result["rows"]:
            row = Row(**fields)
            failed += row.ok is False
            print(f"  {format_row(row)}")
    rows = sum(len(result["rows"]) for result in results)
    print(f"\n{seconds:.0f} s, {rows} rows, {failed} not as they should be")
    return failed


if __name__ == "__main__":
    main()
