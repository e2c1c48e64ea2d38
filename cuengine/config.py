"""Settings of an engine, as `LLM(...)` and the command line give them. Names follow vLLM's flags.

What a model is (sizes, rope) is in model/config.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuengine.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
BLOCK_SIZES = (8, 16, 32)


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """model                    folder, .gguf file, hub name or built-in name
    device                   "auto" or "cpu"
    dtype                    "auto": the device's choice (float32 on cpu)
    block_size               tokens per KV block
    max_model_len            prompt and output together; None: the model's own limit
    max_num_seqs             sequences in one step
    max_num_batched_tokens   tokens in one step; longer prompts are prefilled in chunks
    kv_cache_memory          bytes for the KV cache on `cpu`; None: a share of free memory
    num_blocks               KV blocks, overriding kv_cache_memory; None: by memory
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
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    skip_tokenizer_init: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu"):
            raise ConfigError(f"device={self.device!r} is not one of: auto, cpu")
        if self.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={self.dtype!r} is not one of: auto, float32")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size={self.block_size!r} is not one of: 8, 16, 32")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory",
            "num_blocks",
        ):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ConfigError(f"{name}={value!r} is not a whole number of at least 1")
