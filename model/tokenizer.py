"""Text to tokens and back, for one model folder. Wraps the `tokenizers` package.

Chat templates are in chat_template.py, tokens that arrive one by one in cuengine/detokenizer.py,
the making of a tokenizer.json out of GGUF metadata in gguf_tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from cuengine.detokenizer import ByteText, TextRules
from cuengine.errors import ModelError, RequestError
from cuengine.model.json_file import read_json_object

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Their post-processor is made from add_bos_token and add_eos_token, whatever tokenizer.json says.
_LLAMA_TOKENIZER_CLASSES = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
)


class Tokenizer:
    """A model's tokenizer. May be used from several threads at once.

    vocab_size    number of tokens, added ones included; the model may have more rows than that
    special_ids   tokens that are left out of text with skip_special_tokens
    text_rules    how token bytes become text; None where the decoder does more than join bytes
    """

    def __init__(self, tokenizer: FastTokenizer, config: Mapping[str, Any] | None = None) -> None:
        """`config` is the content of tokenizer_config.json. Raises ModelError for a bad one."""
        config = config or {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
        names = {name: token_content(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
        _add_tokens(tokenizer, config, [name for name in names.values() if name is not None])
        self._tokenizer = tokenizer
        self.bos_token_id = self._token_id(names["bos_token"])
        self.eos_token_id = self._token_id(names["eos_token"])
        if config.get("tokenizer_class") in _LLAMA_TOKENIZER_CLASSES:
            self._set_post_processor(
                names["bos_token"] if config.get("add_bos_token", True) else None,
                names["eos_token"] if config.get("add_eos_token", False) else None,
            )
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Its pickled state is its part of tokenizer.json; all of that takes a tenth of a second.
        decoder = tokenizer.decoder and json.loads(tokenizer.decoder.__getstate__())
        self.text_rules = _text_rules(decoder)
        self._byte_level = decoder is not None and "ByteLevel" in _step_types(decoder)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._pieces = {token_id: piece for piece, token_id in vocabulary.items()}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises ModelError where it is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{path}: missing. A model needs its tokenizer.json; without one it can only be "
                "used with token ids, in Python: LLM(..., skip_tokenizer_init=True)."
            )
        try:
            tokenizer = FastTokenizer.from_file(str(path))
            tokenizer.encode("a")  # some defects, such as an unknown unk_token, show only now
        except BaseException as error:  # the package raises plain Exception, and Rust's panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            read_json_object(path)  # says it better where that is what is wrong
            raise ModelError(f"{path}: not a usable tokenizer: {error}") from None
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                config |= read_json_object(folder / name)
        return cls(tokenizer, config)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._pieces

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Every token id means the same to both."""
        return self._pieces == other._pieces

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of `text`, with the BOS or EOS that the model wants where they are asked for.

        Names of special tokens within the text become those tokens. Raises RequestError for text
        that is not Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text is not valid Unicode: {text[error.start : error.end]!r} at character "
                f"{error.start} is half of a surrogate pair"
            ) from None
        # A batch of one, because `encode` holds the GIL: 5 MB of text would stop every other thread
        # for seconds. The fast one leaves out offsets, which nobody reads.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD (see TextRules).

        Raises RequestError for an id that is no token.
        """
        for token_id in ids:
            if token_id not in self._pieces:
                raise RequestError(
                    f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens"
                )
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        if self.text_rules is None:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        return ByteText(self.text_rules).push(data, final=True)

    def half_character(self, ids: Sequence[int]) -> tuple[bytes, str]:
        """The bytes of the character within which `ids` end, and the U+FFFD that `decode` has for
        them; both empty where there is no such character.
        """
        if self.text_rules is None:
            return b"", ""
        text = ByteText(self.text_rules)
        # Every token has a byte, and UTF-8 finds its feet again within four.
        text.push(b"".join(self.token_bytes(token_id) for token_id in ids[-4:]))
        return text.half_bytes(), text.half_character()

    def token_text(self, token_id: int) -> str:
        """One token on its own, special or not; U+FFFD for parts of characters, "" if unknown."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text; none for an id that is no token."""
        data = self._bytes.get(token_id)
        if data is None:
            piece = self._pieces.get(token_id)
            if piece is None:
                return b""
            data = self._bytes[token_id] = self._piece_bytes(piece, token_id)
        return data

    def _token_id(self, token: str | None) -> int | None:
        if token is None:
            return None
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def _set_post_processor(self, bos: str | None, eos: str | None) -> None:
        ids = {name: self._token_id(name) for name in (bos, eos)}
        specials = [(name, i) for name, i in ids.items() if name is not None and i is not None]
        known = [name for name, _ in specials]
        first = [name for name in (bos,) if name in known]
        last = [name for name in (eos,) if name in known]
        self._tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last], pair=None, special_tokens=specials
        )

    def _piece_bytes(self, piece: str, token_id: int) -> bytes:
        if self._byte_level:
            if all(character in BYTE_OF_CHARACTER for character in piece):
                return bytes(BYTE_OF_CHARACTER[character] for character in piece)
            return piece.encode("utf-8")
        if self.text_rules is not None:
            byte = byte_of_piece(piece)
            return piece.replace("▁", " ").encode("utf-8") if byte is None else bytes([byte])
        return self._difference(token_id)

    def _difference(self, token_id: int) -> bytes:
        """What a token adds behind another one, for decoders that do more than join bytes."""
        one = self._tokenizer.decode([token_id], skip_special_tokens=False)
        two = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        added: str = two[len(one) :] if two.startswith(one) else one
        return added.encode("utf-8")


def byte_characters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = {character: byte for byte, character in byte_characters().items()}


def byte_of_piece(piece: str) -> int | None:
    """The byte that SentencePiece's byte-fallback piece "<0xE2>" stands for; None for others."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def token_content(value: object) -> str | None:
    """A special token as the JSON files have it: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_tokens(
    tokenizer: FastTokenizer, config: Mapping[str, Any], special_names: Sequence[str]
) -> None:
    """Adds what tokenizer_config.json has and tokenizer.json lacks, as transformers does.

    A special token that is not in the vocabulary is left out: the model has no row for it.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    try:
        for _, fields in sorted(listed.items(), key=lambda item: int(item[0])):
            if fields["content"] not in known:
                tokenizer.add_tokens([AddedToken(**_added_token_fields(fields))])
                known.add(fields["content"])
        more = [token_content(value) for value in config.get("additional_special_tokens") or ()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"tokenizer_config.json: a malformed added token: {error!r}") from None
    for name in [*special_names, *(token for token in more if token is not None)]:
        if name not in known and tokenizer.token_to_id(name) is not None:
            tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])


def _added_token_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: fields[name] for name in names if name in fields}


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _step_types(decoder: Mapping[str, Any]) -> list[str]:
    return [step["type"] for step in _steps(decoder)]


def _text_rules(decoder: Mapping[str, Any] | None) -> TextRules | None:
    """The rules of a decoder that joins bytes: byte-level, or SentencePiece with byte fallback."""
    if decoder is None:
        return None
    steps = _steps(decoder)
    types = _step_types(decoder)
    if types in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return TextRules()
    if types[:3] == ["Replace", "ByteFallback", "Fuse"] and types[3:] in ([], ["Strip"]):
        replace, strip = steps[0], (steps[3] if len(steps) == 4 else None)
        if replace["pattern"] != {"String": "▁"} or replace["content"] != " ":
            return None
        if strip is not None and (strip["content"] != " " or strip["stop"] != 0):
            return None
        return TextRules(
            strip_start=strip["start"] if strip is not None else 0, replace_each_byte=True
        )
    return None
