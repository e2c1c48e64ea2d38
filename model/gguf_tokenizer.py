"""A tokenizer.json and tokenizer_config.json made out of the metadata of a GGUF file.

Two kinds are known, by `tokenizer.ggml.model`: "gpt2", byte-level BPE with its merges, and "llama",
SentencePiece BPE with byte fallback, which has scores instead of merges. Reading the file format is
gguf_file.py's business, using the result tokenizer.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from cuengine.errors import ModelError

Json = dict[str, Any]

SPACE = "▁"  # U+2581, SentencePiece's visible space


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, llama.cpp's and SentencePiece's piece types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED_CODER = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

# `tokenizer.ggml.pre`: the expressions that cut text into words, one after the other.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "trillion": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "midm-2.0": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "tekken": (_TEKKEN,),
    "qwen2": (_QWEN2,),
    "stablelm2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "megrez": (_QWEN2,),
    "seed-coder": (_SEED_CODER,),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "minerva-7b": _DIGITS,
    "deepseek-coder": _DEEPSEEK_CODER,
}

# Words that are tokens are taken whole, and BOS is added unless the file says not to.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "tekken"})


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tuple[Json, Json]:
    """The contents of tokenizer.json and tokenizer_config.json for a GGUF file's metadata.

    metadata: GGUF key -> plain value. Raises ModelError for a kind of tokenizer or a pre-tokenizer
    that is not known, by name, and for metadata that contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelError("the GGUF file has no tokenizer (tokenizer.ggml.model is missing)")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _token_types(metadata, len(tokens))
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise ModelError(
            f"tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' (byte-level "
            "BPE) and 'llama' (SentencePiece BPE)"
        )
    config = _config(metadata, tokens, add_bos)
    tokenizer["added_tokens"] = _added_tokens(tokens, types, normalized=kind == "llama")
    tokenizer["post_processor"] = _post_processor(
        tokens,
        _token_id(metadata, "bos", tokens) if config["add_bos_token"] else None,
        _token_id(metadata, "eos", tokens) if config["add_eos_token"] else None,
    )
    return {"version": "1.0", "truncation": None, "padding": None, **tokenizer}, config


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Json, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported are "
            + ", ".join(sorted(PRE_TOKENIZERS))
        )
    steps: list[Json] = [
        {
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": False,
        }
        for expression in PRE_TOKENIZERS[pre]
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = _vocabulary(tokens)
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise ModelError(
                f"tokenizer.ggml.merges: {' '.join(merge)!r} does not join two tokens into a third"
            )
    model = _bpe(vocabulary, merges) | {"ignore_merges": pre in _WHOLE_WORDS}
    tokenizer = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "decoder": {**byte_level, "add_prefix_space": False},
        "model": model,
    }
    return tokenizer, pre in _WHOLE_WORDS


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Json:
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise ModelError(
            "tokenizer.ggml.precompiled_charsmap: SentencePiece's own normalisation is not "
            "supported; LLaMA's tokenizers have none"
        )
    vocabulary = _vocabulary(tokens)
    merges = _merges_from_scores(tokens, types, _scores(metadata, len(tokens)))
    model = _bpe(vocabulary, merges)
    model["byte_fallback"] = TokenType.BYTE in types
    model["fuse_unk"] = True
    unknown = _token_id(metadata, "unknown", tokens)
    model["unk_token"] = None if unknown is None else tokens[unknown]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    trim = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    normalizers: list[Json] = []
    if trim:
        normalizers += [
            {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    if prefix:
        normalizers += [
            {"type": "Replace", "pattern": {"Regex": expression}, "content": SPACE}
            for expression in _prefix_expressions(tokens, types)
        ]
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix or trim:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _prefix_expressions(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Where a text gets the space that SentencePiece puts in front: zero-width expressions.

    At its start; and, as LLaMA's reference code encodes what stands between control tokens each on
    its own, after each of those, unless a space is there already: chat templates for such models
    write one. Added tokens are looked for after this, and their names pass through here too: a name
    on its own must not get a space.
    """
    controls = _alternatives(tokens, types, _SPECIAL_TYPES)
    whole = _alternatives(tokens, types, (TokenType.USER_DEFINED,))
    start = r"\A(?!\z)"
    if whole:
        start += rf"(?!(?:{whole})\z)"
    if not controls:
        return [start]
    # The set of last characters is only there because it is quick to rule out.
    last = "".join({re.escape(token[-1]) for token in _of_type(tokens, types, _SPECIAL_TYPES)})
    return [
        rf"{start}(?!{controls})",
        rf"(?<=[{last}])(?<={controls})(?!\z| |{controls})",
    ]


def _alternatives(tokens: Sequence[str], types: Sequence[int], wanted: Sequence[TokenType]) -> str:
    return "|".join(re.escape(token) for token in _of_type(tokens, types, wanted))


def _of_type(tokens: Sequence[str], types: Sequence[int], wanted: Sequence[TokenType]) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if token and kind in wanted]


def _merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[list[str]]:
    """The merges that make BPE do what SentencePiece does with scores.

    SentencePiece joins any two neighbours whose joint text is a piece, the best score first, then
    the leftmost. So every way to cut a piece in two pieces is a merge, ranked by the piece's score.
    Of the ways to cut one piece the longest left part goes first: where two occurrences of a piece
    overlap by less than half of it, that is the leftmost.

    Merges have one rank each, so two things cannot be had: that of two pieces with equal scores the
    leftmost wins (the lower id does), and UNUSED pieces as steps on the way to others.
    """
    mergeable = {
        token: score
        for token, token_type, score in zip(tokens, types, scores, strict=True)
        if token_type == TokenType.NORMAL
    }
    # sorted() is stable: equal scores stay in order of id.
    ranked = sorted(mergeable, key=mergeable.__getitem__, reverse=True)
    return [
        [piece[:cut], piece[cut:]]
        for piece in ranked
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in mergeable and piece[cut:] in mergeable
    ]


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id; of two that are spelled alike the first one has the name."""
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}


def _added_tokens(tokens: Sequence[str], types: Sequence[int], *, normalized: bool) -> list[Json]:
    """Tokens that are found in text before BPE sees it; `normalized`: after its normalisation."""
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": normalized,
            "special": token_type in _SPECIAL_TYPES,
        }
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token.strip(" ") and token_type in (*_SPECIAL_TYPES, TokenType.USER_DEFINED)
    ]


def _post_processor(tokens: Sequence[str], bos: int | None, eos: int | None) -> Json | None:
    """Puts BOS before and EOS behind a text."""
    if bos is None and eos is None:
        return None

    def special(token_id: int | None) -> list[Json]:
        return (
            [] if token_id is None else [{"SpecialToken": {"id": tokens[token_id], "type_id": 0}}]
        )

    first: Json = {"Sequence": {"id": "A", "type_id": 0}}
    second: Json = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [*special(bos), first, *special(eos)],
        "pair": [*special(bos), first, *special(eos), *special(bos), second, *special(eos)],
        "special_tokens": {
            tokens[token_id]: {
                "id": tokens[token_id],
                "ids": [token_id],
                "tokens": [tokens[token_id]],
            }
            for token_id in (bos, eos)
            if token_id is not None
        },
    }


def _config(metadata: Mapping[str, Any], tokens: Sequence[str], add_bos: bool) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, key, tokens)
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    named = {
        name: metadata.get(f"tokenizer.chat_template.{name}")
        for name in metadata.get("tokenizer.chat_templates") or ()
    }
    if named:
        config["chat_template"] = [
            {"name": name, "template": text}
            for name, text in {"default": template, **named}.items()
            if text is not None
        ]
    elif template is not None:
        config["chat_template"] = template
    return config


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ModelError(f"{key} is {value!r}, but the file has {len(tokens)} tokens")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{key}: missing, or not a list of strings")
    return list(value)


def _token_types(metadata: Mapping[str, Any], size: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types = list(metadata.get(key, [TokenType.NORMAL] * size))
    if len(types) != size:
        raise ModelError(f"{key} has {len(types)} entries for {size} tokens")
    return types


def _scores(metadata: Mapping[str, Any], size: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    scores = list(metadata.get(key, ()))
    if len(scores) != size:
        raise ModelError(f"{key} has {len(scores)} entries for {size} tokens")
    return scores
