"""Part (e): the golden tiny models against transformers in float32, and against plain NumPy.

Log-probabilities at all 96 positions, the tokens cut into steps in several ways; then greedy tokens
of the whole engine in float32, with graphs and without, alone and in a batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from check_report import Report, Row
from check_target import DTYPES, Target, make_batch
from numpy.typing import NDArray

from cuengine import LLM, SamplingParams
from cuengine.device.cpu import CpuDevice
from cuengine.device.cuda.device import CudaDevice
from cuengine.device.interface import StepLimits
from cuengine.model.config import ModelConfig, read_model_config
from cuengine.model.llama import Llama
from cuengine.model.loader import load_weights
from cuengine.model.rope import attention_scale, frequencies

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "golden" / "tiny"
NUM_TOKENS = 96
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}
"""Of log-probabilities that reach down to about -9; weights and activations of 8 bits of precision
come to errors of some tenths in the least likely tokens, and a bug to several units."""


def run(target: Target, report: Report) -> None:
    names = sorted(path.name for path in GOLDEN.iterdir())
    if target.dry:
        names = ["gqa_default"]
    dtypes = ("float32",) if target.dry else ("float32", "float16", "bfloat16")
    chunks = (NUM_TOKENS,) if target.dry else (NUM_TOKENS, 7, 1)
    for name in names:
        for dtype in dtypes:
            with report.trying(f"{name}, {dtype}"):
                _log_probabilities(target, report, name, dtype, chunks)
    for name in names:
        with report.trying(f"{name}, greedy"):
            _greedy(target, report, name)


def _log_probabilities(
    target: Target, report: Report, name: str, dtype: str, chunks: tuple[int, ...]
) -> None:
    folder = GOLDEN / name
    config = read_model_config(folder)
    limits = StepLimits(max_num_batched_tokens=128, max_num_seqs=4, max_model_len=128)
    device = target.device(dtype, limits, use_graphs=True)
    weights = load_weights(folder, config, device, max_model_len=NUM_TOKENS, progress=False)
    if config.dtype != "float32":
        # These references were made with rotary frequencies rounded to the checkpoint's dtype.
        weights = replace(weights, cos_sin=device.upload(_rounded_table(config)))
    llama = Llama(config, weights, device)
    device.prepare(llama.attention_shape)
    reference = np.load(folder / "reference.npz")
    expected = _log_softmax(reference["logits"].astype(np.float64))
    for chunk in chunks:
        actual = _run(llama, device, reference["input_ids"], chunk, limits.block_size)
        error = float(np.abs(actual - expected).max())
        top = np.sort(expected, axis=1)
        sure = top[:, -1] - top[:, -2] > 2 * TOLERANCE[dtype]
        tokens = bool((actual.argmax(1) == expected.argmax(1))[sure].all())
        way = "whole" if chunk == NUM_TOKENS else f"in steps of {chunk}"
        report.measure(
            f"{name}, {dtype}, {way}", error, "off", at_most=TOLERANCE[dtype],
            note="" if tokens else "other tokens where the reference is sure",
        )  # fmt: skip


def _run(
    llama: Llama, device: CudaDevice, token_ids: NDArray[np.int32], chunk: int, size: int
) -> NDArray[np.float64]:
    """Log-probabilities [96, vocab]; steps of one token are graphs."""
    blocks = np.array([[5, 0, 7, 2, 6, 3]], np.int32)
    cache = device.allocate_kv_cache(llama.config.num_layers, 8, size, llama.attention_shape)
    rows = []
    for start in range(0, NUM_TOKENS, chunk):
        end = min(start + chunk, NUM_TOKENS)
        batch = make_batch(
            blocks, [end - start], [end], size, token_ids=token_ids[start:end].astype(np.int32),
            logits_indices=np.arange(end - start, dtype=np.int32),
        )  # fmt: skip
        staged = device.stage(batch)

        def body(staged: object = staged) -> object:
            return llama.logits(llama.forward(staged, cache))

        rows.append(device.download(device.replay(staged, body)).astype(np.float64))
    return _log_softmax(np.concatenate(rows))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _rounded_table(config: ModelConfig) -> NDArray[np.float32]:
    rounded = frequencies(config).astype(np.float32).astype(DTYPES[config.dtype])
    angles = np.arange(NUM_TOKENS)[:, None] * rounded.astype(np.float64)
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1) * attention_scale(config.rope)
    return table.astype(np.float32)


def _greedy(target: Target, report: Report, name: str) -> None:
    ids = np.load(GOLDEN / name / "reference.npz")["input_ids"].tolist()
    prompts = [ids[:length] for length in ((3, 9) if target.dry else (1, 5, 16, 33, 64))]
    count = 3 if target.dry else 24
    expected = _whole_each_time(name, prompts, count)
    ways = {"graphs": False} if target.dry else {"graphs": False, "eager": True}
    for way, eager in ways.items():
        actual = _tokens(target, name, prompts, count, enforce_eager=eager)
        same = sum(a == b for a, b in zip(actual, expected, strict=True))
        fine = same == len(prompts)
        label = f"{name}, greedy, float32, {way}"
        report.add(Row(label, same, f"of {len(prompts)}", "all", fine))
    if not target.dry:
        alone = _tokens(target, name, prompts[-1:], count)
        report.add(Row(f"{name}, greedy, float32, alone", ok=alone == expected[-1:]))


def _whole_each_time(name: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens with no engine: NumPy, the whole sequence anew for each of them."""
    folder, size = GOLDEN / name, 16
    config, device = read_model_config(folder), CpuDevice(use_numba=False)
    weights = load_weights(folder, config, device, max_model_len=128, progress=False)
    llama = Llama(config, weights, device)
    cache = device.allocate_kv_cache(config.num_layers, 8, size, llama.attention_shape)
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            batch = make_batch(
                np.arange(8, dtype=np.int32)[None], [len(ids)], [len(ids)], size,
                token_ids=np.array(ids, np.int32),
            )  # fmt: skip
            logits = llama.logits(llama.forward(device.stage(batch), cache))
            ids.append(int(device.download(logits)[0].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


def _tokens(
    target: Target,
    name: str,
    prompts: list[list[int]],
    count: int,
    *,
    enforce_eager: bool = False,
) -> list[list[int]]:
    """Of the whole engine."""
    llm = LLM(
        str(GOLDEN / name),
        device=target.device_name,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=enforce_eager,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_blocks=64,
    )
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]
