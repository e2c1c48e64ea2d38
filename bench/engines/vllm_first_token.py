"""A prompt on vLLM's CPU build, from nothing to the first token: what start_up.py compares with.

    python vllm_first_token.py MODEL_FOLDER

Only the text goes to stdout; what vLLM prints there goes to stderr.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    stdout = os.dup(1)
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from vllm import LLM, SamplingParams

    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=2048)
    outputs = llm.generate("hi", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    os.write(stdout, outputs[0].outputs[0].text.encode() or b" ")


if __name__ == "__main__":  # vLLM spawns its engine process, which imports this file
    main()
