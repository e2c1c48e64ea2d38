"""Acceptance points that take too long for every test run, by name: `make accept`.

    python bench/accept.py              all of them
    python bench/accept.py soak size    some

Each point is a command; it holds where the command exits with 0, and was skipped where that says
why and exits with 77. The throughput point compares with
whatever other engines are installed (see bench/throughput.py) and says which were not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SKIPPED = 77
"""Of a command that needs what this machine does not have."""

PYTEST = ("-m", "pytest", "-s", "-m", "accept")

POINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "size": (
        "a bare install is under 80 MB without NumPy and needs no torch, cupy or numba",
        (*PYTEST, "tests/e2e/test_packaging.py"),
    ),
    "rootfs": (
        "the images' root file systems are small, and serve read-only as a user who is not root",
        ("bench/rootfs.py",),
    ),
    "greedy": (
        "same greedy tokens with and without prefix cache, chunks, preemption and batching",
        (*PYTEST, "tests/e2e/test_greedy_matrix.py"),
    ),
    "kernels": (
        "every CUDA kernel and variant compiles for every architecture, and computes as float64",
        (*PYTEST, "tests/kernels"),
    ),
    "start": (
        "with model and caches warm, `cuengine generate` shows a token within 3 s",
        ("bench/start_up.py", "--limit", "3"),
    ),
    "profile": (
        "`cuengine profile` accounts for 95 % of each step's time by name, and costs under 10 %",
        ("bench/profile_share.py", "--require", "0.95"),
    ),
    "soak": (
        "500 requests, 30 % aborted: no hang, the block pool whole, memory flat",
        ("bench/soak.py",),
    ),
    "speculation": (
        "prompt lookup repeats a list of 40 names in 1.5 times fewer steps, and faster",
        ("bench/speculation.py", "--require", "1.5"),
    ),
    "kv_memory": (
        "at most 4 % of reserved KV memory wasted, blocks shared as the trace allows",
        ("bench/kv_memory.py", "--check"),
    ),
    "structured": (
        "200 JSON-schema requests: each answer that finishes parses and validates",
        ("bench/structured.py",),
    ),
    "kills": (
        "50 streams, the engine's process killed three times: each equal to its undisturbed run",
        ("bench/engine_kills.py",),
    ),
    "ray": (
        "a Ray cluster of two nodes: 40 streams outlive a replica and a node; updated under load",
        (*PYTEST, "tests/many_machines"),
    ),
    "clients": (
        "what OpenAI's packages, langchain, litellm and schemathesis send and get is right",
        (*PYTEST, "tests/api/clients"),
    ),
    "load": (
        "a load from llama-benchy: every request answered in full",
        ("bench/client_load.py",),
    ),
    "malformed": (
        "1,000 malformed requests: no 5xx, no leak, a good one is answered after each hundred",
        ("bench/malformed.py",),
    ),
    "vanish": (
        "300 clients vanish after three tokens: all blocks free a second after the last",
        ("bench/vanishing.py",),
    ),
    "overhead": (
        "as many streams at full rate as vLLM's server, where it is, and a first token sooner",
        ("bench/http_overhead.py", "--require"),
    ),
    "throughput": (
        "at least 1.6 times vLLM's CPU build and 6 times transformers, where they are installed",
        ("bench/throughput.py", "--engine", "all", "--require", "vllm=1.6", "hf=6"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(POINTS)}")
    names = parser.parse_args().names or list(POINTS)
    if unknown := [name for name in names if name not in POINTS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(POINTS)}")
    results = []
    for name in names:
        claim, command = POINTS[name]
        print(f"== {name}: {claim}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, *command], check=False, cwd=ROOT).returncode
        results.append((name, code, time.monotonic() - start))
    print()
    for name, code, seconds in results:
        held = {0: "holds", SKIPPED: "skipped"}.get(code, f"FAILED (status {code})")
        print(f"{name:<12} {held:<20} {seconds:6.0f} s")
    sys.exit(any(code not in (0, SKIPPED) for _, code, _ in results))


if __name__ == "__main__":
    main()
