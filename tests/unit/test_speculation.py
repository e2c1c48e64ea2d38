"""Speculative decoding in the engine: room for guesses, what is kept of them, when it is worth it.

That the tokens are the same with it and without, for random mixes of requests, is in
test_any_requests.py; on real models in tests/engine/test_speculative_decoding.py.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from checksum_model import (
    BLOCK_SIZE,
    ChecksumModel,
    Guesser,
    Outputs,
    Switched,
    assert_whole,
    draft_model,
    expected_output,
    greedy,
    logprob,
    make_engine,
    run,
)

from cuengine.block_pool import BlockPool
from cuengine.block_table import BlockTable
from cuengine.config import EngineConfig
from cuengine.engine import Engine
from cuengine.errors import ConfigError
from cuengine.ngram import NgramProposer
from cuengine.scheduler import Chunk
from cuengine.sequence import Request, Sequence
from cuengine.speculation import Speculator
from cuengine.speculative_config import read_speculative_config

ALWAYS = [9]
"""For a Guesser: all are right."""


def engine_with(right: list[int], **fields: Any) -> tuple[Engine, ChecksumModel]:
    return make_engine(proposer=Guesser(right), **fields)


def test_right_guesses_come_with_the_token_after_them():
    engine, model = engine_with(ALWAYS, num_draft_tokens=3)
    engine.add_request("r", [1, 2], greedy(max_tokens=9))
    lengths = []
    outputs = Outputs()
    while engine.has_unfinished():
        news = engine.step()
        outputs.add(news)
        lengths.append(len(news[0].tokens))
    assert lengths == [1, 4, 4]
    assert outputs.tokens["r", 0] == expected_output([1, 2], greedy(max_tokens=9))
    assert [tokens for tokens, _ in model.steps] == [2, 4, 4]


def test_of_a_draft_what_follows_a_wrong_token_is_dropped():
    engine, _ = engine_with([1], num_draft_tokens=4)
    engine.add_request("r", [1, 2], greedy(max_tokens=7))
    outputs = run(engine)
    assert outputs.tokens["r", 0] == expected_output([1, 2], greedy(max_tokens=7))
    stats = engine.stats()
    # A token by prefill, then two a step; the last draft has room for one guess only.
    assert stats.num_steps == 4
    assert (stats.num_drafts, stats.num_draft_tokens) == (3, 4 + 3 + 1)
    assert stats.num_accepted_tokens_per_pos == (3, 0, 0, 0)
    assert stats.num_accepted_tokens == 3
    assert stats.generation_tokens == 7


def test_no_token_is_guessed_beyond_max_tokens():
    engine, model = engine_with(ALWAYS, num_draft_tokens=8)
    engine.add_request("r", [1] * 10, greedy(max_tokens=5))
    outputs = run(engine)
    assert [tokens for tokens, _ in model.steps] == [10, 4]
    assert outputs.reasons["r", 0] == "length"


def test_a_stop_token_amid_right_guesses_ends_the_sample_there():
    tokens = expected_output([1, 2], greedy(max_tokens=20))
    engine, _ = engine_with(ALWAYS, num_draft_tokens=8)
    engine.add_request("r", [1, 2], greedy(max_tokens=20, stop_token_ids=[tokens[3]], logprobs=0))
    outputs = Outputs()
    entries = []
    while engine.has_unfinished():
        news = engine.step()
        outputs.add(news)
        entries += [token.logprobs for output in news for token in output.tokens]
    assert outputs.tokens["r", 0] == tokens[:4]
    assert outputs.reasons["r", 0] == "stop"
    for i, entry in enumerate(entries):
        assert entry is not None
        assert entry[tokens[i]].logprob == pytest.approx(logprob([1, 2, *tokens[:i]], tokens[i]))
    assert len(entries) == 4
    assert_whole(engine)


def test_guesses_take_only_blocks_that_nobody_needs():
    """Two sequences fill all but one of the blocks: the guesses of neither preempt the other."""
    engine, _ = engine_with(ALWAYS, num_draft_tokens=8, num_blocks=8, max_model_len=40)
    for name in "ab":
        engine.add_request(name, [ord(name) % 7 + 1] * 25, greedy(max_tokens=7))
    outputs = run(engine)
    assert engine.stats().num_preemptions == 0
    assert engine.stats().num_accepted_tokens > 0
    for name in "ab":
        expected = expected_output([ord(name) % 7 + 1] * 25, greedy(max_tokens=7))
        assert outputs.tokens[name, 0] == expected


def test_guesses_get_what_prompts_leave_of_the_budget():
    engine, model = engine_with(ALWAYS, num_draft_tokens=8, budget=12)
    engine.add_request("r", [1, 2], greedy(max_tokens=40))
    engine.step()
    engine.add_request("long", [3] * 20, greedy(max_tokens=1))
    engine.step()
    assert model.steps[-1] == (12, 2)
    engine.step()
    # The other 9 tokens of the prompt, one decode, two guesses.
    assert model.steps[-1] == (12, 2)
    assert engine.stats().num_draft_tokens == 2


def test_slots_of_wrong_guesses_are_free_after_the_step():
    engine, _ = engine_with([0], num_draft_tokens=20)
    engine.add_request("r", [1] * BLOCK_SIZE, greedy(max_tokens=40))
    engine.step()
    for length in range(BLOCK_SIZE + 1, BLOCK_SIZE + 10):
        engine.step()
        assert engine.stats().num_used_blocks == -(-length // BLOCK_SIZE)


@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_filled_by_right_guesses_are_found_by_others(overlaps: bool):
    engine, _ = engine_with(ALWAYS, num_draft_tokens=6, overlaps=overlaps)
    prompt = [1] * 6
    tokens = expected_output(prompt, greedy(max_tokens=19))
    engine.add_request("r", prompt, greedy(max_tokens=19))
    run(engine)
    # 24 of the 25 tokens are in the cache.
    engine.add_request("again", prompt + tokens, greedy(max_tokens=1))
    outputs = engine.step() or engine.step()
    assert outputs[0].num_cached_tokens == 24


def test_a_block_with_a_wrong_guess_is_found_by_nobody():
    engine, _ = engine_with([0], num_draft_tokens=8)
    engine.add_request("r", [1] * 4, greedy(max_tokens=3))
    run(engine)
    assert engine.stats().num_cached_blocks == 0


def test_where_steps_overlap_only_sequences_that_guess_wait_for_their_tokens():
    engine, model = make_engine(overlaps=True, proposer=Guesser(ALWAYS))
    engine._speculator = engine.scheduler.drafts = None
    engine.add_request("r", [1, 2], greedy(max_tokens=5))
    run(engine)
    assert [batch.token_sources is None for batch in model.batches] == [True] + [False] * 4
    engine, model = make_engine(overlaps=True, proposer=Guesser(ALWAYS))
    engine.add_request("r", [1, 2], greedy(max_tokens=5))
    run(engine)
    assert all(batch.token_sources is None for batch in model.batches)
    assert len(model.batches) == 2


def test_a_draft_model_follows_prefix_hits_forks_copies_and_preemption():
    """Its guesses are all right only if its cache has what it should have."""
    proposer = draft_model(ChecksumModel(), budget=16)
    engine, _ = make_engine(num_blocks=12, budget=16, proposer=proposer)
    prompts = {name: [1] * 17 + [ord(name) % 9] * 4 for name in "abcd"}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(n=2, max_tokens=20))
    outputs = run(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
    for name, prompt in prompts.items():
        for sample in range(2):
            expected = expected_output(prompt, greedy(max_tokens=20), sample)
            assert outputs.tokens[name, sample] == expected


def test_a_draft_model_that_fails_takes_along_what_runs_and_nothing_else():
    drafts = ChecksumModel()
    engine, _ = make_engine(max_num_seqs=1, proposer=draft_model(drafts))
    for name in ("a", "waits"):
        engine.add_request(name, [3] * 20, greedy())
    engine.step()
    drafts.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    drafts.fail = False
    outputs = run(engine)
    assert list(outputs.tokens) == [("waits", 0)]
    assert outputs.tokens["waits", 0] == expected_output([3] * 20, greedy())
    assert engine.stats().num_accepted_tokens == engine.stats().num_draft_tokens > 0
    assert_whole(engine)


def test_a_draft_model_that_pauses_is_caught_up_in_passes_of_many_tokens():
    drafts = ChecksumModel()
    proposer = Switched(draft_model(drafts), [False] * 20 + [True])
    engine, _ = make_engine(proposer=proposer)
    engine.add_request("r", [1] * 5, greedy(max_tokens=40))
    outputs = run(engine)
    assert outputs.tokens["r", 0] == expected_output([1] * 5, greedy(max_tokens=40))
    assert max(tokens for tokens, _ in drafts.steps) == BLOCK_SIZE
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 4
    # Of 45 tokens 44 are computed, by both but for the last, partly full block.
    assert stats.num_cached_blocks == 5


def test_blocks_that_a_draft_model_has_not_computed_are_found_by_nobody():
    drafts = ChecksumModel()
    engine, _ = make_engine(proposer=Switched(draft_model(drafts), [False]))
    prompt = [1] * 12
    engine.add_request("r", prompt, greedy(max_tokens=6))
    run(engine)
    # The prompt was computed by both; five of the six tokens after it, up to 17, by the model only.
    assert engine.stats().num_cached_blocks == 1


@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_is_kept_of_a_sequence_that_is_over(aborted: bool):
    config = read_speculative_config({"method": "ngram", "num_speculative_tokens": 2})
    proposer = NgramProposer(config)
    engine, _ = make_engine(proposer=proposer)
    engine.add_request("r", [1] * 20, greedy(n=2, max_tokens=8))
    for _ in range(3):
        engine.step()
    assert len(proposer._indices) == 2
    if aborted:
        engine.abort("r")
    run(engine)
    assert not proposer._indices
    assert_whole(engine)


class _Draws:
    """A proposer whose guesses the test makes."""

    cost = 0.0

    def __init__(self, cost: float = 0.0) -> None:
        self.cost = cost

    def prepare(self, sequence: Sequence, count: int) -> int:
        return count

    def propose(self, step: object) -> None:
        return

    def num_reusable(self, sequence: Sequence) -> int:
        return sequence.num_computed

    def forget(self, sequence: Sequence) -> None:
        return


def _sequence() -> Sequence:
    request = Request("r", [1], greedy(), 0, 0, 8, frozenset())
    return Sequence(request, 0, BlockTable(BlockPool(1, BLOCK_SIZE)))


def _drafted(acceptance: float, load: int, cost: float = 0.0) -> list[int]:
    """Tokens guessed in each of 2,000 steps, of which each is right with the same probability."""
    speculator = Speculator(_Draws(cost), 8, weight_tokens=16)
    sequence, rng = _sequence(), random.Random(3)
    counts = []
    for _ in range(2000):
        count = speculator.wanted(sequence, 8, load)
        counts.append(count)
        speculator.propose(None)  # type: ignore[arg-type]
        if count:
            chunk = Chunk(sequence, 0, 1 + count, 0, 1, count)
            chunk.draft_ids.extend([7] * count)
            speculator.accept(chunk, [7 if rng.random() < acceptance else 8 for _ in range(count)])
    return counts


def _mean(counts: list[int]) -> float:
    return sum(counts[200:]) / len(counts[200:])


def test_more_is_guessed_the_better_guesses_are_and_the_fewer_sequences_run():
    assert _mean(_drafted(0.95, load=1)) > 7
    assert 2 < _mean(_drafted(0.5, load=1)) < 6
    assert _mean(_drafted(0.0, load=1)) < 0.1
    means = [_mean(_drafted(0.8, load)) for load in (1, 4, 16, 200)]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.1


def test_what_guessing_costs_counts():
    assert _mean(_drafted(0.8, load=1, cost=0.1)) > _mean(_drafted(0.8, load=1, cost=0.4)) > 0
    assert _mean(_drafted(0.8, load=1, cost=1.0)) < 0.1


def test_a_sequence_that_guesses_no_more_tries_again_and_comes_back():
    speculator = Speculator(_Draws(), 4, weight_tokens=16)
    sequence = _sequence()

    def steps(count: int, drawn: int) -> list[int]:
        counts = []
        for _ in range(count):
            counts.append(speculator.wanted(sequence, 4, 8))
            speculator.propose(None)  # type: ignore[arg-type]
            if counts[-1]:
                chunk = Chunk(sequence, 0, 1 + counts[-1], 0, 1, counts[-1])
                chunk.draft_ids.extend([7] * counts[-1])
                speculator.accept(chunk, [drawn] * counts[-1])
        return counts

    assert steps(100, drawn=8)[-50:].count(0) >= 48
    assert steps(300, drawn=7)[-50:] == [4] * 50
    # And a new one begins with what is known of others.
    assert Speculator(_Draws(), 4, weight_tokens=16).limit(_sequence(), 8) == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4}, (4, 5, 5)),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3}, (1, 3, 3)),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 2}, (1, 2, 2)),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 4,
            },
            (2, 4, 1),
        ),
    ],
)
def test_settings_of_prompt_lookup_are_vllms(given: dict[str, Any], expected: tuple[int, int, int]):
    for spelled in (given, json.dumps(given)):
        config = EngineConfig(speculative_config=spelled).speculation()
        assert config is not None
        lookup = (config.prompt_lookup_max, config.prompt_lookup_min)
        assert (config.method, config.num_speculative_tokens, *lookup) == ("ngram", *expected)


def test_a_model_without_a_method_is_a_draft_model():
    config = EngineConfig(speculative_config={"model": "x", "num_speculative_tokens": 3})
    read = config.speculation()
    assert read is not None
    assert (read.method, read.model, read.revision) == ("draft_model", "x", None)
    assert EngineConfig().speculation() is None


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (7, "is not a JSON object"),
        ({}, "method=None is not one of: ngram, draft_model"),
        ({**NGRAM, "method": "eagle"}, "method='eagle' is not one of"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens=0 is not a whole number"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens=True is not"),
        ({**NGRAM, "num_speculative_tokens": "4"}, "num_speculative_tokens='4' is not"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max=0 is not"),
        ({**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min=3 is more"),
        ({**NGRAM, "model": "x"}, "model: not known with method='ngram', which takes: method, num"),
        ({**NGRAM, "quantization": "x", "foo": 1}, "foo, quantization: not known"),
        ({"method": "draft_model", "num_speculative_tokens": 1}, "model is missing"),
        ({"model": "x", "num_speculative_tokens": 1, "prompt_lookup_max": 2}, "prompt_lookup_max:"),
        ({"model": 3, "num_speculative_tokens": 1}, "model=3 is not a name"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_the_value(given: Any, message: str):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative_config=given)
    assert str(caught.value).startswith("speculative_config: ")
    assert message in str(caught.value)
