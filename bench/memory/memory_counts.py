"""What KV memory is used for, and how much of it is shared, summed over the steps of a run.

Counted alike for contiguous memory and for blocks. How the memory is run is in contiguous.py,
paged.py and beams.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SlotUsage:
    """What slots (for one token's keys and values each) are used for, times steps.

    The four uses are those of Kwon et al., SOSP 2023, section 3.1 and figure 2.

    tokens       hold a token
    reservation  reserved for a token that their sequence is yet to come to
    internal     reserved, and never used: beyond their sequence's end
    external     nobody's
    sequences    sequences that ran, times steps
    """

    num_slots: int
    steps: int = 0
    tokens: int = 0
    reservation: int = 0
    internal: int = 0
    sequences: int = 0

    def add_sequence(self, *, cached: int, final: int, reserved: int) -> None:
        """Count one sequence in the present step.

        cached    tokens in its slots now
        final     tokens that will be in them before it ends
        reserved  slots that it holds
        """
        useful = min(final, reserved)
        self.tokens += cached
        self.reservation += useful - cached
        self.internal += reserved - useful
        self.sequences += 1

    def end_step(self) -> None:
        self.steps += 1

    @property
    def reserved(self) -> int:
        return self.tokens + self.reservation + self.internal

    @property
    def external(self) -> int:
        return self.num_slots * self.steps - self.reserved

    @property
    def used(self) -> float:
        """Share of the reserved slots that hold a token, averaged over time."""
        return self.tokens / self.reserved

    @property
    def mean_sequences(self) -> float:
        return self.sequences / self.steps

    def shares(self) -> dict[str, float]:
        """The four uses as shares of all slots; their sum is 1."""
        whole = self.num_slots * self.steps
        uses = ("tokens", "reservation", "internal", "external")
        return {use: getattr(self, use) / whole for use in uses}


@dataclass(slots=True)
class BlockSharing:
    """Blocks times steps.

    logical    blocks that the sequences would hold if each had its own
    physical   blocks that they do hold
    sequences  sequences that ran, times steps
    """

    steps: int = 0
    logical: int = 0
    physical: int = 0
    sequences: int = 0

    def add_step(self, *, logical: int, physical: int, sequences: int) -> None:
        self.steps += 1
        self.logical += logical
        self.physical += physical
        self.sequences += sequences

    @property
    def saved(self) -> float:
        """Blocks saved over blocks needed without sharing, averaged over time."""
        return 1 - self.physical / self.logical

    @property
    def mean_sequences(self) -> float:
        return self.sequences / self.steps
