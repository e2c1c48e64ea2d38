"""Sampling on the device: the launches for a SamplingBatch, and its results on their way back.

What a draw is, is told in device/sampler.py and cuda/sampling.cu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import PendingOutput, SamplerOutput, SamplingBatch
from cuengine.device.cuda.kernels import KernelSet
from cuengine.device.cuda.runtime import DeviceArray, Dim, Event, HostArray, Runtime
from cuengine.device.cuda.staging import Staging, aligned
from cuengine.device.sampler import check_finite, empty_output, least_scaled

_THREADS: Dim = (1024, 1, 1)
_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)

_PLAIN = (
    *("target_ids", "temperature", "top_k", "top_p", "min_p", "seeds"),
    *("sample_indices", "positions", "num_logprobs"),
)
"""Fields of SamplingBatch that every row has."""

_OPTIONAL = (
    *("allowed_mask", "bias_rows", "bias_ids", "bias_values", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "prompt_ids", "prompt_offsets"),
    *("output_ids", "output_offsets"),
)


class _Results:
    """Where one call's results arrive on the host, and how to know that they have."""

    def __init__(self, runtime: Runtime, words: int) -> None:
        self.words: HostArray = runtime.pinned((words,), _INT)
        self.arrived: Event = runtime.event()


class Sampler:
    """Samples rows of float32 logits [num_rows, vocab].

    tokens  int32 [max_rows] on the device: what the rows of the last step drew
    """

    def __init__(self, runtime: Runtime, kernels: KernelSet, *, max_rows: int) -> None:
        self._runtime = runtime
        self._kernels = kernels
        self._staging = Staging(runtime, 1 << 14)
        self._scores = _Grown(runtime, _FLOAT)
        self._counts = _Grown(runtime, _INT)
        self._report = _Grown(runtime, _INT)
        self._free: list[_Results] = []
        self.tokens: DeviceArray = runtime.empty((max_rows,), _INT)

    def sample(self, logits: DeviceArray, sampling: SamplingBatch, first_row: int) -> PendingOutput:
        """Queue all that it takes; the results are fetched later."""
        runtime = self._runtime
        num_rows, vocab = logits.shape
        if num_rows == 0:  # in the middle of prompts
            return empty_output(sampling)
        width = max(0, int(sampling.num_logprobs.max(initial=0)))
        reported = bool((sampling.num_logprobs >= 0).any())
        at = self._stage(sampling)
        grid = (num_rows, 1, 1)

        tokens = self.tokens[first_row : first_row + num_rows]
        # Maxima, then where asked for log-probabilities, ranks, and the most likely tokens.
        words = num_rows * (3 + 2 * width if reported else 1)
        report = self._report.get(words)
        runtime.discard(tokens)
        runtime.discard(report)
        token_ids, maxima = runtime.address(tokens), runtime.address(report)
        raw = runtime.address(logits)
        scores = raw
        if any(at[name] for name in ("allowed_mask", "bias_rows", "repetition_penalty")):
            scores = self._constrain(grid, raw, vocab, sampling, at)
        self._kernels.sample_tokens(
            grid,
            _THREADS,
            *(token_ids, maxima, scores, vocab),
            *(at["target_ids"], at["temperature"], at["top_k"], at["top_p"], at["min_p"]),
            *(at["seeds"], at["sample_indices"], at["positions"]),
        )
        if reported:
            logprobs = maxima + 4 * num_rows
            ranks = logprobs + 4 * num_rows
            top_ids = ranks + 4 * num_rows
            self._kernels.report_logprobs(
                grid,
                _THREADS,
                *(logprobs, ranks, top_ids, top_ids + 4 * num_rows * width, raw, vocab),
                *(token_ids, at["num_logprobs"], width),
            )
        results = self._take_results(num_rows + words)
        runtime.copy_out(results.words[:num_rows], tokens)
        runtime.copy_out(results.words[num_rows : num_rows + words], report)
        results.arrived.record()
        return Pending(self, results, empty_output(sampling), reported=reported)

    def _stage(self, sampling: SamplingBatch) -> dict[str, int]:
        """Addresses of the batch's arrays on the device; 0 for those that are None."""
        arrays: dict[str, NDArray[Any] | None] = {
            name: getattr(sampling, name) for name in (*_PLAIN, *_OPTIONAL)
        }
        arrays["min_p"] = least_scaled(sampling.min_p)
        staging = self._staging
        staging.start(sum(aligned(a.nbytes) for a in arrays.values() if a is not None))
        addresses = {name: staging.put_optional(array) for name, array in arrays.items()}
        staging.send()
        return addresses

    def _constrain(
        self, grid: Dim, raw: int, vocab: int, sampling: SamplingBatch, at: dict[str, int]
    ) -> int:
        """Address of the logits with allowed tokens, bias and penalties applied."""
        runtime = self._runtime
        size = grid[0] * vocab
        scores = self._scores.get(size)
        runtime.discard(scores)
        counts = 0
        if at["repetition_penalty"]:
            working = self._counts.get(size)
            runtime.discard(working)
            counts = runtime.address(working)
        biases = sampling.bias_rows
        self._kernels.apply_constraints(
            grid,
            _THREADS,
            *(runtime.address(scores), counts, raw, vocab, at["allowed_mask"]),
            *(at["bias_rows"], at["bias_ids"], at["bias_values"]),
            0 if biases is None else len(biases),
            *(at["repetition_penalty"], at["presence_penalty"], at["frequency_penalty"]),
            *(at["prompt_ids"], at["prompt_offsets"], at["output_ids"], at["output_offsets"]),
        )
        return runtime.address(scores)

    def _take_results(self, words: int) -> _Results:
        for index, results in enumerate(self._free):
            if len(results.words) >= words:
                return self._free.pop(index)
        return _Results(self._runtime, 1 << max(10, (words - 1).bit_length()))

    def give_back(self, results: _Results) -> None:
        self._free.append(results)


class Pending:
    """A PendingOutput: results that may still be on their way to the host."""

    def __init__(
        self, sampler: Sampler, results: _Results, output: SamplerOutput, *, reported: bool
    ) -> None:
        self._sampler = sampler
        self._results = results
        self._output = output
        self._reported = reported

    def fetch(self) -> SamplerOutput:
        """Raises ModelError for logits that are NaN or +inf."""
        output = self._output
        num_rows, width = output.top_ids.shape
        self._results.arrived.wait()
        words = self._results.words
        output.token_ids[:] = words[:num_rows]
        maxima = words[num_rows : 2 * num_rows].view(np.float32).copy()
        if self._reported:
            singles = words[2 * num_rows : 4 * num_rows].reshape(2, num_rows)
            output.logprobs[:] = singles[0].view(np.float32)
            output.ranks[:] = singles[1]
            top = words[4 * num_rows : (4 + 2 * width) * num_rows].reshape(2, num_rows, width)
            output.top_ids[:] = top[0]
            output.top_logprobs[:] = top[1].view(np.float32)
        self._sampler.give_back(self._results)
        check_finite(maxima)
        return output


class _Grown:
    """A device array that grows to what is asked for and never shrinks; no graph sees it."""

    def __init__(self, runtime: Runtime, dtype: np.dtype[Any]) -> None:
        self._runtime = runtime
        self._dtype = dtype
        self._array: DeviceArray = None
        self._size = 0

    def get(self, size: int) -> DeviceArray:
        """[size], content undefined."""
        if size > self._size:
            self._array = None
            self._size = 1 << (size - 1).bit_length()
            self._array = self._runtime.empty((self._size,), self._dtype)
        return self._array[:size]
