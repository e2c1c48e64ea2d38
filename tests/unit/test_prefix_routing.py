"""Which replica gets a prompt: the one that knows most of it, unless it is too busy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.ray_backend.prefix_routing import PrefixRouting, block_hashes

PROMPT = list(range(500))
OTHER = list(range(1000, 1500))
HASHES, OTHERS = block_hashes(PROMPT, 16, None), block_hashes(OTHER, 16, None)


def idle(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def test_a_hash_stands_for_a_full_block_and_all_before_it():
    assert len(HASHES) == 31  # of 500 tokens, in blocks of 16
    assert block_hashes([*PROMPT[:496], 7, 7, 7], 16, None) == HASHES
    changed = block_hashes([9, *PROMPT[1:]], 16, None)
    assert not set(changed) & set(HASHES)
    assert block_hashes(PROMPT[:15], 16, None) == []


def test_prompts_with_different_salts_have_nothing_in_common():
    assert not set(block_hashes(PROMPT, 16, "a")) & set(HASHES)


def test_an_idle_fleet_sends_a_shared_prefix_to_one_replica_and_others_elsewhere():
    routing = PrefixRouting(margin=8)
    first = routing.rank(HASHES, idle("a", "b"))[0]
    routing.sent(first, HASHES)
    for ending in range(20):
        hashes = block_hashes([*PROMPT, *range(ending, ending + 40)], 16, None)
        assert routing.rank(hashes, idle("a", "b"))[0] == first
        routing.sent(first, hashes)
    assert routing.rank(OTHERS, idle("a", "b"))[0] != first


@pytest.mark.parametrize(("load", "chosen"), [(0, "a"), (8, "a"), (9, "b")])
def test_the_one_that_knows_the_whole_prompt_may_be_busier_by_the_margin(load: int, chosen: str):
    routing = PrefixRouting(margin=8)
    routing.sent("a", HASHES)
    assert routing.rank(HASHES, {"a": 5 + load, "b": 5})[0] == chosen


def test_of_a_prompt_that_is_known_in_part_only_that_part_of_the_margin_counts():
    routing = PrefixRouting(margin=8)
    routing.sent("a", HASHES[:2])  # of 31 blocks
    assert routing.rank(HASHES, {"a": 0, "b": 0})[0] == "a"
    assert routing.rank(HASHES, {"a": 1, "b": 0})[0] == "b"


def test_a_replica_to_avoid_comes_last_whatever_it_knows():
    routing = PrefixRouting(margin=8)
    routing.sent("a", HASHES)
    assert routing.rank(HASHES, {"a": 0, "b": 50}, avoid=["a"]) == ["b", "a"]


def test_where_nothing_is_known_it_is_the_turn_of_the_one_that_waited_longest():
    routing = PrefixRouting(margin=8)
    turns = []
    for i in range(9):
        hashes = block_hashes([i] * 64, 16, None)
        turns.append(routing.rank(hashes, idle("a", "b", "c"))[0])
        routing.sent(turns[-1], hashes)
    assert turns == ["a", "b", "c"] * 3


def test_what_was_used_longest_ago_is_forgotten_first_and_of_a_prompt_its_end():
    routing = PrefixRouting(margin=8, capacity=40)
    routing.sent("a", HASHES)
    routing.sent("a", OTHERS[:20])
    assert routing.num_blocks("a") == 40
    assert routing.matched("a", OTHERS) == 20
    assert routing.matched("a", HASHES) == 20
    routing.sent("a", HASHES[:10])  # used again
    routing.sent("a", block_hashes([3] * 320, 16, None))
    assert routing.matched("a", HASHES) == 10
    assert routing.matched("a", OTHERS) == 10


def test_a_prompt_longer_than_all_that_is_remembered_is_remembered_from_its_beginning():
    routing = PrefixRouting(margin=8, capacity=5)
    routing.sent("a", HASHES)
    assert (routing.num_blocks("a"), routing.matched("a", HASHES)) == (5, 5)


def test_a_replica_that_is_gone_is_forgotten():
    routing = PrefixRouting(margin=8)
    routing.sent("a", HASHES)
    routing.keep(["b"])
    assert routing.num_blocks("a") == routing.matched("a", HASHES) == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0, 2, 8]), st.integers(1, 60))
def test_load_stays_within_the_margin_and_memory_within_its_bound(
    seed: int, num_replicas: int, margin: int, capacity: int
):
    rng = random.Random(seed)
    routing = PrefixRouting(margin, capacity)
    loads = idle(*"abcd"[:num_replicas])
    for _ in range(200):
        stem = rng.choice("xyz")
        tokens = [ord(stem)] * rng.randint(0, 80) + [rng.randint(0, 3) for _ in range(20)]
        hashes = block_hashes(tokens, 8, None)
        ranking = routing.rank(hashes, loads)
        assert sorted(ranking) == sorted(loads)
        chosen = ranking[0]
        assert loads[chosen] - min(loads.values()) <= margin
        routing.sent(chosen, hashes)
        assert routing.matched(chosen, hashes) == min(len(hashes), capacity)
        assert all(routing.num_blocks(name) <= capacity for name in loads)
        loads[chosen] += 1
        for name in loads:
            loads[name] -= rng.randint(0, min(1, loads[name]))
