"""Block tables: slots, forks and copies on write. Random use is in test_block_pool.py."""

from __future__ import annotations

from cuengine.block_pool import BlockPool
from cuengine.block_table import BlockTable

BLOCK_SIZE = 4


def table_of(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    assert table.grow(num_tokens) is None
    return table


def test_a_block_is_claimed_only_when_the_last_one_is_full():
    pool = BlockPool(4, BLOCK_SIZE)
    table = table_of(pool, 4)
    assert len(table.blocks) == 1
    assert table.blocks_needed(5) == 1
    table.grow(5)
    assert len(table.blocks) == 2
    assert [table.blocks_needed(n) for n in (5, 6, 8, 9, 13)] == [0, 0, 0, 1, 2]


def test_forked_sequences_copy_the_last_block_only_when_one_of_them_writes():
    pool = BlockPool(8, BLOCK_SIZE)
    first = table_of(pool, 6)
    second = first.fork()
    assert first.blocks == second.blocks
    assert pool.num_free == 6

    shared = first.blocks[1]
    assert first.blocks_needed(7) == 1
    assert first.grow(7) == (shared, first.blocks[1])
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1] == shared

    assert second.blocks_needed(7) == 0
    assert second.grow(7) is None
    assert second.blocks[1] == shared


def test_forked_sequences_with_a_full_last_block_copy_nothing():
    pool = BlockPool(8, BLOCK_SIZE)
    first = table_of(pool, 8)
    second = first.fork()
    assert first.grow(9) is None
    assert second.grow(9) is None
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]


def test_three_forks_make_two_copies():
    pool = BlockPool(8, BLOCK_SIZE)
    first = table_of(pool, 2)
    tables = [first, first.fork(), first.fork()]
    copies = [table.grow(3) for table in tables]
    assert [copy is None for copy in copies] == [False, False, True]
    assert len({table.blocks[0] for table in tables}) == 3


def test_freeing_one_of_two_forks_leaves_the_other_its_blocks():
    pool = BlockPool(4, BLOCK_SIZE)
    first = table_of(pool, 6)
    second = first.fork()
    first.free()
    assert pool.num_free == 2
    assert [pool.ref_count(block) for block in second.blocks] == [1, 1]
    second.free()
    assert pool.num_free == 4


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning():
    pool = BlockPool(2, BLOCK_SIZE)
    table = table_of(pool, 8)
    first, last = table.blocks
    for block in table.blocks:
        pool.register(block, bytes([block]))
    table.free()
    assert [pool.allocate(), pool.allocate()] == [last, first]


def test_adopted_blocks_are_shared_and_count_as_full():
    pool = BlockPool(4, BLOCK_SIZE)
    first = table_of(pool, 8)
    second = BlockTable(pool)
    second.adopt(first.blocks[:1])
    assert second.num_tokens == 4
    assert second.grow(6) is None
    assert second.blocks[0] == first.blocks[0]
    assert pool.ref_count(first.blocks[0]) == 2


def test_slots_given_back_can_be_claimed_again_and_their_blocks_by_others():
    pool = BlockPool(4, BLOCK_SIZE)
    table = table_of(pool, 6)
    table.grow(13)
    kept = list(table.blocks[:2])
    table.shrink(7)
    assert (list(table.blocks), table.num_tokens, pool.num_free) == (kept, 7, 2)
    assert [table.blocks_needed(n) for n in (7, 8, 9)] == [0, 0, 1]
    table.shrink(9)
    assert table.num_tokens == 7
    table.shrink(4)
    assert (list(table.blocks), pool.num_free) == (kept[:1], 3)


def test_a_fork_keeps_the_blocks_that_the_other_gives_back():
    pool = BlockPool(4, BLOCK_SIZE)
    first = table_of(pool, 8)
    second = first.fork()
    first.shrink(3)
    assert len(second.blocks) == 2
    assert [pool.ref_count(block) for block in second.blocks] == [2, 1]
