"""What is kept of a request, and whom an engine may be at work on when it ends."""

from __future__ import annotations

import asyncio
from typing import Any

from cuengine.flights import Flight, Roster
from cuengine.outputs import EngineOutput, TokenOutput
from cuengine.sampling_params import BeamSearchParams, SamplingParams
from cuengine.sequence import Progress
from cuengine.structured_outputs import StructuredOutputsParams
from cuengine.wire import Add, AddBeams, Launching


def flight(name: str = "r", *, samples: int = 1, **fields: Any) -> Flight:
    params = SamplingParams(n=samples, **fields)
    return Flight(name, [7, 8], params, 0, None, [[] for _ in range(samples)], asyncio.Queue())


def seated(roster: Roster, *names: str) -> list[Flight]:
    """In the engine's queue, with "0", "1", ... as keys."""
    flights = [flight(name) for name in names]
    for one in flights:
        roster.put(roster.next_key(), one)
        one.admitted = True
    return flights


def test_a_request_goes_on_with_what_each_of_its_samples_has_got():
    one = flight(samples=3)
    assert one.add("1") == Add("1", [7, 8], one.params)
    first = EngineOutput("1", [TokenOutput(i, 5 + i) for i in range(3)], num_cached_tokens=16)
    one.record(first)
    one.record(EngineOutput("1", [TokenOutput(0, 9), TokenOutput(2, 2, finish_reason="stop")]))
    assert one.add("2") == Add("2", [7, 8], one.params, progress=Progress([[5, 9], [6], None], 16))


def test_what_comes_of_a_sample_that_was_ended_is_nobodys():
    one = flight(samples=2)
    one.record(EngineOutput("1", [TokenOutput(0, 5), TokenOutput(1, 6)]))
    one.outputs[0] = None  # its text came to a stop string
    one.record(EngineOutput("1", [TokenOutput(0, 9), TokenOutput(1, 9)]))
    assert one.outputs == [None, [6, 9]]


def test_a_beam_search_begins_anew():
    one = Flight("r", [7], BeamSearchParams(2, 5), 1, "salt", [[]], asyncio.Queue())
    assert one.add("1") == AddBeams("1", [7], one.params, 1, "salt")


def test_news_of_a_request_is_due_unless_its_grammar_is_still_compiled():
    assert flight().promised
    waiting = flight(structured_outputs=StructuredOutputsParams(regex="a"))
    assert not waiting.promised
    waiting.admitted = True
    assert waiting.promised


def test_keys_are_not_used_twice_and_those_taken_off_are_not_found():
    roster = Roster()
    one, two = seated(roster, "one", "two")
    assert roster.find("0") is one
    roster.take_off(one)
    assert roster.find("0") is None
    assert (one.key, one.admitted) == (None, False)
    roster.clear()
    assert not len(roster)
    assert two.key is None
    assert roster.next_key() == "2"


def test_the_batch_is_that_of_the_steps_begun_and_not_completed():
    roster = Roster()
    seated(roster, "a", "b", "c")
    assert roster.batch() == []
    roster.launched(Launching(1, ["0", "1"]))
    assert roster.batch() == ["0", "1"]
    roster.completed(1)  # the second step runs the same
    assert roster.batch() == ["0", "1"]
    roster.launched(Launching(3, ["2"]))  # begun before the second was completed
    assert roster.batch() == ["0", "1", "2"]
    roster.completed(2)
    assert roster.batch() == ["2"]
    roster.clear()
    assert roster.batch() == []
    assert roster.num_steps == 0


def test_who_is_on_the_way_into_the_engines_queue_belongs_to_its_batch():
    roster = Roster()
    seated(roster, "a")
    roster.launched(Launching(1, ["0"]))
    coming = flight("b")
    roster.put(roster.next_key(), coming)
    assert roster.batch() == ["0", "1"]
    coming.admitted = True
    assert roster.batch() == ["0"]


def test_one_that_was_taken_back_still_keeps_another_from_being_alone():
    roster = Roster()
    gone, _ = seated(roster, "gone", "stays")
    roster.launched(Launching(1, ["0", "1"]))
    roster.take_off(gone)
    assert roster.batch() == ["0", "1"]
