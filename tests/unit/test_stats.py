"""An engine's figures when another one comes after it."""

from __future__ import annotations

from dataclasses import fields

from cuengine.stats import TOTALS, EngineStats

OF_THIS_MOMENT = {
    "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_used_blocks",
    "num_cached_blocks",
}  # fmt: skip


def test_every_figure_is_of_this_moment_or_a_total_or_worked_out():
    worked_out = {"mean_batch", "num_accepted_tokens_per_pos"}
    assert {field.name for field in fields(EngineStats)} == {*OF_THIS_MOMENT, *TOTALS, *worked_out}


def test_totals_go_on_where_the_engine_before_left_off():
    before = EngineStats(
        num_running=3, num_waiting=1, num_blocks=10, num_free_blocks=4, num_used_blocks=6,
        num_cached_blocks=5, num_steps=3, generation_tokens=7, mean_batch=2.0,
        num_accepted_tokens_per_pos=(4, 2),
    ).after_the_end()  # fmt: skip
    assert (before.num_running, before.num_waiting, before.num_used_blocks) == (0, 0, 0)
    assert (before.num_free_blocks, before.num_cached_blocks) == (10, 0)
    now = EngineStats(
        num_running=2, num_blocks=10, num_free_blocks=9, num_steps=1, generation_tokens=2,
        mean_batch=4.0, num_accepted_tokens_per_pos=(1, 1, 1),
    ).following(before)  # fmt: skip
    assert (now.num_running, now.num_free_blocks) == (2, 9)
    assert (now.num_steps, now.generation_tokens) == (4, 9)
    assert now.mean_batch == (3 * 2.0 + 4.0) / 4
    assert now.num_accepted_tokens_per_pos == (5, 3, 1)
