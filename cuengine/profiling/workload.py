"""What is to be profiled, as it is asked for, and what it needs of a model and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuengine.config import EngineConfig
from cuengine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workload:
    """batch sequences, with prompts of context tokens each; steps decode steps of all of them.

    step_tokens  tokens in one step, at most (max_num_batched_tokens)
    block_size   tokens per KV block
    """

    batch: int
    context: int
    steps: int
    step_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        """Raises ConfigError where a decode step leaves less than half of the tokens to prompts."""
        if 2 * self.batch > self.step_tokens:
            most = self.step_tokens // 2
            raise ConfigError(
                f"--batch {self.batch} needs --max-num-batched-tokens {2 * self.batch} or more, "
                f"and it is {self.step_tokens}: raise that"
                + (f", or ask for a batch of at most {most}" if most else "")
            )

    @property
    def _admission_steps(self) -> int:
        """Steps, at most, until all prompts run whose full blocks are cached."""
        left = self.batch * min(self.block_size, self.context)
        return -(-left // (self.step_tokens - self.batch)) + 1

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.context + self._admission_steps + self.steps + 1

    @property
    def num_blocks(self) -> int:
        """KV blocks: with one for each sequence that has to be free for the next to be admitted."""
        return self.batch * (-(-self.length // self.block_size) + 1)

    def settings(self, config: EngineConfig) -> EngineConfig:
        """Those of an engine for it: a KV cache of as many blocks, if memory allows."""
        each = -(-self.length // self.block_size)
        return replace(
            config,
            max_model_len=self.length,
            max_num_seqs=-(-self.num_blocks // each),
            skip_tokenizer_init=True,
        )

    def check_model(self, context_length: int) -> None:
        """Raises ConfigError for what is longer than the model's context."""
        surplus = self.length - context_length
        if surplus > 0:
            most = {"--context": self.context - surplus, "--steps": self.steps - surplus}
            advice = " or ".join(f"{flag} {value}" for flag, value in most.items() if value > 0)
            raise ConfigError(
                f"--context {self.context} with --steps {self.steps} makes sequences of "
                f"{self.length} tokens, and this model's context is {context_length}: ask for "
                f"{advice + ' at most' if advice else 'less of both'}"
            )

    def check_cache(self, num_blocks: int, block_bytes: int) -> None:
        """Raises ConfigError where the KV cache, of blocks of so many bytes, is too small."""
        if self.num_blocks > num_blocks:
            most = num_blocks // (self.num_blocks // self.batch)
            smaller = f"a batch of at most {most}, for " if most else ""
            raise ConfigError(
                f"--batch {self.batch} with --context {self.context} and --steps {self.steps} "
                f"needs {self.num_blocks} KV blocks of {self.block_size} tokens, and the cache has "
                f"{num_blocks}: ask for {smaller}less context, or "
                f"--kv-cache-memory {-(-self.num_blocks * block_bytes // 2**20)}MiB"
            )
