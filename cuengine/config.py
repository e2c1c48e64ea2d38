"""Settings of an engine, as `LLM(...)` and the command line give them. Names follow vLLM's flags.

What a model is (sizes, rope) is in model/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuengine.errors import ConfigError
from cuengine.speculative_config import SpeculativeConfig, read_speculative_config

DEFAULT_MODEL = "smollm2-135m"
BLOCK_SIZES = (8, 16, 32)
DEVICES = ("auto", "cuda", "cpu", "emulated")
DTYPES = ("auto", "float32", "float16", "bfloat16")
STEP_TIMEOUT = 300.0
"""Seconds after which AsyncEngine takes a step for hung. (512 tokens of a model of 8 B parameters
take a minute or two on few cores.)"""


_MAX_COUNT = 2**31 - 1


def check_step_timeout(seconds: float) -> None:
    """Raises ConfigError."""
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"step_timeout={seconds!r} is not a number of seconds, 0 (never) or more")


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """model                    folder, .gguf file, hub name or built-in name
    device                   "auto": cuda where a GPU can be used, else cpu; "emulated": the CUDA
                             kernels on the host, for tests and work on them
    dtype                    "auto": the checkpoint's (of quantized weights bfloat16, or float16
                             where the GPU has none); float32 on cpu
    block_size               tokens per KV block
    max_model_len            prompt and output together; None: the model's own limit
    max_num_seqs             sequences in one step
    max_num_batched_tokens   tokens in one step; longer prompts are prefilled in chunks
    kv_cache_memory          bytes for the KV cache; None: on cpu a share of free memory, on cuda
                             what gpu_memory_utilization leaves
    gpu_memory_utilization   part of the GPU's memory to use in all, others' use included
    enforce_eager            launch every kernel of a decode step instead of replaying a CUDA graph
    swap_space               GiB of host memory for the blocks of preempted sequences, which they
                             would have to compute again otherwise; 0: none
    num_blocks               KV blocks, overriding kv_cache_memory; None: by memory
    speculative_config       a mapping, or JSON, of what SpeculativeConfig has; None: no speculation
    seed                     draws the seeds of requests that have none
    skip_tokenizer_init      token ids in, token ids out

    Raises ConfigError for a value that cannot be used.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    swap_space: float = 0.0
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    speculative_config: Mapping[str, Any] | str | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"device={self.device!r} is not one of: {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not one of: {', '.join(DTYPES)}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization={share!r} is not above 0 and at most 1")
        space = self.swap_space
        if (
            isinstance(space, bool)
            or not isinstance(space, int | float)
            or not 0 <= space <= 2**20 - 1
        ):
            raise ConfigError(f"swap_space={space!r} is not a number of GiB from 0 to {2**20 - 1}")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size={self.block_size!r} is not one of: 8, 16, 32")
        for name, low, high in (
            ("max_model_len", 1, _MAX_COUNT),
            ("max_num_seqs", 1, _MAX_COUNT),
            ("max_num_batched_tokens", 1, _MAX_COUNT),
            ("kv_cache_memory", 1, 2**63 - 1),
            ("num_blocks", 1, _MAX_COUNT),
            ("seed", -(2**63), 2**64 - 1),
        ):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high
            ):
                raise ConfigError(f"{name}={value!r} is not a whole number from {low} to {high}")
        self.speculation()

    def speculation(self) -> SpeculativeConfig | None:
        """speculative_config, read."""
        given = self.speculative_config
        return None if given is None else read_speculative_config(given)
