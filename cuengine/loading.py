"""From settings to a running engine: find the model, load it, size the KV cache, warm up.

One log line per phase. Everything that imports model code does so here, when an engine is made.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cuengine.beside import Beside
from cuengine.config import EngineConfig
from cuengine.counted import counted
from cuengine.draft_model import DraftModelProposer
from cuengine.engine import Engine, LoadedModel
from cuengine.errors import ConfigError, DeviceMemoryError, ModelError
from cuengine.ngram import NgramProposer
from cuengine.speculation import Proposer, Speculator
from cuengine.speculative_config import SpeculativeConfig
from cuengine.swap_space import SwapCosts, SwapSpace
from cuengine.text_side import find, hurry, load_text, phase

if TYPE_CHECKING:
    from cuengine.device.interface import StepLimits
    from cuengine.model.config import ModelConfig
    from cuengine.model.llama import Llama
    from cuengine.model.tokenizer import Tokenizer
    from cuengine.model_runner import ModelRunner
    from cuengine.text_side import Text

logger = logging.getLogger("cuengine")


def load_engine(config: EngineConfig) -> Engine:
    """Raises ModelError for a model that can't be used, ConfigError for settings that don't fit."""
    progress = sys.stderr.isatty()
    with hurry():
        with phase("model files"):
            folder, model_config = find(config.model, config.revision, progress=progress)
        with Beside(lambda: load_text(config, folder)) as text:
            return _load_engine(config, folder, model_config, text, progress=progress)


def _load_engine(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    text: Beside[Text],
    *,
    progress: bool,
) -> Engine:
    from cuengine.device.interface import StepLimits
    from cuengine.largest_step import run_largest_step
    from cuengine.model_runner import ModelRunner

    speculation = config.speculation()
    max_model_len = _max_model_len(config, model_config.context_length)
    limits = StepLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_draft_tokens=0 if speculation is None else speculation.num_speculative_tokens,
    )
    llamas = [_load_llama(config, folder, model_config, limits, progress=progress)]
    tokenizer, chat_template, defaults = text.result()
    if speculation is not None and speculation.model is not None:
        draft = _find_draft(speculation, model_config, tokenizer, max_model_len, progress=progress)
        llamas.append(_load_llama(config, *draft, limits, progress=progress))
    eos = set(defaults.eos_token_ids or model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    with phase("KV cache"):
        block_bytes = sum(_block_bytes(llama, config.block_size) for llama in llamas)
        budget = 0
        for llama in reversed(llamas):
            if llama.device.measures_memory and config.num_blocks is None:
                with _fitting(
                    config, "The largest step", "max_num_batched_tokens and max_num_seqs"
                ):
                    run_largest_step(llama, llama.config.num_layers, llama.attention_shape, limits)
            # What the last one says counts: by then all the others have what they need.
            budget = llama.device.kv_cache_budget(config.gpu_memory_utilization)
        num_blocks, max_model_len = size_kv_cache(config, block_bytes, max_model_len, budget)
        with _fitting(
            config, "The KV cache", "num_blocks, kv_cache_memory or gpu_memory_utilization"
        ):
            kv_caches = [
                llama.device.allocate_kv_cache(
                    llama.config.num_layers, num_blocks, config.block_size, llama.attention_shape
                )
                for llama in llamas
            ]
        host_caches, swap_space = _swap_space(config, llamas, block_bytes)
    runners = [ModelRunner(*parts) for parts in zip(llamas, kv_caches, host_caches, strict=True)]
    with phase("warm-up"):
        for runner in runners:
            runner.warm_up()
    model = LoadedModel(
        vocab_size=model_config.vocab_size,
        eos_token_ids=frozenset(eos),
        config=model_config,
        tokenizer=tokenizer,
        chat_template=chat_template,
        generation_defaults=defaults,
    )
    return Engine(
        config,
        model,
        runners[0],
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        swap_space=swap_space,
        speculator=None
        if speculation is None
        else _speculator(config, speculation, llamas, runners),
    )


def _find_draft(
    speculation: SpeculativeConfig,
    target: ModelConfig,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    *,
    progress: bool,
) -> tuple[Path, ModelConfig]:
    """`find` for the draft model. Raises ConfigError where it cannot draft for this one."""
    from cuengine.model.tokenizer import Tokenizer

    assert speculation.model is not None
    with phase("draft model files"):
        try:
            folder, draft = find(speculation.model, speculation.revision, progress=progress)
        except ModelError as error:
            raise ModelError(f"speculative_config: the draft model {error}") from error
    name = f"speculative_config: the draft model {speculation.model}"
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{name} has {draft.vocab_size} tokens, the model has {target.vocab_size}: a draft "
            "model needs the same vocabulary"
        )
    if tokenizer is not None and not Tokenizer.from_folder(folder).same_vocabulary(tokenizer):
        raise ConfigError(
            f"{name} gives its token ids other texts than the model: a draft model needs the same "
            "vocabulary"
        )
    if draft.context_length < max_model_len:
        raise ConfigError(
            f"{name} has {draft.context_length} positions, less than "
            f"max_model_len={max_model_len}: lower that, or take another draft model"
        )
    return folder, draft


def _load_llama(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    limits: StepLimits,
    *,
    progress: bool,
) -> Llama:
    """A model on a device of its own, ready to run."""
    from cuengine.device.select import select_device
    from cuengine.model.llama import Llama
    from cuengine.model.loader import load_weights

    device = select_device(
        config.device,
        config.dtype,
        checkpoint_dtype=None if model_config.dequantized else model_config.dtype,
        limits=limits,
        use_graphs=not config.enforce_eager,
    )
    with phase("weights"):
        weights = load_weights(
            folder, model_config, device, max_model_len=limits.max_model_len, progress=progress
        )
        llama = Llama(model_config, weights, device)
    with phase("kernels"):
        device.prepare(llama.attention_shape, progress=progress)
    return llama


def _block_bytes(llama: Llama, block_size: int) -> int:
    """Of one KV block, in all layers."""
    shape = llama.attention_shape
    numbers = 2 * llama.config.num_layers * shape.num_kv_heads * shape.head_dim * block_size
    return numbers * np.dtype(llama.device.dtype).itemsize


def _speculator(
    config: EngineConfig,
    speculation: SpeculativeConfig | None,
    llamas: list[Llama],
    runners: list[ModelRunner],
) -> Speculator | None:
    """The draft model, if there is one, is behind the model, and its runner likewise."""
    if speculation is None:
        return None
    proposer: Proposer
    if speculation.method == "draft_model":
        proposer = DraftModelProposer(
            runners[1],
            block_size=config.block_size,
            max_tokens=config.max_num_batched_tokens,
            cost=all_weights(llamas[1].config) / all_weights(llamas[0].config),
        )
    else:
        proposer = NgramProposer(speculation)
    speculator = Speculator(
        proposer,
        speculation.num_speculative_tokens,
        weight_tokens=llamas[0].device.weight_tokens,
    )
    if not speculator.can_pay:
        logger.warning(
            "speculative decoding stays off but for trials: a token of the draft model costs %.2f "
            "of one of the model that is served, so that no guess can pay. Take a smaller one",
            proposer.cost,
        )
    return speculator


def _swap_space(
    config: EngineConfig, llamas: list[Llama], block_bytes: int
) -> tuple[list[Any], SwapSpace | None]:
    """The models' host caches and who keeps account of them; None where there is to be none."""
    num_blocks = int(config.swap_space * 2**30) // block_bytes
    if num_blocks == 0:
        return [None] * len(llamas), None
    try:
        host_caches = [
            llama.device.allocate_host_cache(
                llama.config.num_layers, num_blocks, config.block_size, llama.attention_shape
            )
            for llama in llamas
        ]
    except (DeviceMemoryError, MemoryError) as error:
        raise ConfigError(
            f"swap_space={config.swap_space:g} GiB does not fit into host memory: {error}. Lower it"
        ) from error
    costs = SwapCosts.of(
        block_bytes=block_bytes,
        weights=sum(layer_weights(llama.config) for llama in llamas),
        swap_rate=llamas[0].device.swap_rate,
        compute_rate=llamas[0].device.compute_rate,
    )
    return host_caches, SwapSpace(num_blocks, config.block_size, costs)


def layer_weights(config: ModelConfig) -> int:
    """Numbers that a token in the middle of a prompt is multiplied with: all layers' matrices."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    attention = heads * config.head_dim * config.hidden_size
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def all_weights(config: ModelConfig) -> int:
    """Numbers that a token is multiplied with if its successor is drawn: the logits' count, too."""
    return layer_weights(config) + config.vocab_size * config.hidden_size


def size_kv_cache(
    config: EngineConfig, block_bytes: int, max_model_len: int, budget: int
) -> tuple[int, int]:
    """Blocks of the KV cache, and max_model_len, lowered to what they hold if nobody asked for it.

    Never more blocks than max_num_seqs sequences of full length could use.
    Raises ConfigError where the cache cannot hold the max_model_len that was asked for.
    """
    size = config.block_size
    blocks_per_sequence = -(-max_model_len // size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        memory = budget if config.kv_cache_memory is None else config.kv_cache_memory
        num_blocks = min(memory // block_bytes, config.max_num_seqs * blocks_per_sequence)
    fits, needed = num_blocks * size, blocks_per_sequence * block_bytes
    if num_blocks < 1 or (num_blocks < blocks_per_sequence and config.max_model_len is not None):
        raise ConfigError(
            f"max_model_len={max_model_len} needs {counted(blocks_per_sequence, 'KV block')} of "
            f"{size} tokens ({needed / 2**20:.0f} MiB); the cache has {num_blocks}. "
            f"{f'Ask for at most {fits}, or give' if fits else 'Give'} kv_cache_memory={needed} "
            f"or on a GPU a gpu_memory_utilization above {config.gpu_memory_utilization}."
        )
    if num_blocks < blocks_per_sequence:
        logger.warning(
            "The context is lowered from %d to %d tokens, which is what the KV cache holds; one of "
            "%.0f MiB would hold all",
            max_model_len,
            fits,
            math.ceil(blocks_per_sequence * block_bytes / 2**20),
        )
        max_model_len = fits
    logger.info(
        "KV cache: %s of %d tokens, %.0f MiB",
        counted(num_blocks, "block"),
        size,
        num_blocks * block_bytes / 2**20,
    )
    return num_blocks, max_model_len


def _max_model_len(config: EngineConfig, limit: int) -> int:
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than this model's {limit} positions"
        )
    return config.max_model_len


@contextmanager
def _fitting(config: EngineConfig, what: str, settings: str) -> Iterator[None]:
    """Says which settings to lower where device memory runs out."""
    try:
        yield
    except DeviceMemoryError as error:
        raise ConfigError(
            f"{what} does not fit into device memory beside the weights: {error}. Lower "
            f"{settings} (now max_num_batched_tokens={config.max_num_batched_tokens}, "
            f"max_num_seqs={config.max_num_seqs}, "
            f"gpu_memory_utilization={config.gpu_memory_utilization})"
        ) from error
