"""What the server needs of an engine: AsyncEngine has it, and so has whatever stands in for it.

Nothing here reaches past the async engine to the scheduler, a device or a model's files.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from cuengine.api.settings import ToolCallFormat
from cuengine.config import EngineConfig
from cuengine.engine_view import EngineView
from cuengine.outputs import RequestDelta
from cuengine.sampling_params import RequestParams


class ServingTokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def half_character(self, ids: Sequence[int]) -> tuple[bytes, str]:
        """Bytes of the character within which `ids` end, and what `decode` has for them."""
        ...


class ServingTemplate(Protocol):
    @property
    def takes_tools(self) -> bool: ...
    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """How a model with this template writes its calls; None where that is not known."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str: ...


class ServingDefaults(Protocol):
    """What generation_config.json recommends; None where it says nothing."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


class ServingStats(Protocol):
    """Gauges of this moment and totals since the start; cuengine/stats.py says what each counts."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_used_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]: ...


class ServingEngine(Protocol):
    @property
    def failed(self) -> bool:
        """It cannot go on; whoever runs it has to start another."""
        ...

    @property
    def restarting(self) -> bool:
        """It died, and comes back; meanwhile requests wait."""
        ...

    @property
    def num_restarts(self) -> int:
        """Times that it died."""
        ...

    @property
    def config(self) -> EngineConfig: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tokenizer(self) -> ServingTokenizer | None: ...
    @property
    def chat_template(self) -> ServingTemplate | None: ...
    @property
    def generation_defaults(self) -> ServingDefaults: ...

    async def start(self) -> None: ...
    def generate(
        self,
        prompt_token_ids: list[int],
        params: RequestParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]: ...
    def stats(self) -> ServingStats:
        """Of all engines together."""
        ...

    def replicas(self) -> Mapping[str, ServingStats] | None:
        """Of each by its name, where there are several; None: one engine, without a name."""
        ...

    def replica_counts(self) -> tuple[int, int] | None:
        """How many take requests now, and are to; None: one engine, as above."""
        ...

    async def view(self, replica: str | None = None) -> EngineView: ...
    async def stop(self) -> None: ...
