"""Streamed text against whole decodes by the `tokenizers` package, and a plain oracle for stops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from cuengine.detokenizer import Detokenizer
from cuengine.model.tokenizer import Tokenizer, byte_characters

SMILE = "😀".encode()


def byte_level_tokenizer() -> FastTokenizer:
    """Ids 0-255 are the bytes; then some longer pieces, of which a few cut characters in two."""
    characters = byte_characters()
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [
        b"the",
        b" the",
        b" END",
        b"END",
        b"ND.",
        b"\xe0\xb8",
        b"\xb8\xa0\xe0",
        b"ok\xf0\x9f",
    ]
    pieces += ["é".encode(), "日本".encode(), SMILE, b"  ", b"\n\n"]
    vocabulary = {"".join(characters[b] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|bos|>")])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def sentencepiece_tokenizer() -> FastTokenizer:
    """Like LLaMA 2's: <unk>, <s>, </s>, 256 byte pieces, then text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "the", "▁END", "END", "ND.", "é", "日本", "😀", "a", "b", "."]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = FastTokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def wordpiece_tokenizer() -> FastTokenizer:
    pieces = ["[UNK]", "[SEP]", "un", "##aff", "##able", "the", "cat", ".", ",", "##s", "日"]
    tokenizer = FastTokenizer(
        models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens([AddedToken("[SEP]")])
    return tokenizer


def metaspace_tokenizer() -> FastTokenizer:
    pieces = ["<unk>", "</s>", "▁the", "▁", "▁▁", "cat", "s", "▁é", "日本"]
    tokenizer = FastTokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
WORDPIECE = wordpiece_tokenizer()
METASPACE = metaspace_tokenizer()
TOKENIZERS = {
    "byte-level": (BYTE_LEVEL, Tokenizer(BYTE_LEVEL)),
    "sentencepiece": (SENTENCEPIECE, Tokenizer(SENTENCEPIECE)),
    "wordpiece": (WORDPIECE, Tokenizer(WORDPIECE)),
    "metaspace": (METASPACE, Tokenizer(METASPACE)),
}


def stream(
    name: str, prompt: Sequence[int], output: Sequence[int], skip: bool = True
) -> tuple[list[str], str]:
    detokenizer = Detokenizer(TOKENIZERS[name][1], prompt, skip_special_tokens=skip)
    pushed = [detokenizer.push(token) for token in output]
    return pushed, "".join(pushed) + detokenizer.flush()


def piece_ids(name: str, *pieces: str | bytes) -> list[int]:
    """Ids of pieces by their spelling; bytes: the ids of the single bytes."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            ids += [byte + (3 if name == "sentencepiece" else 0) for byte in piece]
        else:
            token = TOKENIZERS[name][0].token_to_id(piece)
            assert token is not None, piece
            ids.append(token)
    return ids


def token_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, and as often runs of the bytes of valid and of broken UTF-8."""
    size = TOKENIZERS[name][0].get_vocab_size()
    any_ids = st.lists(st.integers(0, size - 1), max_size=12)
    if name not in ("byte-level", "sentencepiece"):
        return any_ids
    text = st.text(max_size=4).map(lambda text: piece_ids(name, text.encode()))
    cut = st.tuples(text, st.integers(0, 3)).map(lambda pair: pair[0][pair[1] :])
    return st.lists(st.one_of(any_ids, text, cut), max_size=5).map(
        lambda parts: list(chain.from_iterable(parts))
    )


def lacks_valid_bytes_in_broken_runs(ids: list[int]) -> bool:
    """Whether each run of SentencePiece byte tokens is UTF-8 throughout, or none of it is text.

    In other runs the `tokenizers` package replaces the good bytes along with the bad ones.
    """
    runs: list[bytearray] = [bytearray()]
    for token in ids:
        if token < 3:
            continue
        if token < 259:
            runs[-1].append(token - 3)
        else:
            runs.append(bytearray())
    for run in runs:
        text = run.decode("utf-8", "replace")
        if "\ufffd" in text and text.strip("\ufffd"):
            return False
    return True


@pytest.mark.parametrize("name", ["byte-level", "wordpiece", "metaspace"])
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_joined_stream_is_the_whole_decode(name: str, data: st.DataObject, skip: bool) -> None:
    output = data.draw(token_ids(name))
    whole = TOKENIZERS[name][0].decode(output, skip_special_tokens=skip)
    pushed, text = stream(name, [], output, skip)
    assert text == whole
    assert TOKENIZERS[name][1].decode(output, skip_special_tokens=skip) == whole
    shown = ""
    for part in pushed:
        shown += part
        assert whole.startswith(shown)


@given(output=token_ids("sentencepiece"), skip=st.booleans())
@settings(max_examples=600, deadline=None)
def test_a_sentencepiece_stream_is_the_whole_decode(output: list[int], skip: bool) -> None:
    whole = TOKENIZERS["sentencepiece"][1].decode(output, skip_special_tokens=skip)
    if lacks_valid_bytes_in_broken_runs(output):
        assert whole == SENTENCEPIECE.decode(output, skip_special_tokens=skip)
    pushed, text = stream("sentencepiece", [], output, skip)
    assert text == whole
    shown = ""
    for part in pushed:
        shown += part
        assert whole.startswith(shown)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_text_after_a_prompt_is_the_whole_decode_without_the_prompts(
    name: str, data: st.DataObject, skip: bool
) -> None:
    prompt = data.draw(token_ids(name))
    output = data.draw(token_ids(name))
    tokenizer = TOKENIZERS[name][1]
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    _, text = stream(name, prompt, output, skip)
    if whole.startswith(before):
        assert text == whole.removeprefix(before)
    else:  # the output completes a character
        settled = before.rstrip("\ufffd")
        assert whole.endswith(text)
        assert len(whole) - len(text) >= len(settled)
        assert set(whole[len(settled) : len(whole) - len(text)]) <= {"\ufffd"}


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    pushed, _ = stream("byte-level", [], [ord("x"), *SMILE, ord("y")])
    assert pushed == ["x", "", "", "", "😀", "y"]


def test_byte_tokens_become_text_as_soon_as_a_character_is_whole() -> None:
    pushed, _ = stream("sentencepiece", [], piece_ids("sentencepiece", "ภา".encode(), "a"))
    assert pushed == ["", "", "ภ", "", "", "า", "a"]


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    pushed, text = stream("byte-level", [], [ord("x"), *SMILE[:3]])
    assert pushed == ["x", "", "", ""]
    assert text == "x\ufffd"
    _, text = stream("sentencepiece", [], piece_ids("sentencepiece", "a", SMILE[:3]))
    assert text == "a\ufffd\ufffd\ufffd"


def test_a_character_that_began_in_the_prompt_belongs_to_the_output() -> None:
    assert stream("byte-level", [ord("x"), *SMILE[:2]], [*SMILE[2:], ord("y")])[1] == "😀y"


def test_half_a_character_left_in_the_prompt_is_not_shown_by_the_output() -> None:
    assert stream("byte-level", [ord("x"), *SMILE[:2]], [ord("y")])[1] == "y"
    assert stream("byte-level", [ord("x"), *SMILE[:2]], [])[1] == ""


def test_the_first_space_goes_only_at_the_very_start_of_a_text() -> None:
    the = piece_ids("sentencepiece", "▁the")
    bos = piece_ids("sentencepiece", "<s>")
    assert stream("sentencepiece", [], the + the)[1] == "the the"
    assert stream("sentencepiece", bos, the + the)[1] == "the the"
    assert stream("sentencepiece", bos + the, the + the)[1] == " the the"
    assert stream("sentencepiece", bos, the, skip=False)[1] == " the"


def test_wordpieces_join_the_word_in_front_of_them_even_across_the_prompt() -> None:
    prompt = piece_ids("wordpiece", "the", "un", "##aff")
    output = piece_ids("wordpiece", "##able", "[SEP]", "cat", "##s", ".")
    assert stream("wordpiece", prompt, output)[1] == "able cats."


def test_special_tokens_show_only_where_asked_for() -> None:
    ids = piece_ids("byte-level", "the", "<|end|>", "the")
    assert stream("byte-level", [], ids)[1] == "thethe"
    assert stream("byte-level", [], ids, skip=False)[1] == "the<|end|>the"


def test_an_added_token_that_is_not_special_shows() -> None:
    assert stream("byte-level", [], piece_ids("byte-level", "<tool call>"))[1] == "<tool call>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_beyond_the_vocabulary_have_no_text(name: str) -> None:
    first = TOKENIZERS[name][0].get_vocab_size() + 7
    known = 5 if name not in ("byte-level", "sentencepiece") else 65
    assert stream(name, [first], [first, known, first])[1] == stream(name, [], [known])[1]


def test_a_long_prompt_is_not_read_to_its_beginning() -> None:
    class Counting(list[int]):
        def __init__(self, ids: Sequence[int]) -> None:
            super().__init__(ids)
            self.reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().__getitem__(index)

        def __reversed__(self):  # type: ignore[no-untyped-def]
            return (self[i] for i in range(len(self) - 1, -1, -1))

    prompt = Counting(piece_ids("sentencepiece", "▁the") * 10_000)
    detokenizer = Detokenizer(TOKENIZERS["sentencepiece"][1], prompt, skip_special_tokens=True)
    assert detokenizer.push(prompt[0]) == " the"
    assert prompt.reads < 20


def with_stops(
    text: str,
    stop: Sequence[str],
    *,
    cut: Sequence[int] | None = None,
    include: bool = False,
    min_tokens: int = 0,
) -> tuple[list[str], str, str | None]:
    """Feeds `text` byte by byte, or the given ids: what was pushed, the rest, the stop reason."""
    ids = list(text.encode()) if cut is None else cut
    detokenizer = Detokenizer(
        TOKENIZERS["byte-level"][1],
        [],
        skip_special_tokens=True,
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    pushed = [detokenizer.push(token) for token in ids]
    return pushed, detokenizer.flush(), detokenizer.stop_reason


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Oracle: where and by which stop string the text ends; first end, then the longest."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return end, max(hits, key=len)
    return None


def longest_possible_beginning(text: str, stop: Sequence[str]) -> int:
    return max(n for s in stop for n in range(len(s)) if n <= len(text) and text.endswith(s[:n]))


STOP_ALPHABET = "abé"


@given(
    text=st.text(STOP_ALPHABET, max_size=30),
    stop=st.lists(st.text(STOP_ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=1500, deadline=None)
def test_stop_strings_end_the_text_where_a_search_of_the_whole_text_says(
    text: str, stop: list[str], include: bool
) -> None:
    pushed, rest, reason = with_stops(text, stop, include=include)
    found = first_stop(text, stop)
    if found is None:
        assert reason is None
        assert "".join(pushed) + rest == text
    else:
        end, which = found
        assert reason == which
        assert "".join(pushed) + rest == text[: end if include else end - len(which)]


@given(
    text=st.text(STOP_ALPHABET, max_size=30),
    stop=st.lists(st.text(STOP_ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=800, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    found = first_stop(text, stop)
    text = text[: found[0] - 1] if found else text
    pushed, rest, _ = with_stops(text, stop)
    assert "".join(pushed) == text[: len(text) - longest_possible_beginning(text, stop)]
    assert "".join(pushed) + rest == text


def test_text_that_cannot_begin_a_stop_string_flows_at_once() -> None:
    pushed, _, _ = with_stops("one two", ["\n\nUser:"])
    assert pushed == list("one two")


def test_a_stop_string_that_spans_tokens_is_found_and_its_beginning_never_shown() -> None:
    pushed, rest, reason = with_stops("", ["END."], cut=piece_ids("byte-level", "the", b"E", "ND."))
    assert (pushed, rest, reason) == (["the", "", ""], "", "END.")


def test_a_stop_string_that_ends_inside_a_token_cuts_the_rest_of_the_token() -> None:
    cut = piece_ids("byte-level", b"x", "ND.")
    assert with_stops("", ["N"], cut=cut) == (["x", ""], "", "N")
    assert with_stops("", ["N"], cut=cut, include=True) == (["x", "N"], "", "N")


def test_nothing_comes_after_a_stop_string() -> None:
    pushed, rest, _ = with_stops("a.bc", ["."])
    assert (pushed, rest) == (["a", "", "", ""], "")


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    pushed, _, reason = with_stops("say the end", ["end", "the end"])
    assert ("".join(pushed), reason) == ("say ", "the end")


def test_of_several_stop_strings_the_one_that_ends_first_counts() -> None:
    pushed, _, reason = with_stops("abcdef", ["abcdef", "cd"])
    assert ("".join(pushed), reason) == ("ab", "cd")


def test_a_held_back_beginning_is_shown_when_the_sample_ends() -> None:
    assert with_stops("a\n\nUs", ["\n\nUser:"])[1] == "\n\nUs"


def test_a_stop_string_can_complete_with_the_replacement_of_a_broken_end() -> None:
    pushed, rest, reason = with_stops("", ["a\ufffd"], cut=[ord("a"), SMILE[0]])
    assert (pushed, rest, reason) == (["", ""], "", "a\ufffd")


def test_stop_strings_within_the_first_min_tokens_are_plain_text() -> None:
    pushed, rest, reason = with_stops("a.b.c", ["."], min_tokens=2)
    assert ("".join(pushed) + rest, reason) == ("a.b", ".")


def test_a_stop_string_may_begin_within_the_first_min_tokens() -> None:
    pushed, rest, reason = with_stops("xab", ["ab"], min_tokens=2)
    assert ("".join(pushed) + rest, reason) == ("x", "ab")


def test_a_stop_string_that_begins_in_the_prompt_does_not_count() -> None:
    detokenizer = Detokenizer(
        TOKENIZERS["byte-level"][1], list(b"the e"), skip_special_tokens=True, stop=["end"]
    )
    assert [detokenizer.push(byte) for byte in b"nd"] == ["n", "d"]
    assert detokenizer.stop_reason is None
