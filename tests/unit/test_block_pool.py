"""Block pool and block tables under random use, against a plain model of who owns what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from cuengine.block_pool import BlockPool, chain_hash, root_hash
from cuengine.block_table import BlockTable

BLOCK_SIZE = 4
NUM_BLOCKS = 12


class PagedMemory(RuleBasedStateMachine):
    """Sequences that write tokens to a memory through their tables.

    `memory` is what a KV cache would hold, `owners` who may be in a block: both kept by hand.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.memory: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.owners: list[set[int]] = [set() for _ in range(NUM_BLOCKS)]
        self.tables: dict[int, BlockTable] = {}
        self.tokens: dict[int, list[int]] = {}
        self.next_name = 0

    def new_name(self) -> int:
        self.next_name += 1
        return self.next_name

    def hashes(self, tokens: list[int]) -> list[bytes]:
        digests = [root_hash(None)]
        for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            digests.append(chain_hash(digests[-1], bytes(tokens[start : start + BLOCK_SIZE])))
        return digests[1:]

    def write(self, name: int, new: list[int]) -> None:
        """Append tokens if there is room for them, as the scheduler would."""
        if self.place(name, new):
            tokens = self.tokens[name]
            tokens.extend(new)
            for block, digest in zip(self.tables[name].blocks, self.hashes(tokens), strict=False):
                self.pool.register(block, digest)

    def place(self, name: int, new: list[int]) -> bool:
        """Write tokens behind a sequence's own; false: there is no room for them."""
        table, tokens = self.tables[name], self.tokens[name]
        length = len(tokens) + len(new)
        if table.blocks_needed(length) > self.pool.num_free:
            return False
        before = list(table.blocks)
        expected_free = self.pool.num_free - table.blocks_needed(length)
        copy = table.grow(length)
        if copy is not None:
            source, target = copy
            assert before[-1] == source
            assert table.blocks[len(before) - 1] == target
            self.owners[source].remove(name)
            assert self.owners[source], "a block that nobody else has was copied"
            self.claim(target, name)
            self.memory[target] = self.memory[source][:]
        assert self.pool.num_free == expected_free
        for block in table.blocks[len(before) :]:
            self.claim(block, name)
        for position, token in enumerate(new, len(tokens)):
            block = table.blocks[position // BLOCK_SIZE]
            assert self.owners[block] == {name}, "a shared block is written to"
            self.memory[block][position % BLOCK_SIZE] = token
        return True

    def claim(self, block: int, name: int) -> None:
        assert not self.owners[block], "a block that someone owns was handed out"
        self.owners[block].add(name)
        self.memory[block] = [None] * BLOCK_SIZE

    # Two tokens only, so that prefixes coincide.
    token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=10)

    @rule(target=sequences, tokens=token_lists)
    def begin(self, tokens: list[int]) -> int:
        name = self.new_name()
        table = self.tables[name] = BlockTable(self.pool)
        found = []
        for digest in self.hashes(tokens):
            block = self.pool.find(digest)
            if block is None:
                break
            found.append(block)
        table.adopt(found)
        for block in found:
            self.owners[block].add(name)
        cached = len(found) * BLOCK_SIZE
        self.tokens[name] = tokens[:cached]
        if tokens[cached:]:
            self.write(name, tokens[cached:])
        return name

    @rule(name=sequences, tokens=token_lists)
    def append(self, name: int, tokens: list[int]) -> None:
        self.write(name, tokens)

    @rule(name=sequences, guesses=token_lists, right=st.integers(0, 10))
    def guess(self, name: int, guesses: list[int], right: int) -> None:
        """Write tokens of which only the first turn out right, and give the other slots back."""
        if self.place(name, guesses):
            table, kept = self.tables[name], guesses[:right]
            before = list(table.blocks)
            table.shrink(len(self.tokens[name]) + len(kept))
            for block in before[len(table.blocks) :]:
                self.owners[block].remove(name)
            self.tokens[name].extend(kept)
            self.write(name, [])

    @rule(target=sequences, name=sequences)
    def fork(self, name: int) -> int:
        other = self.new_name()
        self.tables[other] = self.tables[name].fork()
        self.tokens[other] = self.tokens[name][:]
        for block in self.tables[name].blocks:
            self.owners[block].add(other)
        return other

    @rule(name=consumes(sequences))
    def free(self, name: int) -> None:
        self.release(name)

    def release(self, name: int) -> None:
        for block in self.tables[name].blocks:
            self.owners[block].remove(name)
        self.tables.pop(name).free()
        del self.tokens[name]

    @invariant()
    def every_sequence_reads_back_what_it_wrote(self) -> None:
        for name, table in self.tables.items():
            held = [token for block in table.blocks for token in self.memory[block]]
            assert held[: len(self.tokens[name])] == self.tokens[name]

    @invariant()
    def reference_counts_are_numbers_of_owners(self) -> None:
        counts = [self.pool.ref_count(block) for block in range(NUM_BLOCKS)]
        assert counts == [len(owners) for owners in self.owners]
        assert self.pool.num_free == counts.count(0)

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def hand_out_all_free_blocks_once(self) -> None:
        blocks = [self.pool.allocate() for _ in range(self.pool.num_free)]
        free = {block for block, owners in enumerate(self.owners) if not owners}
        assert sorted(blocks) == sorted(free)
        with pytest.raises(IndexError):
            self.pool.allocate()
        for block in blocks:
            self.memory[block] = [None] * BLOCK_SIZE
            self.pool.release(block)

    def teardown(self) -> None:
        for name in list(self.tables):
            self.release(name)
        assert self.pool.num_free == NUM_BLOCKS
        assert not any(self.pool.ref_count(block) for block in range(NUM_BLOCKS))
        named = sum(self.pool.is_cached(block) for block in range(NUM_BLOCKS))
        assert named == self.pool.num_cached


TestPagedMemory = PagedMemory.TestCase
TestPagedMemory.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def digest(number: int) -> bytes:
    return chain_hash(root_hash(None), bytes([number]))


def test_a_free_block_is_found_by_its_hash_until_it_is_handed_out_again():
    pool = BlockPool(2, BLOCK_SIZE)
    first = pool.allocate()
    pool.register(first, digest(1))
    pool.release(first)
    assert pool.find(digest(1)) == first
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.find(digest(1)) is None


def test_a_cached_block_that_is_shared_again_is_not_handed_out():
    pool = BlockPool(2, BLOCK_SIZE)
    block = pool.allocate()
    pool.register(block, digest(1))
    pool.release(block)
    pool.share(block)
    assert pool.allocate() != block
    assert pool.num_free == 0


def test_the_least_recently_freed_cached_block_goes_first():
    pool = BlockPool(3, BLOCK_SIZE)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.register(block, digest(number))
    for number in (1, 0, 2):
        pool.release(blocks[number])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_blocks_without_a_hash_are_reused_before_cached_ones():
    pool = BlockPool(2, BLOCK_SIZE)
    cached, plain = pool.allocate(), pool.allocate()
    pool.register(cached, digest(1))
    pool.release(cached)
    pool.release(plain)
    assert pool.allocate() == plain


def test_a_second_block_with_the_same_contents_stays_nameless():
    pool = BlockPool(2, BLOCK_SIZE)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, digest(1))
    pool.register(second, digest(1))
    assert pool.find(digest(1)) == first
    assert pool.num_cached == 1
    pool.release(second)
    assert pool.allocate() == second


def test_a_pool_without_caching_finds_nothing():
    pool = BlockPool(1, BLOCK_SIZE, enable_caching=False)
    pool.register(pool.allocate(), digest(1))
    assert pool.find(digest(1)) is None


def test_releasing_a_block_too_often_is_an_error():
    pool = BlockPool(1, BLOCK_SIZE)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="more often than it was claimed"):
        pool.release(block)


def test_hashes_depend_on_the_parent_the_tokens_and_the_salt():
    one = chain_hash(root_hash(None), b"abcd")
    assert len({one, chain_hash(one, b"abcd"), chain_hash(root_hash(None), b"abce")}) == 3
    assert len({root_hash(None), root_hash(""), root_hash("a"), root_hash("b")}) == 4
