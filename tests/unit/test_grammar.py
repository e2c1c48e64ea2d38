"""Grammars: what may come next, token by token; compiling, caching, and what cannot be followed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

import cuengine.grammar as grammar_module
from cuengine import RequestError, StructuredOutputsParams, grammar_schema
from cuengine.batch import UInt32
from cuengine.grammar import (
    CACHED_GRAMMARS,
    Grammar,
    GrammarCompiler,
    MaskRow,
    Matcher,
    allowed_mask,
)
from cuengine.grammar_errors import FORMATS
from cuengine.model.tokenizer import Tokenizer, byte_characters

EOS = 260
SPECIAL = "<|end|>"
OTHER_SPECIAL = "<|tool|>"
VOCAB = 264
"""Rows of the model's logits: two more than there are tokens."""


def byte_level() -> Tokenizer:
    """Byte b is token b; 256 "th", 257 "the", 258 '":', 259 " a"; 260 and 261 special."""
    letters = byte_characters()
    merged = {"th": 256, "the": 257, '":': 258, f"{letters[32]}a": 259}
    vocabulary = {letters[byte]: byte for byte in range(256)} | merged
    merges = [("t", "h"), ("th", "e"), ('"', ":"), (letters[32], "a")]
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (SPECIAL, OTHER_SPECIAL)
    tokenizer.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    return Tokenizer(tokenizer)


def sentencepiece() -> Tokenizer:
    """<unk>; byte b is token b + 1; words, with the space that begins a text or without; </s>."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *'theé{}"', "▁", "▁t", "▁th"]
    pieces += ["th", "the", "▁the", "</s>"]
    merges = [("▁", "t"), ("▁t", "h"), ("t", "h"), ("th", "e"), ("▁th", "e")]
    tokenizer = FastTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    names = ("<unk>", "</s>")
    tokenizer.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    return Tokenizer(tokenizer)


TOKENIZER = byte_level()


COMPILER = GrammarCompiler(TOKENIZER, VOCAB, {EOS})


def compiled(**fields: Any) -> Grammar:
    return COMPILER.compile(StructuredOutputsParams(**fields))


def tokens_in(mask: UInt32) -> set[int]:
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def allowed(matcher: Matcher, forbidden: set[int] | None = None) -> set[int]:
    masks = allowed_mask([MaskRow(matcher, frozenset(forbidden or ()))])
    assert masks is not None
    assert masks.shape == (1, -(-VOCAB // 32))
    assert masks.dtype == np.uint32
    return tokens_in(masks[0])


def follow(matcher: Matcher, text: str) -> str | None:
    """Consume the text byte by byte; why it ends, if it does with the last one."""
    ending = None
    for byte in text.encode():
        assert ending is None
        assert byte in allowed(matcher)
        ending = matcher.consume(byte)
    return ending


def first_text(matcher: Matcher) -> tuple[str, str | None]:
    """The text that taking the longest allowed token at each position gives, and why it ends."""
    data = b""
    while True:
        token = max(allowed(matcher), key=lambda token: (len(TOKENIZER.token_bytes(token)), -token))
        ending = matcher.consume(token)
        if token != EOS:
            data += TOKENIZER.token_bytes(token)
        if ending is not None:
            return data.decode(), ending


words = st.text(st.sampled_from('the a":é🎉<|>\n\\'), min_size=1, max_size=6)


@given(choices=st.lists(words, min_size=1, max_size=4), data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_choice_allows_just_what_goes_on_to_one_of_the_texts(
    choices: list[str], data: st.DataObject
) -> None:
    """The oracle compares bytes. Where only one text is left, its own tokens may be forced."""
    texts = [choice.encode() for choice in choices]
    matcher = compiled(choice=choices).matcher()
    done = b""
    while True:
        expected = {
            token
            for token in range(TOKENIZER.vocab_size)
            if token not in TOKENIZER.special_ids
            and any(text.startswith(done + TOKENIZER.token_bytes(token)) for text in texts)
        } | ({EOS} if done in texts else set())
        possible = allowed(matcher)
        assert possible <= expected
        assert possible == expected or len(possible) == 1
        token = data.draw(st.sampled_from(sorted(possible)))
        ending = matcher.consume(token)
        if token != EOS:
            done += TOKENIZER.token_bytes(token)
        longer = any(text != done and text.startswith(done) for text in texts)
        assert (ending == "stop") == (token == EOS or (done in texts and not longer))
        assert matcher.complete == (ending == "stop" and token != EOS)
        if ending is not None:
            assert done in texts
            return


@pytest.mark.parametrize("name", [SPECIAL, OTHER_SPECIAL])
def test_the_name_of_a_special_token_is_spelled_and_not_that_token(name: str) -> None:
    matcher = compiled(choice=[name]).matcher()
    assert follow(matcher, name) == "stop"
    schema = {"const": {"a": name}}
    matcher = compiled(json=schema, disable_any_whitespace=True).matcher()
    assert first_text(matcher) == (f'{{"a":"{name}"}}', "stop")


def test_a_special_token_may_be_drawn_where_a_grammar_names_it() -> None:
    matcher = compiled(grammar=f'start: {OTHER_SPECIAL} "a"').matcher()
    assert allowed(matcher) == {261}
    assert matcher.consume(261) is None
    assert allowed(matcher) == {ord("a")}


def test_forced_text_comes_as_the_tokens_that_the_model_has_for_it() -> None:
    matcher = compiled(regex="say the").matcher()
    taken = []
    for _ in range(5):
        (token,) = allowed(matcher)
        taken.append(token)
        matcher.consume(token)
    assert taken == TOKENIZER.encode("say the") == [*b"say ", 257]


def test_sentencepiece_tokens_are_taken_for_the_text_they_add() -> None:
    tokenizer = sentencepiece()
    (eos,) = tokenizer.encode("</s>", add_special_tokens=False)[-1:]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {eos})
    for text in ('the the{"é"}', "é th", " the"):
        matcher = compiler.compile(StructuredOutputsParams(choice=[text])).matcher()
        ids: list[int] = []
        ending = None
        while ending is None:
            possible = allowed_mask([MaskRow(matcher)])
            assert possible is not None
            ids.append(
                min(tokens_in(possible[0]), key=lambda i: (-len(tokenizer.token_bytes(i)), i))
            )
            ending = matcher.consume(ids[-1])
        assert ending == "stop"
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    # Not one byte after the other: words are words.
    assert len(ids) < len(text)


def test_tokens_that_the_tokenizer_lacks_or_the_model_lacks_are_never_allowed() -> None:
    matcher = compiled(regex="(?s).*").matcher()
    assert max(allowed(matcher)) == EOS
    small = GrammarCompiler(TOKENIZER, 200, {0})
    masks = allowed_mask(
        [MaskRow(small.compile(StructuredOutputsParams(regex="(?s).*")).matcher())]
    )
    assert masks is not None
    # ASCII, and the bytes below 200 that begin a longer character.
    assert tokens_in(masks[0]) == {*range(128), *range(0xC2, 200)}


def test_a_model_with_no_end_token_ends_where_the_grammar_does() -> None:
    compiler = GrammarCompiler(TOKENIZER, 256, ())  # a whole number of words: no room for another
    masks = allowed_mask([None])
    assert masks is None
    matcher = compiler.compile(StructuredOutputsParams(regex="a{1,2}")).matcher()
    for ending in (None, "stop"):
        masks = allowed_mask([MaskRow(matcher)])
        assert masks is not None
        assert masks.shape == (1, 8)
        assert tokens_in(masks[0]) == {ord("a")}
        assert matcher.consume(ord("a")) == ending


def test_forks_go_their_own_ways() -> None:
    grammar = compiled(choice=["abc", "abd", "x"])
    one = grammar.matcher()
    follow(one, "ab")
    two = one.fork()
    assert follow(one, "c") == "stop"
    assert allowed(two) == {ord("c"), ord("d")}
    assert allowed(grammar.matcher()) == {ord("a"), ord("x")}


def test_a_rollback_takes_back_the_last_tokens_and_the_end() -> None:
    matcher = compiled(choice=["abc", "abd"]).matcher()
    assert follow(matcher, "abc") == "stop"
    matcher.rollback(1)
    assert not matcher.complete
    assert allowed(matcher) == {ord("c"), ord("d")}
    matcher.rollback(2)
    matcher.rollback(0)
    assert follow(matcher, "abd") == "stop"


@given(draft=st.text(st.sampled_from("abcx"), max_size=5))
@settings(deadline=None, max_examples=40)
def test_masks_along_a_draft_are_those_met_one_by_one(draft: str) -> None:
    grammar = compiled(regex="a(b|cc)*x")
    matcher, walker = grammar.matcher(), grammar.matcher()
    tokens = draft.encode()
    masks = allowed_mask([MaskRow(matcher, (), tokens[:i]) for i in range(len(tokens) + 1)])
    assert masks is not None
    assert masks.shape == (len(draft) + 1, -(-VOCAB // 32))
    for i, byte in enumerate([*draft.encode(), None]):
        possible = allowed(walker)
        assert tokens_in(masks[i]) == possible
        if byte is None or byte not in possible or walker.consume(byte) == "stop":
            break
    assert allowed(matcher) == {ord("a")}


def test_forbidden_tokens_are_left_out_unless_there_are_no_others() -> None:
    matcher = compiled(regex="ab?").matcher()
    matcher.consume(ord("a"))
    assert allowed(matcher) == {ord("b"), EOS}
    assert allowed(matcher, {EOS}) == {ord("b")}
    assert allowed(matcher, {EOS, ord("b")}) == {ord("b"), EOS}


@pytest.mark.parametrize("num_rows", [3, 40])
def test_rows_without_a_grammar_allow_all_and_others_are_as_if_alone(num_rows: int) -> None:
    """With 40 rows they are computed on several threads."""
    matchers = [compiled(regex=f"[{chr(97 + i % 20)}-z]").matcher() for i in range(num_rows)]
    rows = [None if i % 3 == 1 else MaskRow(matcher) for i, matcher in enumerate(matchers)]
    masks = allowed_mask(rows)
    assert masks is not None
    for i, mask in enumerate(masks):
        if i % 3 == 1:
            assert (mask == 0xFFFFFFFF).all()
        else:
            assert tokens_in(mask) == set(range(97 + i % 20, 123))


def test_rows_of_one_matcher_have_one_mask() -> None:
    matcher = compiled(choice=["a", "b"]).matcher()
    masks = allowed_mask([None, MaskRow(matcher), MaskRow(matcher), MaskRow(matcher)])
    assert masks is not None
    assert all(tokens_in(mask) == {97, 98} for mask in masks[1:])


def test_a_token_that_the_grammar_refuses_is_the_samples_error() -> None:
    matcher = compiled(choice=["abc"]).matcher()
    assert matcher.problem == ""
    assert matcher.consume(ord("x")) == "error"
    assert matcher.consume(ord("a")) == "error"
    assert matcher.problem


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"json": {"type": "array", "items": {"type": "integer"}}}, "[1, 22]"),
        ({"json": json.dumps({"enum": ["é", 2]})}, '"é"'),
        ({"json": {"properties": {"a": {"type": "null"}}, "type": "object"}}, '{\n  "a": null\n}'),
        ({"json_object": True}, '{"a": [{"b": -1.5e3}], "ü": "\\n"}'),
        ({"regex": r"\d{3}-(a|b)"}, "123-b"),
        ({"choice": ["yes", "no\n\"'\\"]}, "no\n\"'\\"),
        ({"grammar": 'start: "a" b+\nb: /[xy]/ ";"'}, "ax;y;"),
        ({"grammar": 'root ::= "a" b\nb ::= [0-9] "!"'}, "a7!"),
        ({"json_object": True, "disable_any_whitespace": True}, '{"a":1}'),
        ({"json_object": True, "whitespace_pattern": "_?"}, '{_"a":_1}'),
    ],
)  # fmt: skip
def test_each_kind_takes_a_text_of_its_own(fields: dict[str, Any], text: str) -> None:
    matcher = compiled(**fields).matcher()
    assert follow(matcher, text) == "stop" or EOS in allowed(matcher)


@pytest.mark.parametrize("spaces", ["  ", "\n\n", "\n" + " " * 41])
def test_white_space_between_the_tokens_of_json_has_an_end(spaces: str) -> None:
    matcher = compiled(json_object=True).matcher()
    follow(matcher, "{" + spaces[:-1])
    assert ord(spaces[-1]) not in allowed(matcher)


ANY_DEPTH: Any = {"type": "string"}
for _ in range(2000):
    ANY_DEPTH = [ANY_DEPTH]


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"json": "{"}, "json", "not JSON: Expecting property name"),
        ({"json": "[1]"}, "json", "not a JSON object"),
        ({"json": "true"}, "json", "not a JSON object: true"),
        ({"json": '"{}"'}, "json", 'not a JSON object: "{}"'),
        ({"json": {"type": "objec"}}, "json", "type 'objec' is none of string"),
        ({"json": {"properties": {"a": {"items": {"type": 3}}}}}, "json.properties.a.items",
         "type"),
        ({"json": {"anyOf": [{"type": "string"}, {"pattern": "a("}]}}, "json.anyOf[1]",
         "unclosed group"),
        ({"json": {"properties": {"a": {"$ref": "#/$defs/b"}},
                   "$defs": {"ok": {}, "b": {"prefixItems": [{}, {"format": "?"}]}}}},
         "json.$defs.b.prefixItems[1]", "format '?' is not supported: use pattern, or one of date"),
        ({"json": {"properties": {"a": {"$ref": "#/$defs/b"}}}}, "json.properties.a",
         "'#/$defs/b' is not in the schema"),
        ({"json": {"items": {"uniqueItems": True}}}, "json.items",
         "'uniqueItems' is not supported: leave it out"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "json",
         "nothing can match it: required property"),
        ({"json": {"enum": []}}, "json", "nothing can match it: it has no alternatives"),
        ({"json": {"$ref": "#"}}, "json", "nothing can match it"),
        ({"json": {"$ref": "https://example.org/x"}}, "json", "is not fetched: put"),
        ({"json": {"enum": [float("nan")]}}, "json", "not JSON"),
        ({"json": {"const": "\ud800"}}, "json", "not Unicode"),
        ({"json": {"const": ANY_DEPTH}}, "json", "recursion"),
        ({"regex": "a(b"}, "regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"regex": "a\\"}, "regex", "an escape ends early"),
        ({"json": {"items": {"pattern": "a\\\\\\"}}}, "json.items.pattern", "an escape ends early"),
        ({"json": {"patternProperties": {"\\": {}}}}, "json.patternProperties.\\",
         "an escape ends early"),
        ({"json": {"properties": {"a": {"minimum": 1e300}}}}, "json.properties.a.minimum",
         "1e+300 is out of reach"),
        ({"grammar": 'start: "a"\n| %json {"items": {"const": 9007199254740993}}'}, "grammar",
         "at 2(3): %json.items.const: 9007199254740993 is no number that a float holds"),
        ({"regex": "\udfff"}, "regex", "not Unicode"),
        ({"choice": ["\ud800"]}, "choice", "not Unicode"),
        ({"grammar": "start: x"}, "grammar", 'unknown name: "x"'),
        ({"grammar": 'root ::= "a'}, "grammar", "neither Lark nor GBNF"),
        ({"json_object": True, "whitespace_pattern": "["}, "whitespace_pattern", "unclosed"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_place(
    fields: dict[str, Any], param: str, why: str
) -> None:
    for _ in range(2):  # an error is not cached as anything else
        with pytest.raises(RequestError) as caught:
            compiled(**fields)
        assert caught.value.param == f"structured_outputs.{param}"
        assert str(caught.value).startswith(f"structured_outputs.{param}: ")
        assert why in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json": True}, "structured_outputs.json"),
        ({"json": False}, "structured_outputs.json"),
        ({"json": 0}, "structured_outputs.json"),
        ({"json": [{}]}, "structured_outputs.json"),
        ({"regex": False}, "structured_outputs.regex"),
        ({"regex": b"a"}, "structured_outputs.regex"),
        ({"grammar": ["a"]}, "structured_outputs.grammar"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"json": ""}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"grammar": " \n"}, "structured_outputs.grammar"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"json_object": "yes"}, "structured_outputs.json_object"),
        ({"json_object": True, "whitespace_pattern": 1}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_exactly_one_demand_of_the_right_type_is_needed(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == param


class Slow:
    """Stands in for what compiles: waits to be released, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inner = grammar_module._start
        self.release = threading.Event()
        self.calls = 0
        monkeypatch.setattr(grammar_module, "_start", self)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        assert self.release.wait(30)
        return self.inner(*args)


def test_equal_demands_are_compiled_once_however_many_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, slow = GrammarCompiler(TOKENIZER, VOCAB, {EOS}), Slow(monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        params = [StructuredOutputsParams(json={"const": "once"}) for _ in range(4)]
        found = [threads.submit(compiler.compile, one) for one in params]
        other = StructuredOutputsParams(json='{"const": "once"}')  # another key
        slow.release.set()
        assert len({id(future.result()) for future in found}) == 1
        assert compiler.compile(other) is not found[0].result()
    assert slow.calls == 2


def test_the_longest_unused_grammar_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, slow = GrammarCompiler(TOKENIZER, VOCAB, {EOS}), Slow(monkeypatch)
    slow.release.set()
    params = [StructuredOutputsParams(regex=f"lru{i}") for i in range(CACHED_GRAMMARS + 1)]
    for one in params[:-1]:
        compiler.compile(one)
    compiler.compile(params[0])
    compiler.compile(params[-1])
    assert slow.calls == CACHED_GRAMMARS + 1
    compiler.compile(params[0])
    assert slow.calls == CACHED_GRAMMARS + 1
    compiler.compile(params[1])
    assert slow.calls == CACHED_GRAMMARS + 2


def test_the_real_vocabulary_spells_a_schemas_texts(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {2})
    value = {"größe": ["東京", "<|im_end|>", 'say "hi"'], "🎉": -1.5}
    matcher = compiler.compile(StructuredOutputsParams(json={"const": value})).matcher()
    ids: list[int] = []
    ending = None
    while ending is None:
        masks = allowed_mask([MaskRow(matcher)])
        assert masks is not None
        longest = max(tokens_in(masks[0]), key=lambda i: (len(tokenizer.token_bytes(i)), -i))
        ids.append(longest)
        ending = matcher.consume(longest)
    assert json.loads(tokenizer.decode(ids)) == value
    assert not tokenizer.special_ids & set(ids)


def chain(length: int, link: Callable[[str], Any]) -> dict[str, Any]:
    """A schema that refers to a schema that refers to a schema ..."""
    defs: dict[str, Any] = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$defs": defs | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


RULES = "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(9000)) + 'r9000: "z"'


@pytest.mark.parametrize(
    "demand",
    [
        {"json": chain(3000, lambda to: {"type": "object", "properties": {"a": {"$ref": to}}})},
        {"json": chain(6000, lambda to: {"$ref": to})},
        {"grammar": RULES},
        {"grammar": "start: " + " ".join(['"a"'] * 60000)},
    ],
    ids=["objects", "references", "rules", "symbols"],
)  # fmt: skip
def test_demands_of_any_depth_end_in_a_grammar_or_a_refusal(demand: dict[str, Any]) -> None:
    """In a process of its own: a stack that overflows takes the process along."""
    source = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_grammar
from cuengine.errors import RequestError
try:
    test_grammar.compiled(**json.load(sys.stdin))
    print("compiled")
except RequestError as error:
    print("refused:", str(error)[:300])
"""
    done = subprocess.run(
        [sys.executable, "-c", source], check=False, input=json.dumps(demand),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith(("compiled", "refused: structured_outputs."))
    assert "backtrace" not in done.stdout


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"regex": "a" * 300_000}, "regex"),
        ({"json": {"type": "integer", "multipleOf": 999983}}, "json.multipleOf"),
        ({"json": {"items": {"multipleOf": 0.00001}}}, "json.items.multipleOf"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "json.x-guidance"),
        ({"grammar": 'start: "a"\n| %json {"items": {"multipleOf": 999983}}'}, "grammar"),
    ],
)
def test_what_would_take_for_ever_or_pass_unseen_is_refused(
    fields: dict[str, Any], place: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(**fields)
    assert caught.value.param == f"structured_outputs.{place}"


def test_multiples_of_what_is_usual_compile() -> None:
    for multiple in (1, 5, 60, 1000, 0.5, 0.01, 0.25):
        compiled(json={"type": "number", "multipleOf": multiple})


def test_an_empty_whitespace_pattern_is_taken_at_its_word() -> None:
    demand = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    matcher = compiled(json=demand, whitespace_pattern="").matcher()
    matcher.consume(ord("{"))
    assert allowed(matcher) == {ord('"')}


# --- limits -----------------------------------------------------------------------------------

OPTIONAL: dict[str, Any] = {"properties": {f"p{i}": {"type": "null"} for i in range(600)}}
BRANCHES: list[Any] = [
    {"properties": {f"a{i}": {"type": "null"}}, "required": [f"a{i}"]} for i in range(2001)
]
ANY_OF_OPTIONAL = [{"type": "object", "properties": {f"a{i}": {}}} for i in range(2000)]
OUTGROWS_LATE = 'start: /[abc]{40}/ more\nmore: "x" more'


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"choice": [f"item {i}" for i in range(10_000)]}, "item 9999"),
        ({"json": {"enum": [f"item {i}" for i in range(10_000)]}}, '"item 9999"'),
        ({"regex": "|".join(f"item {i}" for i in range(10_000))}, "item 9999"),
        ({"json": {"type": "object"} | OPTIONAL}, '{"p0": null, "p500": null, "p599": null}'),
        ({"json": {"type": "object", "anyOf": BRANCHES}}, '{"a2000": null}'),
    ],
    ids=["choice", "enum", "regex", "optional", "anyOf"],
)
def test_wide_demands_are_followed_to_their_end(fields: dict[str, Any], text: str) -> None:
    matcher = compiled(**fields).matcher()
    for byte in text.encode():
        assert matcher.consume(byte) in (None, "stop"), matcher.problem
    assert matcher.complete or EOS in allowed(matcher)


def test_a_choice_is_text_and_no_expression() -> None:
    choice = ["a.c", "[", r"\d", "x|y", "-b", "^$", "#&~", "{2}", "é*", "(?i)e", "+", "\t/\n"]
    start = compiled(choice=choice).matcher()
    assert allowed(start) == {text.encode()[0] for text in choice}
    for text in choice:
        assert follow(start.fork(), text) == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": 'start: "a" start'},
        {"grammar": 'start: /[ab]/ more\nmore: "xyz" more'},
        {"regex": "(a|b|c)?" * 5000},
        {"json": {"anyOf": ANY_OF_OPTIONAL}},
    ],
    ids=["no end", "no end behind", "alternatives", "anyOf"],
)
def test_what_outgrows_its_limits_at_once_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r": it outgrows the limits .*: take fewer") as caught:
        compiled(**fields)
    assert (caught.value.param or "").startswith("structured_outputs.")


def test_what_outgrows_its_limits_on_the_way_is_an_error_that_says_so() -> None:
    matcher = compiled(grammar=OUTGROWS_LATE).matcher()
    follow(matcher, "abc" * 13)
    assert matcher.consume(ord("a")) is None
    allowed(matcher)  # what the sampler would have drawn by
    assert matcher.consume(ord("x")) == "error"
    assert "outgrows the limits" in matcher.problem


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "use anyOf"),
        ({"json": {"not": {}}}, "'not' is not supported: say what is allowed"),
        ({"json": {"if": {}, "then": {}}}, "'if' and 'then' are not supported: use anyOf"),
        ({"json": {"propertyNames": {"pattern": "a"}}}, "use patternProperties"),
        ({"json": {"properties": {"a": {}}, "minProperties": 1}}, "minProperties"),
        ({"json": {"minimum": "a"}}, 'minimum is a number, not "a"'),
        ({"json": {"minLength": -1}}, "minLength needs a value of the type positive integer"),
        ({"json": {"pattern": "a", "format": "date", "type": "string"}}, "exclude each other"),
        ({"json": {"maxLength": 10**12, "type": "string"}}, "a count is too large"),
        (
            {"json": {"type": "string", "pattern": "^.*a.{500}$", "maxLength": 2000}},
            "are too much together",
        ),
        ({"json": {"type": "object", "$ref": "#"}}, "$ref '#' leads back to itself"),
        ({"json": {"multipleOf": 0, "type": "number"}}, "multipleOf is a number above 0"),
        ({"json": {"pattern": "(?=a)b"}}, "look-around is not supported"),
        ({"json": {"pattern": r"\bfoo\b"}}, r"boundaries as \b are not supported"),
        ({"json": {"patternProperties": {"(": {}}}}, 'unclosed group, at "("'),
        ({"regex": "a(b"}, 'not a regular expression: unclosed group, at "(b"'),
        ({"regex": "x(?!a)b"}, 'look-around is not supported, at "(?!a)b"'),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"\bfoo"}, r"boundaries as \b are not supported"),
        ({"regex": "a\nb("}, "unclosed group"),
        ({"json_object": True, "whitespace_pattern": "(?<=a)"}, "look-around"),
        ({"grammar": "start: /a(/"}, 'at 1(8): not a regular expression: unclosed group, at "("'),
        ({"grammar": "start: <foo>"}, 'unknown special token: "<foo>"'),
        ({"grammar": 'start: %json {"not": {}}'}, "'not' is not supported"),
    ],
)
def test_what_is_not_supported_is_said_in_our_words(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(**fields)
    message = str(caught.value)
    assert says in message
    for raw in ("coerce_one_of", "Unimplemented", "in regex", "regex parse error", "retriever",
                "verbose", "registry", "limits.", "json-schema:", "Unable",
                "special tokens are available"):  # fmt: skip
        assert raw not in message
    if "grammar" not in fields:  # there the client wrote it
        assert "\n" not in message
        assert "start:" not in message


def test_every_format_that_is_named_is_known() -> None:
    for name in FORMATS:
        compiled(json={"type": "string", "format": name})


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the whole text is a whole answer."""
    matcher = matcher.fork()
    for i, byte in enumerate(text.encode()):
        if byte not in allowed(matcher):
            return False
        if matcher.consume(byte) is not None:
            return i + 1 == len(text.encode())
    return EOS in allowed(matcher)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["1", "null", "[]"], ["x"]),
        ({"properties": {"a": True, "b": False}, "type": "object"},
         ["{}", '{"a": 1}'], ['{"b": 1}']),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "additionalProperties": True}, ["{}", '{"a": 1}'], ["[]"]),
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        ({"type": "array", "items": True, "minItems": 1}, ["[1]"], ["[]"]),
        ({"type": "array", "prefixItems": [True, {"const": 1}], "items": False, "minItems": 1},
         ["[0]", "[null, 1]"], ["[]", "[0, 2]", "[0, 1, 2]"]),
        ({"type": "array", "prefixItems": [{"const": 1}, False]}, ["[]", "[1]"], ["[1, 1]", "[2]"]),
        ({"anyOf": [False, {"const": 1}]}, ["1"], ["2"]),
        ({"allOf": [True, {"const": 1}]}, ["1"], ["2"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
         ["0.5", "0.001"], ["0", "0.0", "0.51", "-0.1"]),
        ({"type": "number", "minimum": -3.5, "exclusiveMaximum": -3},
         ["-3.5", "-3.01"], ["-3", "-3.0", "-2.9", "-3.6"]),
        ({"type": "number", "minimum": 0, "maximum": 1e300}, ["0", "12345678901234567.5"], ["-1"]),
        ({"type": "number", "minimum": 5e-324, "maximum": 1}, ["0.1", "1"], ["0", "1.1"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
         ["0", "8999999999999999999"], ["-1", "18446744073709551616"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
         ["-8999999999999999999", "0"], ["9223372036854775808"]),
        ({"type": "integer", "minimum": 10**18}, ["1000000000000000000"], ["999999999999999999"]),
        ({"type": "integer", "maximum": 2**53 + 1}, ["9007199254740990"], ["9007199254740994"]),
    ],
)  # fmt: skip
def test_booleans_for_schemas_and_bounds_of_numbers_mean_what_they_say(
    schema: dict[str, Any] | bool, good: list[str], bad: list[str]
) -> None:
    """In a list, and as part of a grammar, too."""
    around = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    start = compiled(json=around).matcher()
    within = compiled(grammar=f"start: %json {json.dumps(around)}").matcher()
    for text, expected in [(text, True) for text in good] + [(text, False) for text in bad]:
        assert takes(start, f"[{text}]") == expected, text
        assert takes(within, f"[{text}]") == expected, text


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self) -> None:
        self.characters = 0
        self.vocab_size, self.special_ids = TOKENIZER.vocab_size, TOKENIZER.special_ids
        self.token_bytes = TOKENIZER.token_bytes

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)


def test_of_long_forced_text_little_is_tokenized_for_each_token() -> None:
    tokenizer, text = Counting(), "say the " * 4000
    compiler = GrammarCompiler(tokenizer, VOCAB, {EOS})
    matcher = compiler.compile(StructuredOutputsParams(choice=[text])).matcher()
    tokenizer.characters = 0
    taken = b""
    for _ in range(40):
        (token,) = allowed(matcher)
        taken += TOKENIZER.token_bytes(token)
        assert matcher.consume(token) is None
    assert text.encode().startswith(taken)
    assert tokenizer.characters <= 40 * 300


class Clock:
    """Stands in for the clocks: from one look to the next `cost` seconds go by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cost = 0.0, 0.0
        monkeypatch.setattr(grammar_module, "time", self)

    def thread_time(self) -> float:
        self.now += self.cost
        return self.now

    perf_counter = thread_time


def test_an_answer_whose_masks_take_too_long_ends_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    grammar = compiled(regex="[ab]{9}")
    slow, other = grammar.matcher(), grammar.matcher()
    clock.cost = 1.0
    allowed(slow)
    clock.cost = 0.0
    assert slow.consume(ord("a")) == "error"
    assert "takes too long" in slow.problem
    assert slow.fork().problem
    assert follow(other, "ababababa") == "stop"


def test_a_slow_mask_now_and_then_is_made_up_for_by_fast_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    matcher = compiled(regex="[ab]*").matcher()
    for i in range(500):
        clock.cost = 0.02 if i % 50 == 0 else 0.0
        allowed(matcher)
        assert matcher.consume(ord("a")) is None
    for i in range(500):
        clock.cost = 0.02 if i % 5 == 0 else 0.0
        allowed(matcher)
        if matcher.consume(ord("a")) == "error":
            break
    assert "takes too long" in matcher.problem


def test_the_larger_a_demand_the_more_time_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    large = compiled(choice=[f"item {i}" for i in range(2000)]).matcher()
    small = compiled(choice=["item 1", "item 2"]).matcher()
    clock.cost = 0.05
    for text in "it":
        for matcher in (large, small):
            allowed(matcher)
            matcher.consume(ord(text))
    assert small.problem
    assert not large.problem


def test_a_demand_that_takes_too_long_from_the_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    clock.cost = 0.1
    with pytest.raises(RequestError, match="takes too long") as caught:
        compiled(regex="[ab]*slow")
    assert caught.value.param == "structured_outputs.regex"
    clock.cost = 0.0
    compiled(regex="[ab]*slow")


def test_masks_that_were_slow_together_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until they are fast again: so the one that is to blame is known."""
    clock = Clock(monkeypatch)
    matchers = [compiled(regex=f"[{chr(97 + i)}-z]*").matcher() for i in range(6)]
    alone: list[Matcher] = []
    compute = Matcher.compute_mask
    monkeypatch.setattr(
        Matcher, "compute_mask", lambda self, *args: (alone.append(self), compute(self, *args))
    )

    def masks_are_right() -> None:
        masks = allowed_mask([MaskRow(matcher) for matcher in matchers])
        assert masks is not None
        for i, mask in enumerate(masks):
            assert tokens_in(mask) & set(range(97, 123)) == set(range(97 + i, 123))

    masks_are_right()
    assert alone == []
    clock.cost = 1.0
    masks_are_right()
    assert alone == []
    assert not any(matcher.problem for matcher in matchers)
    clock.cost = 0.0
    masks_are_right()
    assert alone == matchers
    masks_are_right()
    assert alone == matchers


def test_what_outgrows_its_limits_behind_the_first_property_is_refused(
    smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_schema, "MAX_OPTIONAL", 2000)
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {2})
    properties = {f"p{i}": {"type": "null"} for i in range(2000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    with pytest.raises(RequestError, match="outgrows the limits"):
        compiler.compile(StructuredOutputsParams(json=schema))


LONG = "invalid regex a" * 10_000


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"grammar": f'start: "{LONG}" ('}, ""),
        ({"grammar": "start: " + "(" * 100_000}, "nested"),
        ({"grammar": f"start: <|{LONG}|>"}, ""),
        ({"grammar": f"root ::= {'r' * 100_000}"}, "neither Lark nor GBNF"),
        ({"grammar": "\n".join([f'start: "{LONG}"', *["x: /a(/"] * 1000])}, "duplicate rule"),
        ({"regex": f"{LONG}(b{LONG[:40_000]}"}, 'unclosed group, at "(binvalid regex a'),
        ({"regex": LONG + "(?=b)"}, 'look-around is not supported, at "(?=b)"'),
        ({"json": {"pattern": "a(" + "b" * 100_000}}, "unclosed group"),
        ({"json": {"type": LONG}}, "is none of string"),
        ({"json": {"format": LONG}}, "is not supported"),
        ({"json": {"$ref": f"#/{'r' * 100_000}"}}, "is not in the schema"),
        ({"json": {"minimum": LONG}}, "minimum is a number"),
    ],
)  # fmt: skip
def test_errors_show_of_long_demands_what_they_are_about_alone(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(**fields)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 3000
