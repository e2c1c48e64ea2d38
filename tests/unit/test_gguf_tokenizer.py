"""Tokenizers rebuilt from GGUF metadata, against SentencePiece itself, SmolLM2's golden prompts and
cuts made by hand."""

from __future__ import annotations

import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import pre_tokenizers

from cuengine.errors import ModelError
from cuengine.model.chat_template import ChatTemplate
from cuengine.model.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from cuengine.model.tokenizer import Tokenizer, byte_characters

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")

NUM_STRINGS = 2000


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    content, config = tokenizer_from_gguf(metadata)
    return Tokenizer(FastTokenizer.from_str(json.dumps(content)), config)


def metadata_of(processor: Any, user_defined: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """What a converter writes into a GGUF file for a SentencePiece model."""
    ids = range(processor.get_piece_size())
    kinds = {
        i: 2 * processor.is_unknown(i)
        or 3 * processor.is_control(i)
        or 6 * processor.is_byte(i)
        or 5 * processor.is_unused(i)
        or 4 * (processor.id_to_piece(i) in user_defined)
        or 1
        for i in ids
    }
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [int(kinds[i]) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def mistral_model(name: str) -> Any:
    """A real model file out of a package that is not imported (its dependencies are not needed)."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package mistral_common, for its SentencePiece models")
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / name
    if not path.is_file():
        pytest.skip(f"needs the package mistral_common with data/{name}")
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


FRAGMENTS = (
    "hello|world| | a| the|The|  |   |               |\t|\n|\n\n|\r\n| \n|b|abab|aaaa|\x00|\x07|"
    "é|e\u0301|a\u0323\u0302|ü|naïve|Zürich|日本語|中文|한국어|ภาษาไทย|กำลัง|हिन्दी|עברית|العربية|"
    "😀|👨‍👩‍👧|🇫🇷|👍🏽|\x1b[0m|\x7f|\x85|▁|▁▁|123|4567|3.14|.|...|!!|-----|====|<0x41>|<s|"
    'def f(x):\n    return x|{"a": [1]}|https://x.org/?q=1&r=%20|\u200b|\ufeff|\ufffd|\U0001d518|'
    "ß|İ|\u2028|\u3000|\u00a0|’|“quoted”|don't|I'LL|x²|½|∑|→"
)


def mixed_strings(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    fragments = FRAGMENTS.split("|")
    strings = ["", " ", "  ", " x", "x ", "  x  ", "\n", "\n ", "▁", "é" * 50, " " * 40 + "x" * 40]
    ranges = [(0, 0x80), (0x80, 0x800), (0xE00, 0xE7F), (0x300, 0x370), (0x1F300, 0x1F700)]
    while len(strings) < count:
        if len(strings) % 3:
            strings.append("".join(rng.choices(fragments, k=rng.randrange(1, 15))))
        else:
            picks = [chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 30))]
            strings.append("".join(picks))
    return strings


@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_a_real_sentencepiece_model_encodes_and_decodes_as_sentencepiece_does(name: str) -> None:
    processor = mistral_model(name)
    tokenizer = tokenizer_of(metadata_of(processor))
    for text in mixed_strings(NUM_STRINGS, seed=1):
        ids = processor.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == processor.decode(ids), text


def test_any_ids_decode_as_sentencepiece_does_broken_utf8_too() -> None:
    processor = mistral_model("tokenizer.model.v1")
    tokenizer = tokenizer_of(metadata_of(processor))
    rng = random.Random(2)
    text = list(range(3, processor.get_piece_size()))
    first_byte = processor.piece_to_id("<0x00>")
    not_space = [first_byte + byte for byte in range(256) if byte != 0x20]
    for _ in range(NUM_STRINGS):
        ids = [rng.choice(not_space if rng.random() < 0.6 else text) for _ in range(9)]
        assert tokenizer.decode(ids) == processor.decode(ids), ids


def test_bos_comes_first_as_the_file_asks() -> None:
    processor = mistral_model("tokenizer.model.v1")
    tokenizer = tokenizer_of(metadata_of(processor))
    assert tokenizer.encode("Hi") == [1, *processor.encode("Hi")]
    neither = {"tokenizer.ggml.add_bos_token": False}
    assert tokenizer_of(metadata_of(processor) | neither).encode("Hi") == processor.encode("Hi")
    both = {"tokenizer.ggml.add_eos_token": True}
    assert tokenizer_of(metadata_of(processor) | both).encode("") == [1, 2]


def test_text_between_control_tokens_is_encoded_as_if_on_its_own() -> None:
    processor = mistral_model("mistral_instruct_tokenizer_240323.model.v3")
    tokenizer = tokenizer_of(metadata_of(processor))
    begin, end = processor.piece_to_id("[INST]"), processor.piece_to_id("[/INST]")
    expected = [1, begin, *processor.encode("Say hi"), end, *processor.encode("Hi!"), 2]
    for prompt in ("<s>[INST] Say hi[/INST] Hi!</s>", "<s>[INST]Say hi[/INST]Hi!</s>"):
        assert tokenizer.encode(prompt, add_special_tokens=False) == expected


WORDS = ["hello", "world", "the", "there", "banana", "ananas", "aaaa", "aaa", "abab", "baba"]
WORDS += ["日本語", "日本", "ภาษา", "naïve", "é", "123"]
USER_DEFINED = ("<tool>", "<x▁y>", "ban", "▁▁▁", "\n")


def train(**options: Any) -> Any:
    rng = random.Random(5)
    corpus = [" ".join(rng.choices([*WORDS, "  x"], k=8)) for _ in range(1000)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        split_by_whitespace=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("user_defined", [(), USER_DEFINED])
def test_the_options_of_sentencepiece_mean_the_same(
    prefix: bool, trim: bool, user_defined: tuple[str, ...]
) -> None:
    processor = train(
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=trim,
        user_defined_symbols=list(user_defined),
    )
    tokenizer = tokenizer_of(
        metadata_of(processor, user_defined)
        | {
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.remove_extra_whitespaces": trim,
        }
    )
    rng = random.Random(3)
    parts = [*WORDS, "<tool>", "<x y>", "ban", "nan", " ", "  ", "   ", "\n", "a", "x", "\t", "😀"]
    for _ in range(1500):
        text = "".join(rng.choices(parts, k=rng.randrange(0, 9)))
        if text.strip(" ") in ("<tool>", "<x y>", "ban", "\n"):
            continue  # a text that is nothing but a user-defined piece gets no space in front
        ids = processor.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == processor.decode(ids), text


def test_smollm2_gets_the_golden_prompts_and_texts(
    smollm2_folder: Path, golden_smollm2: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    template = ChatTemplate.from_folder(smollm2_folder)
    assert template is not None
    for case in golden_smollm2["cases"]:
        text = case["text"]
        if case["kind"] == "chat":
            text = template.render([{"role": "user", "content": text}])
        assert tokenizer.encode(text) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"]) == case["output_text"]


def byte_level_metadata(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """Bytes, then "th", "the", " the" with their merges, then one token of each other type."""
    letter = byte_characters()
    merges = ["t h", "th e", f"{letter[32]} the"]
    tokens = [letter[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in merges]
    types = [1] * len(tokens) + [3, 3, 4, 5]
    tokens += ["<|begin|>", "<|end|>", "<tool>", "[unused]"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        **more,
    }
    return metadata if pre is None else metadata | {"tokenizer.ggml.pre": pre}


def test_byte_level_merges_give_the_tokens_counted_by_hand() -> None:
    tokenizer = tokenizer_of(byte_level_metadata())
    assert tokenizer.encode("the the~") == [257, 258, ord("~")]
    assert tokenizer.encode("é") == list("é".encode())
    assert tokenizer.decode([257, 258, 0xC3, 0xA9]) == "the theé"


def test_control_and_user_defined_tokens_are_found_in_text_and_unused_ones_are_not() -> None:
    tokenizer = tokenizer_of(byte_level_metadata())
    assert tokenizer.encode("the<|end|><tool>the") == [257, 260, 261, 257]
    assert tokenizer.encode("[unused]") == list(b"[unused]")
    assert tokenizer.special_ids == {259, 260}
    assert tokenizer.decode([257, 260, 261]) == "the<tool>"


@pytest.mark.parametrize(("pre", "bos"), [("llama-bpe", True), ("gpt-2", False), ("tekken", True)])
def test_bos_is_added_by_default_where_the_pre_tokenizer_implies_it(pre: str, bos: bool) -> None:
    assert tokenizer_of(byte_level_metadata(pre)).encode("the") == [259] * bos + [257]
    turned = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": not bos})
    assert tokenizer_of(turned).encode("the") == [259] * (not bos) + [257]


TEXT = "It's 12345 don'T  x_y\n\n  end... 日本語"
CUTS = {
    "gpt-2": "It|'s| 12345| don|'|T| | x|_|y|\n\n | end|...| 日本語",
    "smollm": "It|'s| |1|2|3|4|5| don|'|T| | x|_|y|\n\n | end|...| 日本語",
    "llama-bpe": "It|'s| |123|45| don|'T| | x|_y|\n\n| | end|...| 日本語",
    "qwen2": "It|'s| |1|2|3|4|5| don|'T| | x|_y|\n\n| | end|...| 日本語",
    "tekken": "It|'s| |1|2|3|4|5| don|'T| | x|_y|\n\n| | end|...| 日本語",
    "deepseek-coder": "It|'|s| |1|2|3|4|5| don|'|T| | x|_|y|\n|\n| | end|...| |日本語",
    "default": "It|'|s| |123|45| don|'|T| | x|_|y|\n\n | end|...| 日本語",
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_cut_as_the_pre_tokenizer_of_that_name_cuts_them(pre: str) -> None:
    content, _ = tokenizer_from_gguf(byte_level_metadata(pre))
    splits = content["pre_tokenizer"]["pretokenizers"][:-1]
    whole = FastTokenizer.from_str(json.dumps(content)).pre_tokenizer
    assert whole is not None
    cutter = pre_tokenizers.Sequence([split_step(step) for step in splits])
    assert [word for word, _ in cutter.pre_tokenize_str(TEXT)] == CUTS[pre].split("|")
    assert len(whole.pre_tokenize_str(TEXT)) == len(CUTS[pre].split("|"))


def split_step(step: dict[str, Any]) -> Any:
    from tokenizers import Regex

    return pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_pre_tokenizer_loses_text(pre: str) -> None:
    tokenizer = tokenizer_of(byte_level_metadata(pre))
    for text in mixed_strings(100, seed=4):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tekken_is_the_expression_that_mistral_ships() -> None:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package mistral_common, for its tekken file")
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / "tekken_240911.json"
    assert PRE_TOKENIZERS["tekken"] == (json.loads(path.read_text())["config"]["pattern"],)


def test_whole_words_of_the_vocabulary_need_no_merges_where_llama_3_has_it_so() -> None:
    metadata = byte_level_metadata("llama-bpe", **{"tokenizer.ggml.merges": []})
    assert tokenizer_of(metadata).encode("the", add_special_tokens=False) == [257]
    metadata = byte_level_metadata("qwen2", **{"tokenizer.ggml.merges": []})
    assert tokenizer_of(metadata).encode("the") == list(b"the")


def test_chat_templates_and_special_tokens_go_into_the_config() -> None:
    _, config = tokenizer_from_gguf(
        byte_level_metadata(
            **{"tokenizer.chat_template": "T", "tokenizer.ggml.padding_token_id": 260}
        )
    )
    assert config["chat_template"] == "T"
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|end|>")
    assert config["pad_token"] == "<|end|>"
    assert "unk_token" not in config


def test_several_chat_templates_keep_their_names() -> None:
    _, config = tokenizer_from_gguf(
        byte_level_metadata(
            **{
                "tokenizer.chat_template": "T",
                "tokenizer.chat_templates": ["tool_use"],
                "tokenizer.chat_template.tool_use": "U",
            }
        )
    )
    assert config["chat_template"] == [
        {"name": "default", "template": "T"},
        {"name": "tool_use", "template": "U"},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported; supported are 'gpt2'"),
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon' is not supported; supported are .*smollm"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "has 2 entries for 263 tokens"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["t h", "th"]}, "'th' does not join"),
        ({"tokenizer.ggml.merges": ["x y"]}, "'x y' does not join"),
        ({"tokenizer.ggml.bos_token_id": 5000}, "bos_token_id is 5000, but the file has 263"),
        ({"tokenizer.ggml.model": "llama"}, "scores has 0 entries for 263 tokens"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.precompiled_charsmap": [1]},
            "precompiled_charsmap",
        ),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    metadata = {k: v for k, v in (byte_level_metadata() | change).items() if v is not None}
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(metadata)
