"""Record what a real model says may follow its beams, for bench/kv_memory.py.

    python bench/record_beams.py --out bench/data/smollm2_beams.json

Runs beam search on the trace's requests of up to 300 tokens, prompt and output each, from its
start. Prompts are texts that the model itself draws, as the trace has only lengths. Each step of
each search in which all beams report becomes one entry, in the order of the search. Also prints
how many blocks the search saved in the end, counted over all steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path

from throughput import BENCH, DEFAULT_TRACE, read_trace

from cuengine import BeamSearchParams, EngineConfig, SamplingParams, load_engine
from cuengine.batch import Batch, SamplerOutput, SamplingBatch
from cuengine.engine import Engine, Runner

sys.path.insert(0, str(BENCH / "memory"))

from memory_counts import BlockSharing

LONGEST = 300
CANDIDATES = 6
SCALE = -100
"""Log-probabilities are kept as whole numbers, in hundredths."""

Steps = dict[tuple[int, int], dict[int, list[float]]]
"""(seed, position): log-probabilities by beam."""


class Recorder:
    """A runner that keeps what another one reports of likely tokens, and counts blocks."""

    overlaps = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner: Runner = engine.runner
        self.sharing = BlockSharing()
        self.steps: Steps = defaultdict(dict)

    def range(self, name: str) -> AbstractContextManager[None]:
        return self._runner.range(name)

    def run(self, batch: Batch, sampling: SamplingBatch) -> SamplerOutput:
        output = self._runner.run(batch, sampling).fetch()
        keys = zip(sampling.seeds.tolist(), sampling.positions.tolist(), strict=True)
        beams, reports = sampling.sample_indices.tolist(), output.top_logprobs.tolist()
        for key, beam, report in zip(keys, beams, reports, strict=True):
            self.steps[key][beam] = report[:CANDIDATES]
        running = self._engine.scheduler.running
        self.sharing.add_step(
            logical=sum(sequence.width * len(sequence.table.blocks) for sequence in running),
            physical=self._engine.pool.num_blocks - self._engine.pool.num_free,
            sequences=self._engine.scheduler.num_running,
        )
        return output


def write_prompts(engine: Engine, lengths: list[int], start: int) -> list[list[int]]:
    """Texts of these lengths, drawn by the model after the token `start`."""
    prompts = {str(i): [start] for i in range(len(lengths))}
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length - 1, ignore_eos=True, seed=i)
        engine.add_request(str(i), [start], params)
    while engine.has_unfinished():
        for output in engine.step():
            prompts[output.request_id] += [token.token_id for token in output.tokens]
    return list(prompts.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--num", type=int, default=12, help="requests")
    parser.add_argument("--width", type=int, default=4, help="beams of each")
    parser.add_argument("--start", type=int, default=1, help="token id that prompts begin with")
    arguments = parser.parse_args()
    width = arguments.width
    trace = read_trace(arguments.trace, 2000, 2048)
    requests = [pair for pair in trace if max(pair) <= LONGEST][: arguments.num]
    config = EngineConfig(
        model=arguments.model,
        skip_tokenizer_init=True,
        max_model_len=2 * LONGEST,
        max_num_seqs=len(requests) * width,
        num_blocks=len(requests) * width * 2 * LONGEST // 16,
    )
    engine = load_engine(config)
    prompts = write_prompts(engine, [prompt for prompt, _ in requests], arguments.start)
    recorder = engine.runner = Recorder(engine)
    for i, (_, output) in enumerate(requests):
        # One candidate more than the search asks for changes nothing in it.
        params = BeamSearchParams(width, output, ignore_eos=True, logprobs=max(width, CANDIDATES))
        engine.add_request(str(i), prompts[i], params)
    while engine.has_unfinished():
        engine.step()
    searches = list(dict.fromkeys(seed for seed, _ in recorder.steps))
    recorded_steps = sorted(
        recorder.steps.items(), key=lambda it: (searches.index(it[0][0]), it[0])
    )
    steps = [
        [[round(SCALE * logprob) for logprob in beams[rank]] for rank in range(width)]
        for _, beams in recorded_steps
        if len(beams) == width
    ]
    source = f"{arguments.model}, {len(requests)} searches of width {width}, record_beams.py"
    recorded = {"source": source, "scale": SCALE, "steps": steps}
    arguments.out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    print(f"{len(steps)} steps; {100 * recorder.sharing.saved:.1f} % of blocks saved")


if __name__ == "__main__":
    main()
