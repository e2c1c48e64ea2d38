"""What an engine can never serve, said before anything is queued.

What the sampling parameters alone can tell is checked in sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cuengine.counted import counted
from cuengine.errors import RequestError
from cuengine.sampling_params import BeamSearchParams, RequestParams


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len  tokens of prompt and output together
    max_num_seqs   samples that run at once
    vocab_size     token ids are less than this
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int

    def check(self, prompt_token_ids: list[int], params: RequestParams) -> int:
        """max_tokens as it will be; raises RequestError for what can never be served."""
        if isinstance(params, BeamSearchParams):
            self._check_width("beam_width", params.beam_width)
            params = params.sampling_params()
        room = self.max_model_len - len(prompt_token_ids)
        # Word for word what clients of OpenAI look for.
        context = f"this model's maximum context length is {self.max_model_len} tokens"
        prompt = counted(len(prompt_token_ids), "token")
        if not prompt_token_ids:
            raise RequestError("The prompt is empty: give it at least one token", param="prompt")
        if room < 1:
            raise RequestError(
                f"The prompt does not fit: it has {prompt}, and {context}. "
                f"Shorten it to at most {self.max_model_len - 1}.",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"max_tokens={params.max_tokens} does not fit: the prompt has {prompt}, and "
                f"{context}. Ask for at most {room}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} does not fit: the prompt leaves room for "
                f"{counted(room, 'token')}, and {context}.",
                param="min_tokens",
                code="context_length_exceeded",
            )
        self._check_width("n" if params.best_of is None else "best_of", params.num_samples)
        self._check_ids("prompt", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        return room if params.max_tokens is None else params.max_tokens

    def _check_width(self, name: str, width: int) -> None:
        if width > self.max_num_seqs:
            raise RequestError(
                f"{name}={width} is more than this engine runs at once: "
                f"ask for at most {self.max_num_seqs} (max_num_seqs)",
                param=name,
            )

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"{name}: token id {wrong} is not in this model's vocabulary, "
                f"0 to {self.vocab_size - 1}",
                param=name,
            )
