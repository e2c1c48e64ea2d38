"""How big the KV cache gets, and what is refused at start-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from cuengine import ConfigError, EngineConfig, load_engine
from cuengine.errors import ModelError
from cuengine.loading import size_kv_cache

BLOCK_BYTES = 2**20
GIB = 2**30


def size(budget: int = 100 * GIB, max_model_len: int = 1600, **fields: int) -> tuple[int, int]:
    return size_kv_cache(EngineConfig(**fields), BLOCK_BYTES, max_model_len, budget)  # type: ignore[arg-type]


def test_num_blocks_goes_before_memory():
    assert size(num_blocks=123, kv_cache_memory=GIB) == (123, 1600)


def test_kv_cache_memory_is_filled_with_blocks():
    assert size(kv_cache_memory=GIB) == (1024, 1600)


def test_no_more_blocks_than_all_sequences_at_full_length_could_use():
    assert size(kv_cache_memory=100 * GIB, max_num_seqs=3) == (300, 1600)


def test_where_nobody_says_the_devices_budget_is_filled_with_blocks():
    assert size(budget=2 * GIB) == (2048, 1600)


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_what_would():
    message = (
        "max_model_len=1600 needs 100 KV blocks of 16 tokens (100 MiB); the cache has 50. "
        f"Ask for at most 800, or give kv_cache_memory={100 * BLOCK_BYTES} or on a GPU a "
        "gpu_memory_utilization above 0.9."
    )
    with pytest.raises(ConfigError) as caught:
        size_kv_cache(EngineConfig(num_blocks=50, max_model_len=1600), BLOCK_BYTES, 1600, GIB)
    assert str(caught.value) == message


def test_the_models_own_context_is_lowered_to_what_fits_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING, "cuengine"):
        assert size_kv_cache(EngineConfig(num_blocks=50), BLOCK_BYTES, 1600, GIB) == (50, 800)
    assert "The context is lowered from 1600 to 800 tokens" in caplog.text


def test_a_machine_with_no_room_for_a_block_is_refused():
    with pytest.raises(ConfigError, match=r"the cache has 0\. Give kv_cache_memory="):
        size(budget=100)


def test_a_context_beyond_the_models_positions_is_refused(tiny_model: Callable[[str], Path]):
    config = EngineConfig(
        model=str(tiny_model("gqa_default")), skip_tokenizer_init=True, max_model_len=513
    )
    with pytest.raises(ConfigError, match="max_model_len=513 is more than this model's 512"):
        load_engine(config)


def test_a_draft_model_that_is_not_there_is_named_as_one(tiny_model: Callable[[str], Path]):
    config = EngineConfig(
        model=str(tiny_model("gqa_default")),
        skip_tokenizer_init=True,
        speculative_config={"model": "./nowhere", "num_speculative_tokens": 2},
    )
    with pytest.raises(
        ModelError, match=r"speculative_config: the draft model \./nowhere: no such"
    ):
        load_engine(config)


def test_start_up_logs_each_phase_once(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    config = EngineConfig(model=str(tiny_model("gqa_default")), skip_tokenizer_init=True)
    with caplog.at_level(logging.INFO, "cuengine"):
        engine = load_engine(config)
    for phase in ("model files", "weights", "tokenizer", "warm-up"):
        assert sum(message.startswith(f"{phase}: ") for message in caplog.messages) == 1
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.model.eos_token_ids == {2}
