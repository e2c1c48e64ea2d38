"""Tokens to deltas: text, stop strings, log-probabilities, best_of. One letter is one token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cuengine.detokenizer import TextRules
from cuengine.errors import RequestError
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import EngineOutput, Logprob, RequestDelta, SequenceDelta, TokenOutput
from cuengine.sampling_params import SamplingParams

EOS = 0


class Letters:
    """Token i is the byte i; 0 is special. 1 is a token of several letters."""

    special_ids = frozenset({EOS})
    text_rules = TextRules()

    def __contains__(self, token_id: object) -> bool:
        return isinstance(token_id, int) and 0 <= token_id < 256

    def token_bytes(self, token_id: int) -> bytes:
        return b"xENDy" if token_id == 1 else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in shown).decode(errors="replace")


class Bench:
    """A processor with one request, and what it told the engine."""

    def __init__(self, *, tokenizer: Letters | None = None, **fields: object) -> None:
        self.ended: list[tuple[str, int]] = []
        self.processor = OutputProcessor(
            Letters() if tokenizer is None else tokenizer,
            lambda request_id, index: self.ended.append((request_id, index)),
        )
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        self.processor.add_request("r", [65], params)

    def push(self, *tokens: TokenOutput) -> RequestDelta | None:
        deltas = self.processor.process([EngineOutput("r", list(tokens))])
        return deltas[0] if deltas else None

    def say(self, text: str, reason: str | None = None) -> list[SequenceDelta]:
        """One letter a step; `reason` ends the sample with the last letter."""
        found = []
        for i, byte in enumerate(text.encode()):
            last = i == len(text.encode()) - 1
            delta = self.push(TokenOutput(0, byte, None, reason if last else None))  # type: ignore[arg-type]
            assert delta is not None
            found += delta.sequences
        return found


def text_of(deltas: list[SequenceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_flows_at_once_and_max_tokens_ends_it():
    deltas = Bench().say("abc", "length")
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]


def test_half_a_character_waits_for_its_other_half():
    deltas = Bench().say("é!", "length")
    assert [delta.text for delta in deltas] == ["", "é", "!"]
    assert [delta.token_ids for delta in deltas] == [[0xC3], [0xA9], [ord("!")]]


def test_a_sample_that_ends_within_a_character_shows_a_replacement_for_it():
    bench = Bench()
    delta = bench.push(TokenOutput(0, 0xC3, None, "length"))
    assert delta is not None
    assert delta.sequences[0].text == "\ufffd"


def test_a_stop_string_ends_the_sample_and_the_engine_is_told_at_once():
    bench = Bench(stop=["END"])
    deltas = bench.say("abEND")
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")
    assert bench.ended == [("r", 0)]


def test_what_could_become_a_stop_string_is_held_back_and_shown_at_max_tokens():
    deltas = Bench(stop=["END"]).say("abEN", "length")
    assert [delta.text for delta in deltas] == ["a", "b", "", "EN"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)


def test_a_stop_string_that_ends_inside_a_token_trims_the_text_but_counts_the_token():
    bench = Bench(stop=["END"])
    delta = bench.push(TokenOutput(0, 1))
    assert delta is not None
    assert (delta.sequences[0].text, delta.sequences[0].token_ids) == ("x", [1])
    assert delta.finished


def test_a_stop_string_on_the_last_token_wins_over_max_tokens():
    bench = Bench(stop=["b"])
    deltas = bench.say("ab", "length")
    assert (text_of(deltas), deltas[-1].finish_reason) == ("a", "stop")
    assert bench.ended == []


def test_include_stop_str_in_output_keeps_the_stop_string():
    assert text_of(Bench(stop=["END"], include_stop_str_in_output=True).say("abEND")) == "abEND"


def test_the_token_that_ends_a_sample_is_in_its_ids_but_not_in_its_text():
    bench = Bench(stop_token_ids=[ord("!")])
    delta = bench.push(TokenOutput(0, ord("!"), None, "stop", ord("!")))
    assert delta is not None
    [sequence] = delta.sequences
    assert (sequence.text, sequence.token_ids) == ("", [ord("!")])
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", ord("!"))


def test_logprobs_name_their_tokens():
    bench = Bench(logprobs=1)
    delta = bench.push(TokenOutput(0, 97, {97: Logprob(-0.5, 2), 98: Logprob(-0.4, 1)}, "length"))
    assert delta is not None
    assert delta.sequences[0].logprobs == [{97: Logprob(-0.5, 2, "a"), 98: Logprob(-0.4, 1, "b")}]


def test_prompt_logprobs_come_with_the_first_delta_only():
    bench = Bench(prompt_logprobs=0)
    output = EngineOutput("r", [TokenOutput(0, 97)], [None, {65: Logprob(-1.0, 1)}], 0)
    [first] = bench.processor.process([output])
    assert first.prompt_logprobs == [None, {65: Logprob(-1.0, 1, "A")}]
    second = bench.push(TokenOutput(0, 98))
    assert second is not None
    assert second.prompt_logprobs is None


def test_a_request_is_finished_when_all_its_samples_are():
    bench = Bench(n=2)
    first = bench.push(TokenOutput(0, 97, None, "length"), TokenOutput(1, 98))
    second = bench.push(TokenOutput(1, 99, None, "length"))
    assert first is not None
    assert second is not None
    assert (first.finished, second.finished) == (False, True)
    assert [sequence.index for sequence in second.sequences] == [1]


def test_best_of_says_nothing_until_the_best_are_known():
    bench = Bench(n=2, best_of=3)

    def token(index: int, letter: str, logprob: float, last: bool) -> TokenOutput:
        entry = {ord(letter): Logprob(logprob, 1)}
        return TokenOutput(index, ord(letter), entry, "length" if last else None)

    assert (
        bench.push(token(0, "a", -9, True), token(1, "b", -1, False), token(2, "c", -1, False))
        is None
    )
    delta = bench.push(token(1, "B", -2, True), token(2, "C", -1, True))
    assert delta is not None
    assert delta.finished
    # Mean log-probabilities: -9, -1.5 and -1.
    assert [(s.index, s.text, s.logprobs) for s in delta.sequences] == [
        (0, "cC", None),
        (1, "bB", None),
    ]


def test_best_of_returns_the_log_probabilities_that_were_asked_for():
    bench = Bench(best_of=2, logprobs=0)
    entries = [{97: Logprob(-2.0, 3)}, {98: Logprob(-1.0, 1)}]
    delta = bench.push(
        TokenOutput(0, 97, entries[0], "length"), TokenOutput(1, 98, entries[1], "length")
    )
    assert delta is not None
    assert [s.logprobs for s in delta.sequences] == [[{98: Logprob(-1.0, 1, "b")}]]


def test_an_aborted_request_ends_with_a_delta_for_each_sample_that_ran():
    bench = Bench(n=2)
    bench.push(TokenOutput(0, 97, None, "length"), TokenOutput(1, 98))
    delta = bench.processor.abort("r")
    assert delta is not None
    assert delta.finished
    assert [(s.index, s.finish_reason) for s in delta.sequences] == [(1, "abort")]
    assert bench.processor.abort("r") is None
    assert bench.push(TokenOutput(1, 99)) is None


@pytest.mark.parametrize(
    ("said", "stop", "held"),
    [("abEN", ["END"], "EN"), ("ab", ["b\u0e44"], "b"), ("ab", ["x"], ""), ("ab\u0e44", [], "")],
)
def test_an_abort_brings_the_text_that_was_held_back_for_a_stop_string(
    said: str, stop: list[str], held: str
):
    bench = Bench(stop=stop)
    shown = "".join(delta.text for delta in bench.say(said))
    delta = bench.processor.abort("r")
    assert delta is not None
    assert delta.sequences[0].text == held
    assert shown + held == said
    assert delta.sequences[0].stop_reason is None


def test_without_a_tokenizer_there_is_no_text_and_stop_strings_are_refused():
    processor = OutputProcessor(None, lambda request_id, index: None)
    with pytest.raises(RequestError, match="stop strings need a tokenizer") as caught:
        processor.check_request(SamplingParams(stop=["x"]))
    assert caught.value.param == "stop"
    processor.add_request("r", [1], SamplingParams())
    [delta] = processor.process([EngineOutput("r", [TokenOutput(0, 97, None, "length")])])
    assert (delta.sequences[0].text, delta.sequences[0].token_ids) == ("", [97])


def several(text: str, **fields: object) -> tuple[Bench, SequenceDelta]:
    """What comes of several letters that one step drew, each with a log-probability."""
    bench = Bench(**fields)
    tokens = [TokenOutput(0, byte, {byte: Logprob(-1.0, 1)}) for byte in text.encode()]
    delta = bench.push(*tokens)
    assert delta is not None
    [news] = delta.sequences
    return bench, news


def test_tokens_of_one_step_are_one_delta():
    _, news = several("abc", logprobs=0)
    assert (news.text, news.token_ids, news.finish_reason) == ("abc", [97, 98, 99], None)
    assert news.logprobs is not None
    assert [list(entry) for entry in news.logprobs] == [[97], [98], [99]]


def test_a_stop_string_amid_the_tokens_of_one_step_ends_text_tokens_and_logprobs_alike():
    bench, news = several("abENDcd", stop=["END"], logprobs=0)
    assert (news.text, news.token_ids) == ("ab", list(b"abEND"))
    assert news.logprobs is not None
    assert len(news.logprobs) == 5
    assert (news.finish_reason, news.stop_reason) == ("stop", "END")
    assert bench.ended == [("r", 0)]


def test_a_stop_string_ahead_of_the_last_token_of_a_step_is_what_ended_the_sample():
    bench = Bench(stop=["E"])
    delta = bench.push(TokenOutput(0, ord("E")), TokenOutput(0, EOS, finish_reason="stop"))
    assert delta is not None
    assert delta.finished
    [news] = delta.sequences
    assert (news.token_ids, news.stop_reason) == ([ord("E")], "E")


def test_samples_of_one_step_keep_their_tokens_apart():
    bench = Bench(n=2)
    delta = bench.push(*(TokenOutput(i, byte) for i, byte in ((0, 97), (0, 98), (1, 99), (1, 100))))
    assert delta is not None
    assert [(news.index, news.text) for news in delta.sequences] == [(0, "ab"), (1, "cd")]
