"""Tokenizer: loading a folder, BOS and EOS, ids and bytes, and input that cannot be served."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from cuengine.errors import ModelError, RequestError
from cuengine.model.tokenizer import Tokenizer, byte_characters


def byte_level() -> FastTokenizer:
    """Byte b is token b; 256 "th", 257 "the"; 258 <s>, 259 </s>, both special."""
    letters = byte_characters()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {"th": 256, "the": 257}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in ("<s>", "</s>")]
    )
    return tokenizer


def sentencepiece_style() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁▁", "é"]
    tokenizer = FastTokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(tokenizer)


def folder_with(
    path: Path, tokenizer: FastTokenizer | None = None, **files: dict[str, Any]
) -> Path:
    (tokenizer or byte_level()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_text_becomes_the_ids_counted_by_hand_and_text_again(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    assert tokenizer.encode("the é") == [257, 32, 0xC3, 0xA9]
    assert tokenizer.decode([257, 32, 0xC3, 0xA9]) == "the é"
    assert tokenizer.vocab_size == 260


def test_special_tokens_are_named_by_the_config_or_the_map(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    by_config = Tokenizer.from_folder(folder_with(tmp_path, tokenizer_config=config))
    assert (by_config.bos_token_id, by_config.eos_token_id) == (258, 259)
    assert by_config.special_ids == {258, 259}
    by_map = {"bos_token": "</s>", "eos_token": "<s>"}
    both = Tokenizer.from_folder(
        folder_with(tmp_path, special_tokens_map=by_map, tokenizer_config={"bos_token": "<s>"})
    )
    assert (both.bos_token_id, both.eos_token_id) == (258, 258)


def test_without_a_config_there_is_no_bos_and_no_eos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)


def test_special_tokens_are_skipped_only_where_asked_for() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode([258, 257, 259]) == "the"
    assert tokenizer.decode([258, 257, 259], skip_special_tokens=False) == "<s>the</s>"


def test_bos_is_added_only_where_asked_for() -> None:
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 258)]
    )
    tokenizer = Tokenizer(fast)
    assert tokenizer.encode("the") == [258, 257]
    assert tokenizer.encode("the", add_special_tokens=False) == [257]
    assert tokenizer.encode("<s>the</s>", add_special_tokens=False) == [258, 257, 259]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [258, 257]),
        ({"add_bos_token": False}, [257]),
        ({"add_eos_token": True}, [258, 257, 259]),
        ({"add_bos_token": False, "add_eos_token": True}, [257, 259]),
    ],
)
def test_a_llama_tokenizer_adds_what_its_config_says(
    flags: dict[str, bool], expected: list[int]
) -> None:
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    assert Tokenizer(byte_level(), names | flags).encode("the") == expected


def test_other_classes_add_what_tokenizer_json_says() -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    assert Tokenizer(byte_level(), config | {"add_bos_token": True}).encode("the") == [257]


def test_tokens_that_only_the_config_knows_are_added_in_order_of_their_ids() -> None:
    def token(content: str, special: bool) -> dict[str, Any]:
        return {"content": content, "special": special, "normalized": False, "lstrip": False}

    listed = {"261": token("<b>", True), "260": token("<a>", False), "258": token("<s>", True)}
    tokenizer = Tokenizer(byte_level(), {"added_tokens_decoder": listed})
    assert tokenizer.encode("<a><b>") == [260, 261]
    assert tokenizer.decode([260, 261]) == "<a>"


def test_a_named_special_token_in_the_vocabulary_is_found_in_text_and_special() -> None:
    tokenizer = Tokenizer(byte_level(), {"additional_special_tokens": ["the"], "pad_token": "no"})
    assert tokenizer.special_ids == {257, 258, 259}
    assert tokenizer.encode("no") == list(b"no")


def test_truncation_and_padding_of_the_file_are_not_used() -> None:
    fast = byte_level()
    fast.enable_truncation(2)
    fast.enable_padding(length=5)
    assert Tokenizer(fast).encode("abc") == list(b"abc")


def test_byte_level_tokens_have_their_bytes_whole_characters_or_not() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_text(0xC3) == "\ufffd"
    assert (tokenizer.token_bytes(32), tokenizer.token_text(32)) == (b" ", " ")
    assert tokenizer.token_text(257) == "the"
    assert tokenizer.token_text(258) == "<s>"


def test_sentencepiece_tokens_have_their_bytes_and_keep_their_space() -> None:
    tokenizer = sentencepiece_style()
    assert tokenizer.token_bytes(1 + 0xE2) == b"\xe2"
    assert tokenizer.token_text(1 + 0xE2) == "\ufffd"
    assert tokenizer.token_text(257) == " the"
    assert tokenizer.token_bytes(258) == b"  "
    assert tokenizer.token_bytes(259) == "é".encode()
    assert tokenizer.decode([257, 257]) == "the the"


def test_wordpieces_have_the_text_they_add_to_a_text() -> None:
    fast = FastTokenizer(models.WordPiece({"un": 0, "##able": 1, "[UNK]": 2}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = Tokenizer(fast)
    assert (tokenizer.token_text(0), tokenizer.token_text(1)) == (" un", "able")


def test_an_id_beyond_the_vocabulary_has_no_text_but_cannot_be_decoded() -> None:
    tokenizer = Tokenizer(byte_level())
    assert (tokenizer.token_text(5000), tokenizer.token_bytes(5000)) == ("", b"")
    assert 5000 not in tokenizer
    assert 257 in tokenizer
    for bad in (5000, -1, 2**40):
        with pytest.raises(RequestError, match=f"token id {bad} is not in the vocabulary of 260"):
            tokenizer.decode([257, bad])


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"'\\ud83d' at character 2 is half of a surrogate pair"):
        Tokenizer(byte_level()).encode("ab\ud83d")


@pytest.mark.parametrize("text", ["", "\x00", "\ufffd", "\u202e", "\U0010ffff", "a" * 100_000])
def test_odd_text_survives(text: str) -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_broken_utf8_becomes_replacement_characters() -> None:
    assert Tokenizer(byte_level()).decode([97, 0xE2, 0x82, 98, 0xFF]) == "a\ufffdb\ufffd"


def test_several_threads_may_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(byte_level())
    texts = [f"the number {i} é" for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(tokenizer.encode, texts))
        assert list(pool.map(tokenizer.decode, ids)) == texts
    assert ids == [tokenizer.encode(text) for text in texts]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"model": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "holds a JSON list"),
        (b"{}", "not a usable tokenizer"),
        (b'{"version": "1.0", "model": {"type": "Magic"}}', "not a usable tokenizer"),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
            "not a usable tokenizer",
        ),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"b": 0}, "merges": [], '
            b'"unk_token": "<unk>"}}',
            "not a usable tokenizer",
        ),
    ],
)
def test_a_broken_tokenizer_is_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"tokenizer\.json: {message}") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "listed", [{"x": {"content": "<a>"}}, {"300": {}}, {"300": "<a>"}, ["<a>"]]
)
def test_a_broken_config_is_refused(tmp_path: Path, listed: Any) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"added_tokens_decoder": listed})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: a malformed added token"):
        Tokenizer.from_folder(folder)


def test_other_decoders_are_left_to_the_tokenizers_package() -> None:
    fast = byte_level()
    fast.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("t"), "T")])
    tokenizer = Tokenizer(fast)
    assert tokenizer.text_rules is None
    assert tokenizer.decode([257]) == "The"
