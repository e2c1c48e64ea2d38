"""Random mixes of beam searches and samples: each search finds what it would find alone.

The model is checksum_model.py's, so what a search must find can be worked out with no engine: by
`expected_beams`, which scores every token after every beam. That the rules are those of
transformers is shown in tests/engine/test_beam_search.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from checksum_model import (
    BLOCK_SIZE,
    EOS,
    VOCAB,
    ChecksumModel,
    Guesser,
    Outputs,
    assert_whole,
    draft_model,
    expected_output,
    greedy,
    logprob,
    make_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.engine import Engine
from cuengine.errors import RequestError
from cuengine.sampling_params import BeamSearchParams, SamplingParams
from cuengine.speculation import Proposer

Text = tuple[int, ...]
Found = list[tuple[Text, float]]


def expected_beams(prompt: list[int], params: BeamSearchParams) -> Found:
    """Texts and scores, best first, by the definition."""
    return _expected_beams(
        tuple(prompt),
        params.beam_width,
        params.max_tokens or 0,
        params.length_penalty,
        params.early_stopping,
        params.ignore_eos,
    )[: params.num_results]


@cache
def _expected_beams(
    prompt: Text,
    width: int,
    max_tokens: int,
    penalty: float,
    early: bool | str,
    ignore_eos: bool,
) -> Found:
    running: Found = [((), 0.0)]
    ended: Found = []
    for length in range(1, max_tokens + 1):
        every = [
            ((*text, token), total + logprob([*prompt, *text], token))
            for text, total in running
            for token in range(VOCAB)
        ]
        every.sort(key=lambda found: -found[1])

        def ends(text: Text, length: int = length) -> bool:
            return length == max_tokens or (text[-1] == EOS and not ignore_eos)

        ended += [(t, total / length**penalty) for t, total in every[:width] if ends(t)]
        ended = sorted(ended, key=lambda found: -found[1])[:width]
        running = [found for found in every[: 2 * width] if not ends(found[0])][:width]
        if len(ended) == width and running:
            if early is True or width == 1:
                break
            hoped = max_tokens if early == "never" and penalty > 0 else length
            if running[0][1] / hoped**penalty <= ended[-1][1]:
                break
    return ended


class Searches(Outputs):
    """Results of searches too: they come in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: dict[tuple[str, int], float] = {}

    def follow(self, engine: Engine) -> None:
        news = engine.step()
        self.add(news)
        for output in news:
            for token in output.tokens:
                if token.score is not None:
                    self.scores[output.request_id, token.index] = token.score

    def finish(self, engine: Engine, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not engine.has_unfinished():
                return
            self.follow(engine)
        raise AssertionError("no end in sight")

    def found(self, name: str) -> Found:
        count = sum(request == name for request, _ in self.scores)
        return [(tuple(self.tokens[name, i]), self.scores[name, i]) for i in range(count)]


def assert_found(outputs: Searches, name: str, prompt: list[int], params: BeamSearchParams) -> None:
    expected, found = expected_beams(prompt, params), outputs.found(name)
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])
    for index, (text, _) in enumerate(expected):
        stopped = text[-1] == EOS and not params.ignore_eos
        assert outputs.reasons[name, index] == ("stop" if stopped else "length")


@dataclass
class Job:
    """A request, when it comes, and steps after its arrival at which it is aborted."""

    prompt: list[int]
    params: BeamSearchParams | SamplingParams
    priority: int
    arrives: int
    aborted: int | None


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    prompt = [1] * draw(st.integers(0, 20)) + draw(
        st.lists(st.integers(1, 2), min_size=1, max_size=12)
    )
    params: BeamSearchParams | SamplingParams
    if draw(st.sampled_from([True, True, True, False])):
        width = draw(st.sampled_from([1, 2, 3, 4, 5]))
        params = BeamSearchParams(
            width,
            draw(st.sampled_from([24, 16, 20, 8, 1])),
            n=draw(st.none() | st.integers(1, width)),
            length_penalty=draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])),
            early_stopping=draw(st.sampled_from([False, True, "never"])),
            ignore_eos=draw(st.sampled_from([True, True, False])),
        )
    else:
        params = greedy(n=draw(st.integers(1, 3)), max_tokens=draw(st.integers(1, 20)))
    return Job(
        prompt,
        params,
        priority=draw(st.integers(0, 2)),
        arrives=draw(st.integers(0, 8)),
        aborted=draw(st.sampled_from([None, None, None, None, 5, 15, 40])),
    )


@settings(max_examples=100, deadline=None)
@given(
    work=st.lists(jobs(), min_size=2, max_size=6),
    num_blocks=st.integers(7, 14),
    max_num_seqs=st.integers(5, 8),
    budget=st.sampled_from([1, 3, 16, 64]),
    caching=st.booleans(),
    overlaps=st.booleans(),
    num_host_blocks=st.sampled_from([0, 5, 100]),
    guesses=st.sampled_from(["none", "none", "right and wrong", "a draft model's"]),
)
def test_every_search_finds_what_it_would_find_alone(
    work: list[Job],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    overlaps: bool,
    num_host_blocks: int,
    guesses: str,
):
    """Samples may be guessed for, beams never are; and a draft model's cache stays right."""
    proposer: Proposer | None = None
    if guesses == "a draft model's":
        proposer = draft_model(ChecksumModel(), budget)
    elif guesses != "none":
        proposer = Guesser([3, 0, 1])
    engine, model = make_engine(
        num_blocks=num_blocks,
        max_model_len=7 * BLOCK_SIZE,
        proposer=proposer,
        max_num_seqs=max_num_seqs,
        budget=budget,
        caching=caching,
        overlaps=overlaps,
        num_host_blocks=num_host_blocks,
        block_cost=0.5,
    )
    outputs = Searches()
    for now in range(20_000):
        for name, job in enumerate(work):
            if job.arrives == now:
                engine.add_request(str(name), job.prompt, job.params, priority=job.priority)
            if job.aborted is not None and job.arrives + job.aborted == now:
                engine.abort(str(name))
        outputs.follow(engine)
        stats = engine.stats()
        assert stats.num_running <= max_num_seqs
        assert stats.num_used_blocks + stats.num_free_blocks == num_blocks
        if now > 45 and not engine.has_unfinished():
            break
    assert_whole(engine)
    assert not model.pending
    assert all(tokens <= budget for tokens, _ in model.steps)
    for name, job in enumerate(work):
        if isinstance(job.params, SamplingParams):
            for sample in range(job.params.n):
                expected = expected_output(job.prompt, job.params, sample)
                got = outputs.tokens.get((str(name), sample), [])
                assert got == (expected if job.aborted is None else expected[: len(got)])
        elif job.aborted is None or outputs.found(str(name)):
            assert_found(outputs, str(name), job.prompt, job.params)


def test_one_prefill_for_all_beams_and_one_row_for_each_of_them_in_a_step():
    engine, model = make_engine()
    params = BeamSearchParams(4, 6, ignore_eos=True)
    outputs = Searches()
    engine.add_request("r", [5] * 12, params)
    outputs.finish(engine)
    assert model.steps == [(12, 1)] + [(4, 4)] * 5
    assert [len(batch.logits_indices) for batch in model.batches] == [1] + [4] * 5
    assert_found(outputs, "r", [5] * 12, params)
    assert_whole(engine)


def test_only_block_tables_move_and_a_dropped_beam_frees_its_blocks_at_once():
    """Blocks in use after each step are those that the tables of the beams name."""
    engine, model = make_engine()
    engine.add_request("r", [5] * 12, BeamSearchParams(4, 20, ignore_eos=True))
    outputs, copies = Searches(), 0
    while engine.has_unfinished():
        outputs.follow(engine)
        running = engine.scheduler.running
        named = {block for sequence in running for block in sequence.table.blocks}
        assert engine.stats().num_used_blocks == len(named)
        for batch in model.batches[-1:]:
            copies += len(batch.block_copies)
        # Of children with one parent all but the last to write copy their partly full block.
        assert all(len(batch.block_copies) <= 3 for batch in model.batches)
    assert copies > 0
    assert_whole(engine)


def test_a_search_needs_no_more_room_than_one_text_of_full_length():
    """Four beams of 61 tokens in eight blocks of eight: they take turns."""
    for num_host_blocks in (0, 100):
        engine, _ = make_engine(num_blocks=8, max_model_len=64, num_host_blocks=num_host_blocks)
        params = BeamSearchParams(4, 61, ignore_eos=True)
        outputs = Searches()
        engine.add_request("r", [1, 2, 3], params)
        outputs.finish(engine)
        assert engine.stats().num_preemptions > 0
        assert_found(outputs, "r", [1, 2, 3], params)
        assert_whole(engine)


def test_beams_for_which_there_is_no_place_wait_and_are_computed_again():
    engine, _ = make_engine(num_host_blocks=50)
    params = BeamSearchParams(4, 12, ignore_eos=True)
    outputs = Searches()
    engine.add_request("r", [1] * 20, params)
    for _ in range(5):
        outputs.follow(engine)
    engine.scheduler.max_num_seqs = 2
    outputs.follow(engine)
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 2)
    # The other two get their turns when the first two, which wait for them, are held.
    outputs.finish(engine)
    assert_found(outputs, "r", [1] * 20, params)
    assert_whole(engine)


def test_a_search_goes_on_beside_requests_that_took_the_places_of_its_beams():
    engine, _ = make_engine(num_blocks=8, max_model_len=64, max_num_seqs=4)
    params = BeamSearchParams(4, 40, ignore_eos=True)
    outputs = Searches()
    engine.add_request("r", [1, 2, 3], params, priority=1)
    for _ in range(12):
        outputs.follow(engine)
    for name in "abcd":
        engine.add_request(name, [4, 5], greedy(max_tokens=20))
    outputs.finish(engine)
    assert_found(outputs, "r", [1, 2, 3], params)
    for name in "abcd":
        assert outputs.tokens[name, 0] == expected_output([4, 5], greedy(max_tokens=20))
    assert_whole(engine)


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_search_aborted_in_the_middle_leaves_nothing_behind(steps: int):
    """In a pool so small that some of its beams run, some wait and some are held."""
    engine, _ = make_engine(num_blocks=8, max_model_len=64, num_host_blocks=5, budget=3)
    outputs = Searches()
    engine.add_request("other", [7] * 9, greedy(max_tokens=50))
    engine.add_request("r", [1] * 20, BeamSearchParams(4, 40, ignore_eos=True))
    for _ in range(10 + 7 * steps):
        outputs.follow(engine)
    engine.abort("r")
    outputs.finish(engine)
    assert not outputs.found("r")
    assert outputs.tokens["other", 0] == expected_output([7] * 9, greedy(max_tokens=50))
    assert_whole(engine)


def test_nobody_guesses_for_beams_nor_does_a_draft_model_follow_them_past_the_prompt():
    draft = ChecksumModel()
    engine, model = make_engine(proposer=draft_model(draft))
    params = BeamSearchParams(4, 30, ignore_eos=True)
    outputs = Searches()
    engine.add_request("r", [5] * 12, params)
    outputs.finish(engine)
    assert_found(outputs, "r", [5] * 12, params)
    assert model.steps == [(12, 1)] + [(4, 4)] * 29
    # Besides, blocks are copied in its cache as in the other.
    assert [tokens for tokens, _ in draft.steps if tokens] == [12]
    assert_whole(engine)


def test_copies_of_one_step_do_not_chain_when_a_beam_gives_up_the_block_they_copy_from():
    """So few blocks that it comes to that, if beams that share a block are not neighbours in order:
    the model asserts that no block is the target of one copy and the source of another."""
    prompt = [4, 8, 8, 7, 5, 6, 3, 5, 3, 1, 9, 1, 2, 9, 4, 8, 6, 8, 6]
    engine, _ = make_engine(num_blocks=9)
    params = BeamSearchParams(8, 11, ignore_eos=True)
    outputs = Searches()
    engine.add_request("r", prompt, params)
    outputs.finish(engine)
    assert_found(outputs, "r", prompt, params)
    assert_whole(engine)


def test_who_survives_a_step_that_fails_takes_nothing_from_blocks_it_was_to_fill():
    """At some step a beam loses its blocks to another request, whose step then fails: what was to
    be swapped out never was."""
    params, plain = BeamSearchParams(4, 20, ignore_eos=True), greedy(max_tokens=45)
    survivors = set()
    for failing in range(11, 60):
        engine, model = make_engine(
            num_blocks=8, max_model_len=64, budget=3, num_host_blocks=50, block_cost=0.01
        )
        outputs = Searches()
        engine.add_request("search", [1] * 18, params, priority=1)
        for step in range(failing):
            if step == 10:
                engine.add_request("plain", [2] * 9, plain)
            outputs.follow(engine)
        model.fail = True
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step()
        model.fail = False
        running = [*engine.scheduler.running, *engine.scheduler.waiting, *engine.scheduler.held]
        left = {sequence.request.request_id for sequence in running}
        survivors |= left
        outputs.finish(engine)
        if "search" in left:
            assert_found(outputs, "search", [1] * 18, params)
        if "plain" in left:
            assert outputs.tokens["plain", 0] == expected_output([2] * 9, plain)
        assert_whole(engine)
    assert survivors == {"search", "plain"}


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_takes_its_search_along_and_the_engine_goes_on(late: bool):
    engine, model = make_engine(overlaps=late, num_blocks=8, max_model_len=64, num_host_blocks=50)
    params = BeamSearchParams(3, 30, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, [ord(name) % 7] * 9, params)
    outputs = Searches()
    for _ in range(30):
        outputs.follow(engine)
    model.fail, model.late = True, late
    with pytest.raises(RuntimeError, match="out of luck"):
        outputs.finish(engine)
    model.fail = False
    model.pending.clear()
    engine.add_request("c", [3] * 9, params)
    outputs.finish(engine)
    assert_found(outputs, "c", [3] * 9, params)
    assert_whole(engine)


def test_a_vocabulary_smaller_than_the_beams_is_searched_as_far_as_it_goes():
    engine, _ = make_engine(max_num_seqs=128, num_blocks=400, budget=512)
    params = BeamSearchParams(100, 3)
    outputs = Searches()
    engine.add_request("r", [1], params)
    outputs.finish(engine)
    assert_found(outputs, "r", [1], params)


def test_more_beams_than_sequences_may_run_are_refused_with_what_is_allowed():
    engine, _ = make_engine(max_num_seqs=8)
    with pytest.raises(RequestError, match="ask for at most 8") as caught:
        engine.add_request("r", [1], BeamSearchParams(9, 4))
    assert caught.value.param == "beam_width"
    with pytest.raises(RequestError, match="max_tokens=64 does not fit"):
        engine.add_request("r", [1], BeamSearchParams(2, 64))
    assert not engine.has_unfinished()


def test_without_max_tokens_a_text_may_fill_the_context():
    engine, _ = make_engine(max_model_len=2 * BLOCK_SIZE)
    outputs = Searches()
    engine.add_request("r", [1] * 10, BeamSearchParams(2, None, ignore_eos=True))
    outputs.finish(engine)
    assert [len(text) for text, _ in outputs.found("r")] == [6, 6]
