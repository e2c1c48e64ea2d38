"""Random mixes of requests, overlapped, swapped, speculative or not: each gets what it would alone.

The model is checksum_model.py's. What it draws is known in advance, so both ways of running are
held against the same truth, not against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.engine import Engine
from cuengine.outputs import EngineOutput
from cuengine.sampling_params import SamplingParams
from cuengine.sequence import Progress
from cuengine.speculation import Proposer


@dataclass
class Job:
    """A request, when it comes and what becomes of it.

    aborted  steps after its arrival at which it is aborted
    cut      tokens after which each sample is ended from outside, as a stop string does
    """

    prompt: list[int]
    params: SamplingParams
    priority: int
    salt: str | None
    arrives: int
    aborted: int | None
    cut: int | None

    def expected(self, sample: int) -> list[int]:
        return expected_output(self.prompt, self.params, sample)[: self.cut]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    # Few different tokens and a common start, so that requests share prefixes.
    prompt = [1] * draw(st.integers(0, 24)) + draw(
        st.lists(st.integers(1, 2), min_size=1, max_size=12)
    )
    max_tokens = draw(st.integers(1, 24))
    return Job(
        prompt,
        SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            seed=draw(st.integers(0, 3)),
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from([0, 0, 4])) if max_tokens > 4 else 0,
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([[], [], [*range(5, 20)]])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.0, 1.5])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        ),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from([None, None, "a"])),
        arrives=draw(st.integers(0, 15)),
        aborted=draw(st.none() | st.integers(0, 30)),
        cut=draw(st.none() | st.integers(1, 8)),
    )


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(jobs(), min_size=1, max_size=10),
    num_blocks=st.integers(8, 24),
    max_num_seqs=st.integers(3, 8),
    budget=st.sampled_from([1, 3, 16, 64]),
    caching=st.booleans(),
    overlaps=st.booleans(),
    num_host_blocks=st.sampled_from([0, 0, 3, 100]),
    guesses=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=4) | st.just("model"),
    num_draft_tokens=st.integers(1, 5),
    switched=st.just([True]) | st.lists(st.booleans(), min_size=2, max_size=20),
    deaths=st.sets(st.integers(0, 40), max_size=3),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    work: list[Job],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    overlaps: bool,
    num_host_blocks: int,
    guesses: list[int] | Literal["model"] | None,
    num_draft_tokens: int,
    switched: list[bool],
    deaths: set[int],
):
    """deaths: when the engine is lost, and another one takes over with what everybody has got."""

    def new_engine() -> tuple[Engine, ChecksumModel]:
        proposer: Proposer | None = None
        if guesses == "model":
            proposer = draft_model(ChecksumModel(), budget)
        elif guesses is not None:
            proposer = Guesser(guesses)
        return make_engine(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            budget=budget,
            caching=caching,
            overlaps=overlaps,
            num_host_blocks=num_host_blocks,
            proposer=None if proposer is None else Switched(proposer, switched),
            num_draft_tokens=num_draft_tokens,
        )

    engine, model = new_engine()
    outputs = Outputs()
    prompt_logprobs = {}
    cut: set[tuple[str, int]] = set()
    for now in range(5000):
        if now in deaths:
            engine, model = new_engine()
            for name, job in enumerate(work):
                if job.arrives < now and (job.aborted is None or job.arrives + job.aborted >= now):
                    resubmit(engine, str(name), job, outputs)
        for name, job in enumerate(work):
            if job.arrives == now:
                engine.add_request(
                    str(name), job.prompt, job.params, priority=job.priority, cache_salt=job.salt
                )
            if job.aborted is not None and job.arrives + job.aborted == now:
                engine.abort(str(name))
        news = engine.step()
        cut_before = cut.copy()
        for output in news:
            if output.prompt_logprobs is not None:
                assert output.request_id not in prompt_logprobs
                prompt_logprobs[output.request_id] = output.prompt_logprobs
            for token in output.tokens:
                key = (output.request_id, token.index)
                assert key not in cut_before
                if key in cut:
                    continue  # drawn in the same step as the last that counts
                outputs.add([EngineOutput(output.request_id, [token])])
                if len(outputs.tokens[key]) == work[int(output.request_id)].cut:
                    engine.finish_sequence(*key)
                    cut.add(key)
        stats = engine.stats()
        assert stats.num_running <= max_num_seqs
        assert stats.num_used_blocks + stats.num_free_blocks == num_blocks
        if now > 50 and not engine.has_unfinished():
            break
    assert_whole(engine)
    assert not model.pending
    assert all(tokens <= budget for tokens, _ in model.steps)
    assert all(0 < sequences <= max_num_seqs for _, sequences in model.steps)
    if guesses == "model":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    for name, job in enumerate(work):
        for sample in range(job.params.n):
            expected = job.expected(sample)
            got = outputs.tokens.get((str(name), sample), [])
            assert got == (expected if job.aborted is None else expected[: len(got)])
        if job.params.prompt_logprobs is not None and job.aborted is None:
            first, *others = prompt_logprobs[str(name)]
            assert first is None
            reported = [next(iter(entry.values())).logprob for entry in others]
            assert reported == pytest.approx(
                [logprob(job.prompt[:i], job.prompt[i]) for i in range(1, len(job.prompt))]
            )


def resubmit(engine: Engine, name: str, job: Job, outputs: Outputs) -> None:
    """Add a request to a new engine with the tokens that it has, unless it is through."""
    so_far: list[list[int] | None] = []
    for sample in range(job.params.n):
        tokens = outputs.tokens.get((name, sample), [])
        ended = (name, sample) in outputs.reasons or len(tokens) == job.cut
        so_far.append(None if ended else tokens)
    if any(output is not None for output in so_far):
        engine.add_request(
            name,
            job.prompt,
            job.params,
            priority=job.priority,
            cache_salt=job.salt,
            progress=None if so_far[0] == [] else Progress(so_far, num_cached_tokens=3),
        )


def test_a_request_that_goes_on_counts_and_reports_its_prompt_no_second_time():
    engine, _ = make_engine()
    params = greedy(n=2, max_tokens=6, prompt_logprobs=0)
    expected = [expected_output([1, 2, 3], params, sample) for sample in range(2)]
    engine.add_request(
        "r", [1, 2, 3], params, progress=Progress([expected[0][:2], expected[1][:3]], 2)
    )
    tokens: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.prompt_logprobs is None
            assert output.num_cached_tokens == 2
            for token in output.tokens:
                tokens[token.index].append(token.token_id)
    assert tokens == {0: expected[0][2:], 1: expected[1][3:]}
    assert engine.stats().prompt_tokens == 0
    assert_whole(engine)


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_fetched():
    engine, model = make_engine(overlaps=True)
    engine.add_request("r", [1, 2], greedy(max_tokens=5))
    assert engine.step() == []
    assert len(model.steps) == 1
    for launched in (2, 3, 4, 5, 5):
        [output] = engine.step()
        assert len(output.tokens) == 1
        assert len(model.steps) == launched
    assert not engine.has_unfinished()
    sources = [batch.token_sources for batch in model.batches]
    assert sources[0] is None
    assert [source.tolist() for source in sources[1:] if source is not None] == [[0]] * 4


def test_without_overlap_no_token_is_taken_from_the_device():
    engine, model = make_engine()
    engine.add_request("r", [1, 2], greedy(n=3, max_tokens=5))
    run(engine)
    assert all(batch.token_sources is None for batch in model.batches)


def test_all_samples_go_on_from_their_first_tokens_before_those_reach_the_host():
    engine, model = make_engine(overlaps=True)
    params = greedy(n=3, max_tokens=4)
    engine.add_request("other", [9], greedy(max_tokens=4))
    engine.add_request("r", [1, 2], params)
    engine.step()
    engine.step()
    assert model.steps[1] == (4, 4)
    assert model.batches[1].token_sources is not None
    assert model.batches[1].token_sources.tolist() == [0, 1, 2, 3]
    outputs = run(engine)
    for sample in range(3):
        expected = expected_output([1, 2], params, sample)
        assert outputs.tokens["r", sample] == expected[1:]


def test_a_stop_is_seen_one_step_late_and_costs_one_token_that_nobody_gets():
    engine, model = make_engine(overlaps=True)
    tokens = expected_output([1, 2], greedy(max_tokens=20))
    engine.add_request("r", [1, 2], greedy(max_tokens=20, stop_token_ids=[tokens[3]]))
    outputs = run(engine)
    assert outputs.tokens["r", 0] == tokens[: tokens.index(tokens[3]) + 1]
    assert outputs.reasons["r", 0] == "stop"
    assert len(model.steps) == len(outputs.tokens["r", 0]) + 1
    assert_whole(engine)


def test_a_length_is_known_in_advance_and_costs_no_token():
    engine, model = make_engine(overlaps=True)
    engine.add_request("r", [1, 2], greedy(max_tokens=6))
    run(engine)
    assert len(model.steps) == 6


def test_penalties_make_the_next_step_wait_and_only_while_they_run():
    engine, model = make_engine(overlaps=True)
    engine.add_request("plain", [1, 2], greedy(max_tokens=12))
    engine.add_request("penalized", [3], greedy(max_tokens=4, repetition_penalty=1.3))
    outputs = run(engine)
    assert outputs.tokens["penalized", 0] == expected_output([3], greedy(max_tokens=4))
    waited = [batch.token_sources is None for batch in model.batches]
    assert waited == [True] * 5 + [False] * 7


def test_a_prefix_is_shared_with_the_step_that_computes_it_still_on_its_way():
    engine, model = make_engine(overlaps=True)
    prompt = [*range(1, 21)]
    engine.add_request("first", prompt, greedy(max_tokens=4))
    assert engine.step() == []
    engine.add_request("second", prompt, greedy(max_tokens=4))
    outputs = run(engine)
    assert model.steps[1] == (1 + len(prompt) - 2 * BLOCK_SIZE, 2)
    for name in ("first", "second"):
        assert outputs.tokens[name, 0] == expected_output(prompt, greedy(max_tokens=4))


def test_a_request_aborted_while_its_step_runs_leaves_its_id_and_blocks_to_others():
    engine, _ = make_engine(overlaps=True, num_blocks=8)
    engine.add_request("r", [1] * 50, greedy(max_tokens=4))
    engine.step()
    engine.abort("r")
    engine.add_request("r", [2] * 50, greedy(max_tokens=4))
    outputs = run(engine)
    assert outputs.tokens["r", 0] == expected_output([2] * 50, greedy(max_tokens=4))
    assert_whole(engine)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_takes_along_what_runs_and_nothing_else(late: bool):
    engine, model = make_engine(overlaps=True, max_num_seqs=1)
    prompt = [3] * 20
    engine.add_request("a", prompt, greedy())
    engine.add_request("waits", prompt, greedy())
    engine.step()
    engine.step()
    model.fail, model.late = True, late
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    model.fail = False
    if late:
        model.pending.clear()
    outputs = run(engine)
    # Nothing of the failed step is found in the prefix cache.
    assert max(tokens for tokens, _ in model.steps[2:]) == len(prompt)
    assert outputs.tokens["waits", 0] == expected_output(prompt, greedy())
    assert ("a", 0) not in outputs.tokens or len(outputs.tokens["a", 0]) < 8
    assert_whole(engine)


def test_a_sample_that_ended_a_step_ago_leaves_no_block_in_the_prefix_cache():
    engine, _ = make_engine(overlaps=True)
    prompt = [1] * 6
    tokens = expected_output(prompt, greedy(seed=2))
    assert tokens[1] != tokens[0]
    # The second token ends it, and is the last of a block.
    engine.add_request("r", prompt, greedy(seed=2, stop_token_ids=[tokens[1]]))
    run(engine)
    assert engine.stats().num_cached_blocks == 0
    assert_whole(engine)


def test_outputs_of_one_step_name_each_request_once():
    engine, _ = make_engine(overlaps=True)
    for name in ("a", "b"):
        engine.add_request(name, [1, 2], greedy(n=2, max_tokens=5))
    while engine.has_unfinished():
        news: list[EngineOutput] = engine.step()
        names = [output.request_id for output in news]
        assert len(set(names)) == len(names)
