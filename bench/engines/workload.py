"""What bench/throughput.py hands to an engine's script, and what it takes back.

Each script here runs as `python SCRIPT WORKLOAD.json RESULTS.json` in a fresh interpreter, possibly
of another environment than the project's own; so this module needs the standard library only.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_started = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Workload:
    """model: folder in Hugging Face's layout; request i asks for exactly max_tokens[i] tokens."""

    model: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def longest(self) -> int:
        """Prompt and output together, of the longest request."""
        return max(
            len(prompt) + tokens
            for prompt, tokens in zip(self.prompts, self.max_tokens, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One timed run. steps: forward passes, and mean_batch: tokens wanted per step, where known."""

    engine: str
    load_seconds: float
    seconds: float
    token_ids: list[list[int]]
    steps: int | None = None
    mean_batch: float | None = None
    settings: str = ""


def read_workload() -> Workload:
    return Workload(**json.loads(Path(sys.argv[1]).read_text()))


def write_results(results: list[Result]) -> None:
    Path(sys.argv[2]).write_text(json.dumps([asdict(result) for result in results]))


def seconds_since_start() -> float:
    return time.perf_counter() - _started


def warm_up_prompt(workload: Workload) -> list[int]:
    """A prompt that no request begins with: it must not warm a prefix cache."""
    return workload.prompts[0][::-1][:8]
