"""`echo`: a prompt's text in front of an answer's.

A prompt of token ids may end inside a character. If the answer makes it whole, it is the answer's;
else U+FFFD stands for it at the prompt's end. Which of the two is known with the answer's first
bytes.
"""

from __future__ import annotations

import codecs

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Echo:
    """The text of one prompt in front of one sample.

    text      the prompt's, with `stand_in` at its end where it ends inside a character
    half      the bytes of that character, none where there is none
    stand_in  the U+FFFD that `text` has for them
    """

    __slots__ = ("_decoder", "_stand_in", "_text")

    def __init__(self, text: str, half: bytes = b"", stand_in: str = "") -> None:
        self._text = text.removesuffix(stand_in)
        self._stand_in = stand_in
        self._decoder = _UTF8("replace")
        self._decoder.decode(half)

    def before(self, data: bytes, *, finished: bool) -> str:
        """What comes in front of the sample's next text; `data` are the bytes of its new tokens."""
        text, self._text = self._text, ""
        if self._stand_in:
            character = self._decoder.decode(data, finished)
            if character.startswith("\ufffd") or (finished and not character):
                text += self._stand_in
            if character:
                self._stand_in = ""
        return text
