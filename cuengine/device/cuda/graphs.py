"""CUDA graphs of decode steps: one for each number of sequences and longest context, rounded up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cuengine.device.cuda.runtime import DeviceArray, Graph, Runtime

_LEAST_CONTEXT = 256
"""Tokens; contexts are rounded up to this times a power of two."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was captured for.

    num_seqs  sequences with one token each, the surplus ones writing to the scratch block
    context   longest context in tokens, by which the context is split over blocks of threads, and
              which gives the width of the block table
    """

    num_seqs: int
    context: int


def graph_key(num_seqs: int, longest: int, *, max_num_seqs: int, max_model_len: int) -> GraphKey:
    """The smallest key that a step of num_seqs decodes fits in.

    Sizes are 1, 2, 4, then multiples of 8 and the largest there is: a few padded rows cost less
    than many graphs, each with memory of its own.
    """
    size = 1 << (num_seqs - 1).bit_length() if num_seqs <= 4 else -(-num_seqs // 8) * 8
    context = _LEAST_CONTEXT
    while context < longest:
        context *= 2
    return GraphKey(
        max(num_seqs, min(size, max_num_seqs)), max(longest, min(context, max_model_len))
    )


class Graphs:
    """Captured when a key comes up for the first time, replayed from then on."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._graphs: dict[GraphKey, tuple[Graph, DeviceArray]] = {}

    def run(self, key: GraphKey, body: Callable[[], DeviceArray]) -> DeviceArray:
        """What body returns: from its launches now, or those of the graph."""
        found = self._graphs.get(key)
        if found is not None:
            found[0].launch()
            return found[1]
        # Eagerly first: it allocates buffers and has cuBLAS load its kernels, which a capture may
        # not.
        body()
        self._runtime.begin_capture()
        try:
            result = body()
        except BaseException:
            self._abandon()
            raise
        self._graphs[key] = self._runtime.end_capture(), result
        return result

    def _abandon(self) -> None:
        """Leave the capture; the error that is on its way says more than what this may raise."""
        try:
            self._runtime.end_capture()
        except Exception:
            return

    def clear(self) -> None:
        self._graphs.clear()
