"""Scheduling and paging, with the model of checksum_model.py: what runs when, and who gives way.

That random mixes of requests get their tokens is in test_any_requests.py.
"""

from __future__ import annotations

import pytest
from checksum_model import (
    EOS,
    VOCAB,
    Outputs,
    assert_whole,
    checksum,
    expected_output,
    greedy,
    logprob,
    make_engine,
    run,
)

from cuengine.errors import RequestError


def test_running_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks():
    engine, model = make_engine(budget=8)
    engine.add_request("short", [1, 2], greedy(max_tokens=10))
    engine.step()
    engine.add_request("long", [3] * 30, greedy(max_tokens=1))
    outputs = Outputs()
    for _ in range(5):
        news = engine.step()
        assert "short" in [output.request_id for output in news]
        outputs.add(news)
    # One decode and seven prompt tokens a step: 30 tokens take five steps.
    assert model.steps[1:] == [(8, 2), (8, 2), (8, 2), (8, 2), (3, 2)]
    assert ("long", 0) in outputs.reasons


def test_lower_priority_values_are_admitted_first_then_the_order_of_arrival():
    engine, _ = make_engine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
        engine.add_request(name, [1, 2], greedy(max_tokens=2), priority=priority)
    assert run(engine).first == ["d", "b", "a", "c"]


def test_the_newest_sequence_of_the_lowest_priority_is_preempted():
    # Each needs four blocks in the end, and there are eight.
    engine, _ = make_engine(num_blocks=8, max_model_len=64)
    for name, priority in (("old", 0), ("low", 1), ("new", 0)):
        engine.add_request(name, [3, 4, 5, 6, 7, 8, 9], greedy(max_tokens=20), priority=priority)
    victims = []
    while engine.has_unfinished():
        engine.step()
        victims += [
            sequence.request.request_id
            for sequence in engine.scheduler.waiting
            if sequence.num_output
        ]
    assert engine.stats().num_preemptions > 0
    assert set(victims) == {"low"}
    assert_whole(engine)


def test_preempted_sequences_find_their_blocks_again_while_nobody_needed_the_room():
    engine, model = make_engine(num_blocks=8, max_model_len=64)
    for name in ("a", "b"):
        params = greedy(max_tokens=30)
        engine.add_request(name, [ord(name) % 7 + 1] * 8, params)
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    for name in ("a", "b"):
        prompt = [ord(name) % 7 + 1] * 8
        assert outputs.tokens[name, 0] == expected_output(prompt, greedy(max_tokens=30))
    # Without the cache the preempted sequence would run all its tokens again.
    total = sum(tokens for tokens, _ in model.steps)
    assert total < 2 * (8 + 30) + 16


def test_two_sequences_that_preempt_each_other_both_finish():
    engine, _ = make_engine(num_blocks=8, max_model_len=64)
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], greedy(max_tokens=61))
    outputs = run(engine)
    assert [len(tokens) for tokens in outputs.tokens.values()] == [61, 61]
    assert_whole(engine)


def test_a_request_at_the_head_of_the_queue_is_not_overtaken_by_smaller_ones():
    engine, _ = make_engine(num_blocks=8, max_model_len=64)
    engine.add_request("running", [1] * 20, greedy(max_tokens=10))
    engine.step()
    engine.add_request("large", [2] * 50, greedy(max_tokens=2))
    outputs = Outputs()
    for number in range(20):
        engine.add_request(f"small{number}", [3], greedy(max_tokens=1))
        outputs.add(engine.step())
    run(engine, outputs)
    assert outputs.first[:2] == ["running", "large"]


def test_a_shared_prefix_is_computed_once():
    engine, model = make_engine()
    prompt = list(range(1, 21))
    for name in ("first", "second"):
        engine.add_request(name, prompt, greedy(max_tokens=1))
        outputs = engine.step()
    assert outputs[0].num_cached_tokens == 16
    assert [tokens for tokens, _ in model.steps] == [20, 4]
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (40, 16)


def test_at_least_one_token_of_a_cached_prompt_runs():
    engine, model = make_engine()
    prompt = list(range(1, 17))
    for name in ("first", "second"):
        engine.add_request(name, prompt, greedy(max_tokens=1))
        engine.step()
    assert [tokens for tokens, _ in model.steps] == [16, 8]


def test_requests_with_different_salts_share_no_blocks():
    engine, model = make_engine()
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        engine.add_request(name, [1] * 20, greedy(max_tokens=1), cache_salt=salt)
        engine.step()
    assert [tokens for tokens, _ in model.steps] == [20, 20, 20, 4]


def test_prompt_logprobs_run_the_whole_prompt_whatever_is_cached():
    engine, model = make_engine()
    engine.add_request("a", [1] * 20, greedy(max_tokens=1))
    engine.step()
    engine.add_request("b", [1] * 20, greedy(max_tokens=1, prompt_logprobs=0))
    output = engine.step()[0]
    assert model.steps[-1] == (20, 1)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 20


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt():
    engine, _ = make_engine(num_blocks=8, budget=4)
    engine.add_request("first", [1] * 8, greedy(max_tokens=40))
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 5:
        engine.step()
    prompt = [2 + i % 5 for i in range(40)]
    engine.add_request("second", prompt, greedy(max_tokens=1, prompt_logprobs=0))
    news = []
    while engine.has_unfinished():
        news += engine.step()
    assert engine.stats().num_preemptions > 0
    [reported] = [output.prompt_logprobs for output in news if output.prompt_logprobs]
    assert [next(iter(entry.values())).logprob for entry in reported if entry] == pytest.approx(
        [logprob(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
    )


def test_samples_of_a_request_share_the_prompt_and_copy_on_write():
    engine, model = make_engine()
    params = greedy(n=3, max_tokens=6)
    engine.add_request("r", [5] * 12, params)
    engine.step()
    assert engine.stats().num_used_blocks == 2
    engine.step()
    # One full block shared by all; of the second, each sample but the last to write has a copy.
    assert engine.stats().num_used_blocks == 4
    assert model.steps == [(12, 1), (3, 3)]
    outputs = run(engine)
    for sample in range(3):
        expected = expected_output([5] * 12, params, sample)
        assert outputs.tokens["r", sample] == expected[2:]
    assert_whole(engine)


def test_eight_samples_hold_under_a_sixth_of_the_prompt_blocks_of_eight_requests():
    prompt = [3 + i % 7 for i in range(1004)]  # 125 full blocks of 8, and half of one

    def prompt_blocks(requests: int, n: int) -> int:
        engine, _ = make_engine(num_blocks=1024, max_model_len=1024, budget=2048, caching=False)
        for i in range(requests):
            engine.add_request(str(i), prompt, greedy(n=n, max_tokens=12))
        while min((s.num_output for s in engine.scheduler.running), default=0) < 3:
            engine.step()
        assert engine.scheduler.num_running == 8
        return len({block for s in engine.scheduler.running for block in s.table.blocks[:126]})

    assert prompt_blocks(requests=8, n=1) == 8 * 126
    assert prompt_blocks(requests=1, n=8) == 125 + 8 < 8 * 126 / 6


@pytest.mark.parametrize("num_host_blocks", [0, 16])
@pytest.mark.parametrize("budget", [64, 8])
def test_preempted_samples_share_their_prompt_again_when_they_resume(
    num_host_blocks: int, budget: int
):
    # "old" comes to need all twelve blocks. Afterwards there is room for both samples at once, and
    # to their end if they share the prompt's three blocks.
    engine, _ = make_engine(
        num_blocks=12, max_model_len=96, budget=budget, num_host_blocks=num_host_blocks
    )
    prompt = list(range(24))
    engine.add_request("old", [7] * 32, greedy(max_tokens=64))
    engine.add_request("pair", prompt, greedy(n=2, max_tokens=32))
    outputs = Outputs()
    while ("old", 0) not in outputs.reasons:
        outputs.add(engine.step())
    samples = engine.scheduler.waiting + engine.scheduler.running
    assert [sample.index for sample in samples] == [0, 1], "both were preempted"
    preemptions, steps_together = engine.stats().num_preemptions, 0
    while engine.has_unfinished():
        outputs.add(engine.step())
        tables = [sample.table.blocks[:3] for sample in engine.scheduler.running]
        if len(tables) == 2:
            steps_together += 1
            assert tables[0] == tables[1]
    assert steps_together > 8
    assert engine.stats().num_preemptions == preemptions
    for index in (0, 1):
        expected = expected_output(prompt, greedy(max_tokens=32), index)
        assert outputs.tokens["pair", index] == expected
    assert_whole(engine)


def test_the_outputs_of_all_samples_can_be_found_in_the_cache_afterwards():
    engine, _ = make_engine()
    params = greedy(n=2, max_tokens=20)
    engine.add_request("r", [5] * 10, params)
    run(engine)
    for sample in range(2):
        prompt = [5] * 10 + expected_output([5] * 10, params, sample)
        engine.add_request(f"after{sample}", prompt, greedy(max_tokens=1))
        outputs = engine.step()
        assert outputs[0].num_cached_tokens == 24
        assert [outputs[0].tokens[0].token_id] == expected_output(prompt, greedy(max_tokens=1))


def test_waiting_samples_count_against_the_sequence_limit_before_the_fork():
    engine, model = make_engine(max_num_seqs=4, budget=8)
    engine.add_request("many", [5] * 20, greedy(n=4, max_tokens=2))
    engine.add_request("one", [6], greedy(max_tokens=1))
    run(engine)
    assert max(sequences for _, sequences in model.steps) == 4
    assert model.steps[-1] == (1, 1)


def test_aborting_frees_every_block_wherever_the_request_is():
    engine, _ = make_engine(max_num_seqs=3, budget=8)
    engine.add_request("decoding", [1, 2], greedy(n=2, max_tokens=30))
    engine.step()
    engine.add_request("prefilling", [3] * 30, greedy())
    engine.step()
    engine.add_request("waiting", [4] * 10, greedy())
    engine.step()
    assert engine.stats().num_waiting == 1
    for name in ("prefilling", "waiting", "decoding", "unknown"):
        engine.abort(name)
    assert_whole(engine)
    assert not engine.has_unfinished()


def test_ending_one_sample_leaves_the_others_running():
    engine, _ = make_engine()
    params = greedy(n=2, max_tokens=10)
    engine.add_request("r", [1, 2, 3], params)
    outputs = Outputs()
    outputs.add(engine.step())
    engine.finish_sequence("r", 0)
    run(engine, outputs)
    assert outputs.tokens["r", 1] == expected_output([1, 2, 3], params, 1)
    assert len(outputs.tokens["r", 0]) == 1
    assert_whole(engine)
    engine.add_request("r", [1], greedy(max_tokens=1))


def test_a_step_that_fails_leaks_no_block_and_the_engine_can_go_on():
    engine, model = make_engine(budget=8)
    engine.add_request("a", [1] * 20, greedy(n=2))
    engine.step()
    model.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    model.fail = False
    assert_whole(engine)
    engine.add_request("a", [1] * 20, greedy(max_tokens=5))
    assert run(engine).tokens["a", 0] == expected_output([1] * 20, greedy(max_tokens=5))


def test_a_step_that_fails_spares_a_request_that_took_over_the_id_of_one_of_its_own():
    engine, model = make_engine(overlaps=True)
    engine.add_request("a", [1] * 20, greedy())
    engine.step()
    engine.abort("a")
    engine.add_request("a", [2] * 9, greedy(max_tokens=5))
    # What is new waits behind a step of the old one that was launched and fails when it is fetched.
    engine.scheduler.max_num_seqs = 0
    model.fail = model.late = True
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    engine.scheduler.max_num_seqs = 8
    model.fail = False
    assert run(engine).tokens["a", 0] == expected_output([2] * 9, greedy(max_tokens=5))
    assert_whole(engine)


def test_a_stop_token_ends_the_sample_and_is_named():
    engine, _ = make_engine()
    tokens = expected_output([1, 2], greedy(max_tokens=8))
    stop = tokens[3]
    engine.add_request("r", [1, 2], greedy(max_tokens=8, stop_token_ids=[stop]))
    news = []
    while engine.has_unfinished():
        news += engine.step()
    cut = tokens.index(stop) + 1
    assert [output.tokens[0].token_id for output in news] == tokens[:cut]
    assert (news[-1].tokens[0].finish_reason, news[-1].tokens[0].stop_reason) == ("stop", stop)


def test_end_of_sequence_ends_the_sample_without_a_stop_reason():
    engine, _ = make_engine()
    seed = next(s for s in range(256) if checksum([1], s, 0) % VOCAB == EOS)
    engine.add_request("r", [1], greedy(seed=seed, ignore_eos=False))
    last = engine.step()[-1].tokens[0]
    assert (last.token_id, last.finish_reason, last.stop_reason) == (EOS, "stop", None)


def test_without_max_tokens_a_sample_may_fill_the_context():
    engine, _ = make_engine(max_model_len=40)
    engine.add_request("r", [1] * 10, greedy(max_tokens=None))
    outputs = run(engine)
    assert len(outputs.tokens["r", 0]) == 30
    assert outputs.reasons["r", 0] == "length"


def test_a_request_without_a_seed_gets_one_from_the_engine_that_does_not_depend_on_others():
    def seeds(count: int) -> list[int]:
        engine, _ = make_engine(max_num_seqs=2)
        for number in range(count):
            engine.add_request(str(number), [1, 2], greedy(seed=None))
        return [s.request.seed for s in engine.scheduler.waiting]

    assert seeds(4)[:2] == seeds(2)
    assert len(set(seeds(4))) == 4


@pytest.mark.parametrize(
    ("prompt", "fields", "message", "param", "code"),
    [
        ([], {}, "The prompt is empty", "prompt", None),
        (
            [1] * 64,
            {},
            "it has 64 tokens, and this model's maximum context length is 64 tokens. Shorten it to "
            "at most 63.",
            "prompt",
            "context_length_exceeded",
        ),
        (
            [1] * 60,
            {"max_tokens": 5},
            "max_tokens=5 does not fit: the prompt has 60 tokens, and this model's maximum context "
            "length is 64 tokens. Ask for at most 4.",
            "max_tokens",
            "context_length_exceeded",
        ),
        (
            [1] * 60,
            {"max_tokens": None, "min_tokens": 5},
            "min_tokens=5 does not fit",
            "min_tokens",
            "context_length_exceeded",
        ),
        ([1, 50], {}, "token id 50 is not in this model's vocabulary, 0 to 49", "prompt", None),
        ([1, -1], {}, "token id -1 is not", "prompt", None),
        ([1], {"stop_token_ids": [50]}, "stop_token_ids: token id 50", "stop_token_ids", None),
        ([1], {"logit_bias": {70: 1.0}}, "logit_bias: token id 70", "logit_bias", None),
        ([1], {"n": 9}, "n=9 is more than this engine runs at once: ask for at most 8", "n", None),
        ([1], {"best_of": 9}, "best_of=9 is more than", "best_of", None),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    prompt: list[int], fields: dict[str, object], message: str, param: str, code: str | None
):
    engine, _ = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.add_request("r", prompt, greedy(**{"max_tokens": 1, **fields}))
    assert message in str(caught.value)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not engine.has_unfinished()


def test_a_request_id_in_use_is_refused():
    engine, _ = make_engine()
    engine.add_request("r", [1], greedy())
    with pytest.raises(RequestError, match="request_id='r' is in use"):
        engine.add_request("r", [1], greedy())
