"""How much KV memory is wasted, and how much is shared: a trace of lengths, and no model.

    python bench/kv_memory.py                              tables, then the same as a line of JSON
    python bench/kv_memory.py --plot docs/kv_memory.svg    and a picture (extra `bench`)

The trace's requests all wait from the start, so that memory is what limits the batch, and are
served first come, first served. Steps count as long as somebody waits. cuengine is the real engine
with tokens made up (bench/memory/paged.py). What it is compared with, contiguous memory, is
simulated as in Kwon et al., SOSP 2023 (bench/memory/contiguous.py), with the same amount of memory:
by default what OPT-13B has on an A100 of 40 GB there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from throughput import BENCH, DEFAULT_TRACE, read_trace

from cuengine.config import BLOCK_SIZES

sys.path.insert(0, str(BENCH / "memory"))

import contiguous
import paged
from memory_counts import BlockSharing, SlotUsage
from memory_plot import draw

BLOCK_SIZE = 16
"""For what is asked of the figures, and for sharing."""

SIZES = (2, 4, 6)

RECORDING = BENCH / "data" / "smollm2_beams.json"
"""What decides which beams fork; of record_beams.py."""

OPT_13B_SLOTS = 15728
"""Tokens in 12 GiB at 800 KiB each: 2 * 40 layers * 5120 * 2 bytes."""

PAPER_TOKENS = {
    "maximum length": 20.4,
    "next power of two": 26.8,
    "oracle": 38.2,
    f"cuengine, blocks of {BLOCK_SIZE}": 96.3,
}
"""Percent of KV memory that holds tokens: Kwon et al., figure 2."""

PAPER_SAVED = {"parallel": (16.2, 30.5), "beam": (44.3, 66.3)}
"""Percent of blocks saved for 2 to 6 samples or beams, OPT-13B on ShareGPT: section 6.3."""


def percent(share: float) -> float:
    return round(100 * share, 1)


def usage_row(memory: str, usage: SlotUsage) -> dict[str, Any]:
    return {
        "memory": memory,
        **{use: percent(share) for use, share in usage.shares().items()},
        "paper": PAPER_TOKENS.get(memory),
        "used of reserved": percent(usage.used),
        "at once": round(usage.mean_sequences, 1),
    }


def sharing_row(method: str, size: int, sharing: BlockSharing, alone: float) -> dict[str, Any]:
    """alone: share of blocks saved where only prompts are shared."""
    low, high = PAPER_SAVED[method]
    return {
        "method": method,
        "size": size,
        "saved": percent(sharing.saved),
        "prompts alone": percent(alone),
        "paper, 2 to 6": f"{low} to {high}",
        "at once": round(sharing.mean_sequences, 1),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, with a column for each key of the first row."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [["" if row[name] is None else str(row[name]) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def missed(
    uses: Sequence[Mapping[str, Any]],
    sharing: Sequence[Mapping[str, Any]],
    *,
    max_waste: float,
    tolerance: float,
) -> list[str]:
    """What a run should have come to and did not, as complaints.

    max_waste  percent of reserved slots without a token, in the engine's blocks of BLOCK_SIZE
    tolerance  percentage points below the paper's range, or below what the trace's prompts alone
               allow where that is less
    """
    complaints = []
    for row in uses:
        waste = round(100 - row["used of reserved"], 1)
        if row["memory"] == f"cuengine, blocks of {BLOCK_SIZE}" and waste > max_waste:
            complaints.append(f"{row['memory']}: {waste} % wasted, more than {max_waste} %")
    for row in sharing:
        wanted = PAPER_SAVED[row["method"]][0]
        if row["method"] == "parallel":
            wanted = min(wanted, row["prompts alone"])
        if row["saved"] < wanted - tolerance:
            complaints.append(
                f"{row['method']} {row['size']}: {row['saved']} % saved, less than {wanted} %"
            )
    return complaints


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--num", type=int, default=2000, help="requests, from the trace's start")
    parser.add_argument("--num-searches", type=int, default=200, help="the same for beam search")
    parser.add_argument("--kv-slots", type=int, default=OPT_13B_SLOTS, help="KV memory, in tokens")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0, help="draws the tokens")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture: .svg, .png, .pdf")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 where more than 4 %% is wasted or less is saved than the trace allows",
    )
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace, arguments.num, arguments.max_model_len)
    slots, seed = arguments.kv_slots, arguments.seed

    uses = []
    for name, reserve in contiguous.policies(arguments.max_model_len).items():
        uses.append(usage_row(name, contiguous.replay(requests, reserve, slots)))
    for block_size in BLOCK_SIZES:
        memory = paged.Memory(slots, block_size, arguments.max_model_len)
        usage = paged.replay_alone(requests, memory, seed)
        uses.append(usage_row(f"cuengine, blocks of {block_size}", usage))
    print(f"{table(uses)}\n", flush=True)

    memory = paged.Memory(slots, BLOCK_SIZE, arguments.max_model_len)
    recording = paged.read_recording(RECORDING)
    sharing = []
    for method, params, served in (
        ("parallel", paged.parallel, requests),
        ("beam", paged.beam, requests[: arguments.num_searches]),
    ):
        for size in SIZES:
            alone = paged.prompts_alone(served, size, BLOCK_SIZE)
            runner = paged.MadeUpTokens(recording, seed)
            shared = paged.replay_shared(served, params(size), memory, runner)
            sharing.append(sharing_row(method, size, shared, alone))
    print(f"{table(sharing)}\n")

    settings = {
        "trace": arguments.trace.name,
        "requests": len(requests),
        "searches": len(requests[: arguments.num_searches]),
        "kv_slots": slots,
        "max_model_len": arguments.max_model_len,
    }
    print(json.dumps({**settings, "uses": uses, "sharing": sharing}))
    if arguments.plot is not None:
        draw(uses, sharing, PAPER_SAVED, arguments.plot)
    if arguments.check and (complaints := missed(uses, sharing, max_waste=4, tolerance=0.5)):
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main()
