"""Prompt lookup against plain decoding: steps of the engine and seconds for texts that repeat.

    python bench/speculation.py --require 1.5

The model is asked to repeat lists of 40 names. The same prompts run plainly and with n-gram
speculation, in turn in one process, each several times; the fastest run of each counts. One line of
JSON: steps, seconds, their ratios, and which part of the guesses was right. Exits with 1 where
texts differ, where steps are not fewer by --require, or where speculation is not faster.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from cuengine import LLM, SamplingParams

FIRST = (
    *("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack"),
    *("Kate", "Leo", "Mary", "Noah", "Olive", "Paul", "Rose", "Sam", "Tina", "Victor"),
)
LAST = (
    *("Adams", "Baker", "Clark", "Davis", "Evans", "Foster", "Green", "Harris", "Irwin", "Jones"),
    *("King", "Lewis", "Moore", "Nelson", "Owens", "Parker", "Reed", "Scott", "Turner", "Young"),
)
NUM_NAMES = 40


def prompt(rng: random.Random) -> str:
    """A list of names, and the beginning of its repetition."""
    names = [f"{rng.choice(FIRST)} {rng.choice(LAST)}" for _ in range(NUM_NAMES)]
    text = "\n".join(f"{i}. {name}" for i, name in enumerate(names, 1))
    return f"Here is a list of {NUM_NAMES} names:\n{text}\n\nHere is the same list again:\n1."


def run(llm: LLM, prompts: list[str], max_tokens: int) -> tuple[list[list[int]], float, int]:
    """Tokens, seconds and steps. The prompts' blocks are found from the second time on."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    steps, start = llm.stats().num_steps, time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, seconds, llm.stats().num_steps - steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--prompt-lookup-max", type=int, default=4)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--require", type=float, help="times fewer steps, and faster at all")
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompt_lookup_max": args.prompt_lookup_max,
        "prompt_lookup_min": args.prompt_lookup_min,
    }
    common: dict[str, Any] = {"device": args.device, "max_model_len": 2048}
    plain = LLM(args.model, **common)
    guessing = LLM(args.model, **common, speculative_config=settings)
    rng = random.Random(0)
    prompts = [prompt(rng) for _ in range(args.batch)]
    runs = [
        (run(plain, prompts, args.max_tokens), run(guessing, prompts, args.max_tokens))
        for _ in range(args.runs)
    ]
    seconds = [min(each[i][1] for each in runs) for i in range(2)]
    # The first run computes the prompts; each later one decodes alone.
    steps = [runs[-1][i][2] for i in range(2)]
    same = all(tokens == runs[0][0][0] for each in runs for tokens, _, _ in each)
    stats = guessing.stats()
    result = {
        "model": args.model,
        "batch": args.batch,
        "speculative_config": settings,
        "steps": {"plain": steps[0], "ngram": steps[1], "ratio": round(steps[0] / steps[1], 2)},
        "seconds": {
            "plain": round(seconds[0], 3),
            "ngram": round(seconds[1], 3),
            "ratio": round(seconds[0] / seconds[1], 2),
        },
        "acceptance": round(stats.num_accepted_tokens / max(1, stats.num_draft_tokens), 3),
        "accepted_per_pos": stats.num_accepted_tokens_per_pos,
        "same_tokens": same,
    }
    print(json.dumps(result))
    if args.require is not None:
        fewer = steps[0] >= args.require * steps[1]
        sys.exit(not (same and fewer and seconds[1] < seconds[0]))


if __name__ == "__main__":
    main()
