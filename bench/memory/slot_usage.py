"""What the slots of a KV cache are used for, summed over the steps of a run.

A slot holds the keys and values of one token. Kwon et al., SOSP 2023, section 3.1 and figure 2, tell
four uses apart; here they are counted alike for contiguous memory and for blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SlotUsage:
    """Slots times steps.

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
    def external(self) -> int:
        return self.num_slots * self.steps - self.reserved

    @property
    def reserved(self) -> int:
        return self.tokens + self.reservation + self.internal

    @property
    def waste(self) -> float:
        """Share of the reserved slots that hold no token, averaged over time."""
        return 1 - self.tokens / self.reserved

    @property
    def mean_sequences(self) -> float:
        return self.sequences / self.steps

    def shares(self) -> dict[str, float]:
        """The four uses as shares of all slots; their sum is 1."""
        whole = self.num_slots * self.steps
        uses = ("tokens", "reservation", "internal", "external")
        return {use: getattr(self, use) / whole for use in uses}
