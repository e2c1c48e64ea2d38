"""Tokens to text while they come: no half characters, and stop strings.

What a token's bytes are, and how a whole list of tokens is decoded, is the tokenizer's business;
here is what must be remembered between two tokens of one sample, to which a Detokenizer belongs.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"
_EACH_BYTE = "cuengine.replace_each_byte"
_MAX_UTF8_BYTES = 4
_CONTEXT_TOKENS = 8  # more tokens than the longest character has bytes


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the bytes of tokens become text, for tokenizers whose decoder joins bytes.

    strip_start       spaces dropped at the very start of a text (SentencePiece's dummy prefix)
    replace_each_byte one U+FFFD per byte that is not UTF-8 (SentencePiece); else one per maximal
                      part of a character (byte-level BPE; Unicode 15, section 3.9, table 3-8)
    """

    strip_start: int = 0
    replace_each_byte: bool = False


class DetokenizerSource(Protocol):
    """What a Detokenizer asks of a tokenizer.

    text_rules is None where text is not simply the tokens' bytes in a row; `decode` is asked then.
    `token_id in tokenizer`: whether there is a token of that id (a model may have more rows).
    """

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def text_rules(self) -> TextRules | None: ...
    def __contains__(self, token_id: object) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class ByteText:
    """Text from bytes that come in pieces: what is complete at once, the rest when it is."""

    def __init__(self, rules: TextRules) -> None:
        errors = _EACH_BYTE if rules.replace_each_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)
        self._errors = errors
        self._strip = rules.strip_start

    def push(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text

    def half_bytes(self) -> bytes:
        """The bytes that are held back: the beginning of a character, or nothing."""
        return self._decoder.getstate()[0]

    def half_character(self) -> str:
        """What these bytes would be if no more came: U+FFFD, or nothing."""
        return self.half_bytes().decode("utf-8", self._errors)


class _ByteStream:
    """Tokens whose bytes are simply joined. A token costs what its bytes cost."""

    def __init__(
        self, tokenizer: DetokenizerSource, rules: TextRules, prompt: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._text = ByteText(rules)
        self._text.push(self._tail(prompt, _MAX_UTF8_BYTES + rules.strip_start))
        self._owed = self._text.half_character()

    def push(self, token_id: int) -> str:
        return self._without_prompt(self._text.push(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        return self._without_prompt(self._text.push(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        """U+FFFD for half a character at the prompt's end is prompt; one made whole is not."""
        if text:
            text, self._owed = text.removeprefix(self._owed), ""
        return text

    def _tail(self, prompt_backwards: Iterable[int], size: int) -> bytes:
        """The prompt's last bytes, `size` or more: UTF-8 finds its feet again within four."""
        parts: list[bytes] = []
        missing = size
        for token_id in prompt_backwards:
            parts.append(self._tokenizer.token_bytes(token_id))
            missing -= len(parts[-1])
            if missing <= 0:
                break
        return b"".join(reversed(parts))


class _WindowStream:
    """Tokens whose text depends on their neighbours (WordPiece, Metaspace, …).

    Decodes a few tokens twice, with and without the newest, and shows the difference; the tokens in
    front keep the decoder from treating the newest as the first of a text.
    """

    def __init__(self, tokenizer: DetokenizerSource, prompt: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        for token_id in prompt:
            self._window.append(token_id)
            if len(self._window) == _CONTEXT_TOKENS:
                break
        self._window.reverse()
        self._num_shown = len(self._window)
        text = self._decode(self._window)
        self._shown = text.rstrip(REPLACEMENT)
        self._owed = text[len(self._shown) :]

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._num_shown
        if len(text) <= len(self._shown) or (
            text.endswith(REPLACEMENT) and waiting < _CONTEXT_TOKENS
        ):
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        # Specials that are not to be seen are not in the window.
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            new, self._owed = new.removeprefix(self._owed), ""
        self._window = self._window[self._num_shown :] or self._window
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return new


class _StopString:
    """One stop string and how much of it the text's end matches (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length]
            length += text[i] == text[length]
            self._fallback[i + 1] = length

    def advance(self, character: str) -> bool:
        """Takes one more character; true where it completes the stop string."""
        if self.matched == len(self.text):
            self.matched = self._fallback[self.matched]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)

    def held(self) -> int:
        """Characters at the text's end that may still become this stop string."""
        if self.matched == len(self.text):
            return self._fallback[self.matched]
        return self.matched


class Detokenizer:
    """Turns one sample's tokens into text that is safe to show.

    The joined results of `push` and `flush` are `decode(prompt + output)` without `decode(prompt)`
    at its front. A character that began in the prompt (given as token ids) and is completed by the
    output belongs to the output. Token ids that the tokenizer does not know have no text.

    Of several stop strings the one that ends first wins; of those that end together, the longest.
    One that begins within the prompt does not count. Stop strings that end within the first
    `min_tokens` tokens are plain text. Amortised cost per token does not depend on the text so far.
    """

    def __init__(
        self,
        tokenizer: DetokenizerSource,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        prompt = (t for t in reversed(prompt_token_ids) if self._visible(t))
        rules = tokenizer.text_rules
        self._stream: _ByteStream | _WindowStream = (
            _WindowStream(tokenizer, prompt)
            if rules is None
            else _ByteStream(tokenizer, rules, prompt)
        )
        self._stops = [_StopString(text) for text in stop]
        self._include_stop = include_stop_str_in_output
        self._tokens_before_stop = min_tokens
        self._held = ""

    def push(self, token_id: int) -> str:
        """Text that is now safe to show, maybe none. After a stop string: none."""
        if self.stop_reason is not None:
            return ""
        text = self._stream.push(token_id) if self._visible(token_id) else ""
        if self._stops:
            text = self._until_stop(text)
        if self._tokens_before_stop:
            self._tokens_before_stop -= 1
        return text

    def flush(self) -> str:
        """What is still held back when the sample has ended; a half character becomes U+FFFD."""
        if self.stop_reason is not None:
            return ""
        text = self._stream.flush()
        if self._stops:
            text = self._until_stop(text)
        text, self._held = text + self._held, ""
        return text

    def _visible(self, token_id: int) -> bool:
        return token_id not in self._hidden and token_id in self._tokenizer

    def _until_stop(self, new: str) -> str:
        """Takes new text; returns what cannot become a stop string, up to one that is complete."""
        text = self._held + new
        for end, character in enumerate(new, len(self._held) + 1):
            hits = [stop for stop in self._stops if stop.advance(character)]
            if hits and not self._tokens_before_stop:
                self.stop_reason = max((stop.text for stop in hits), key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.stop_reason)]
        num_held = max(stop.held() for stop in self._stops)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]
