"""A trace in contiguous KV memory: each sequence has one run of slots, reserved when it starts.

So do the systems that PagedAttention is compared with. As there (Kwon et al., SOSP 2023, section
6.1) the place of a reservation comes from a buddy allocator, the batch changes at every step (Yu et
al., "Orca", OSDI 2022), and the three systems differ in what they know of the output's length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memory_counts import SlotUsage


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class BuddyMemory:
    """Hands out runs of slots whose sizes are powers of two, each at a multiple of its size.

    A number of slots that is no power of two is divided into the powers that it is the sum of,
    largest first.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, count: int) -> int | None:
        """The first slot of a run of at least `count`, or None where there is none."""
        order = (count - 1).bit_length()
        for larger in range(order, len(self._free)):
            if self._free[larger]:
                start = min(self._free[larger])
                self._free[larger].remove(start)
                for half in reversed(range(order, larger)):
                    self._free[half].add(start + (1 << half))
                return start
        return None

    def free(self, start: int, count: int) -> None:
        """Give back what `allocate(count)` returned."""
        order = (count - 1).bit_length()
        while (buddy := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)


@dataclass(slots=True)
class _Running:
    start: int
    reserved: int
    cached: int
    final: int


Reserve = Callable[[int, int], int]
"""(prompt tokens, output tokens) -> slots to reserve."""


def policies(max_model_len: int) -> dict[str, Reserve]:
    """What the paper calls Orca (Max), (Pow2) and (Oracle).

    The last token of an output is never put into the cache: the oracle knows it.
    """
    return {
        "maximum length": lambda prompt, output: max_model_len,
        "next power of two": lambda prompt, output: prompt + next_power_of_two(output),
        "oracle": lambda prompt, output: prompt + output - 1,
    }


def replay(requests: Sequence[tuple[int, int]], reserve: Reserve, num_slots: int) -> SlotUsage:
    """Run all requests, first come, first served, and count while one waits for memory.

    A step runs the whole prompt of a sequence that starts, and one token of every other. What the
    allocator rounds a reservation up by is external: the sequence did not ask for it.
    Raises ValueError for a request that no memory is large enough for.
    """
    memory, usage = BuddyMemory(num_slots), SlotUsage(num_slots)
    waiting, running = deque(requests), list[_Running]()
    while waiting or running:
        while waiting:
            prompt, output = waiting[0]
            reserved = reserve(prompt, output)
            start = memory.allocate(reserved)
            if start is None:
                break
            waiting.popleft()
            running.append(_Running(start, reserved, prompt - 1, prompt + output - 1))
        if not running:
            raise ValueError(f"{reserved} slots do not fit into {num_slots}")
        for sequence in running:
            sequence.cached += 1
            if waiting:
                usage.add_sequence(
                    cached=sequence.cached, final=sequence.final, reserved=sequence.reserved
                )
            if sequence.cached == sequence.final:
                memory.free(sequence.start, sequence.reserved)
        if waiting:
            usage.end_step()
        running = [sequence for sequence in running if sequence.cached < sequence.final]
    return usage
