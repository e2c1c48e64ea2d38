"""Text beyond ASCII over HTTP, streamed and whole, on all routes and with both kinds of tokenizer.

The engine says exact tokens, which cut characters and stop strings wherever hypothesis likes; what
makes text of them is the real output processor. Expected texts come from the characters themselves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeTemplate
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import Serve, Served
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from cuengine.engine import EngineOutput, TokenOutput
from cuengine.model.tokenizer import Tokenizer, byte_characters
from cuengine.output_processor import OutputProcessor
from cuengine.outputs import RequestDelta
from cuengine.sampling_params import RequestParams, SamplingParams

REPLACEMENT = "\ufffd"

# Emoji (with modifiers, joiners, flags), CJK, Thai, combining marks, right to left, plain.
CHARACTERS = [
    *"ab .\n", "é", "ß", "日", "本", "語", "한", "ภ", "า", "ษ", "ไ", "ท", "ย", "\u0e49", "\u0301",
    "\u0308", "e\u0301", "न", "\u093f", "م", "\u200d", "\ufe0f", "😀", "👍🏽",
    "👩\u200d👩\u200d👧", "🇩🇪", "𝔘", "\U0010ffff", REPLACEMENT,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=12).map("".join)
# No stop string begins with a space, which SentencePiece has in its pieces.
STOPS = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=3).map("".join)


def byte_level() -> FastTokenizer:
    """All bytes, and pieces of several of them, of which many cut characters."""
    whole = "".join(CHARACTERS).encode()
    pieces = [bytes([byte]) for byte in range(256)]
    runs = {whole[i : i + size] for size in (2, 3, 5, 7) for i in range(0, len(whole) - size, 3)}
    pieces += sorted(runs)
    letters = byte_characters()
    vocabulary = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>")])
    return tokenizer


def sentencepiece() -> FastTokenizer:
    """As LLaMA 2's: pieces of whole characters, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    known = [letter for text in CHARACTERS[:20] for letter in text if letter not in " \n"]
    pieces += [*sorted(set(known)), "日本", "ภา", "ab", "▁a", "😀."]
    tokenizer = FastTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


@dataclass
class Words:
    """A tokenizer, and what its tokens are good for: the bytes of each but the special ones."""

    tokenizer: Tokenizer
    single: dict[int, int]
    longer: dict[bytes, int]

    def spell(self, data: bytes, choose: Callable[[Sequence[int]], int]) -> list[int]:
        """Tokens whose bytes are `data`; where several lengths fit, `choose` takes one."""
        ids, at = [], 0
        while at < len(data):
            fits = [size for size in range(2, 9) if data[at : at + size] in self.longer]
            size = choose([1, *(size for size in fits if at + size <= len(data))])
            piece = data[at : at + size]
            ids.append(self.single[data[at]] if size == 1 else self.longer[piece])
            at += size
        return ids


def words(fast: FastTokenizer, first_byte: int) -> Words:
    tokenizer = Tokenizer(fast)
    single = {byte: first_byte + byte for byte in range(256)}
    others = set(range(tokenizer.vocab_size)) - set(single.values()) - tokenizer.special_ids
    longer = {tokenizer.token_bytes(token): token for token in others}
    return Words(tokenizer, single, {piece: t for piece, t in longer.items() if len(piece) > 1})


WORDS = {"byte-level": words(byte_level(), 0), "sentencepiece": words(sentencepiece(), 3)}


@dataclass
class SayingEngine(FakeEngine):
    """Says `says`, some tokens a step; text, and stop strings, come from the output processor."""

    says: list[int] = field(default_factory=list)
    tokens_a_step: int = 1

    async def generate(
        self, prompt_token_ids: list[int], params: RequestParams, *, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestDelta, None]:
        assert isinstance(params, SamplingParams)
        assert self.tokenizer is not None
        processor = OutputProcessor(self.tokenizer, lambda *_: None)  # type: ignore[arg-type]
        processor.add_request(request_id, prompt_token_ids, params)
        says = self.says[: params.max_tokens]
        last = len(says) - 1
        tokens = [
            TokenOutput(0, token, None, "length" if at == last else None)
            for at, token in enumerate(says)
        ]
        for at in range(0, len(tokens), self.tokens_a_step):
            step = [EngineOutput(request_id, tokens[at : at + self.tokens_a_step])]
            for delta in processor.process(step):
                yield delta
                if delta.finished:
                    return


# --- what each route makes of it ----------------------------------------------------------------


async def _completions(served: Served, **fields: Any) -> tuple[str, str, Any]:
    """The whole text, the joined stream, and why it ended, by vLLM's two reasons."""
    path = "/v1/completions"
    status, answer = await served.post(path, fields)
    assert status == 200, answer
    (choice,) = answer["choices"]
    choices = [event["choices"][0] for event in await served.events(path, fields)]
    assert _reasons(choices[-1]) == _reasons(choice)
    return choice["text"], "".join(part["text"] for part in choices), _reasons(choice)


async def _chat(served: Served, prompt: Any, **fields: Any) -> tuple[str, str, Any]:
    path = "/v1/chat/completions"
    body = fields | {"messages": [{"role": "user", "content": "hi"}]}
    status, answer = await served.post(path, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    choices = [event["choices"][0] for event in await served.events(path, body)]
    streamed = "".join(part["delta"].get("content") or "" for part in choices)
    assert _reasons(choices[-1]) == _reasons(choice)
    return choice["message"]["content"] or "", streamed, _reasons(choice)


async def _responses(served: Served, prompt: Any, **fields: Any) -> tuple[str, str, Any]:
    path = "/v1/responses"
    limit = fields.pop("max_tokens", None)
    body = fields | {"input": "hi"} | ({} if limit is None else {"max_output_tokens": limit})
    status, answer = await served.post(path, body)
    assert status == 200, answer
    whole = "".join(part["text"] for item in answer["output"] for part in item["content"])
    _, text = await served.post(path, body | {"stream": True})
    deltas, done = [], None
    for kind, data in _named_events(text):
        if kind == "response.output_text.delta":
            deltas.append(data["delta"])
        elif kind == "response.output_text.done":
            done = data["text"]
    streamed = "".join(deltas)
    assert done == streamed
    return whole, streamed, None


def _named_events(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        if name.startswith("event: "):
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def _reasons(choice: Any) -> tuple[str, Any]:
    return choice["finish_reason"], choice.get("stop_reason")


ROUTES = {"completions": _completions, "chat": _chat, "responses": _responses}


# --- oracles ------------------------------------------------------------------------------------


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where and by which stop string a text ends: the first end, and of these the longest."""
    for end in range(1, len(text) + 1):
        if hits := [one for one in stop if text[:end].endswith(one)]:
            return end, max(hits, key=len)
    return None


def expected_text(text: str, stop: Sequence[str]) -> tuple[str, Any]:
    found = first_stop(text, stop)
    if found is None:
        return text, ("length", None)
    return text[: found[0] - len(found[1])], ("stop", found[1])


def cut_text(data: bytes, kind: str) -> str:
    """Text of bytes that end inside a character: one U+FFFD, or with SentencePiece one a byte."""
    whole = data.decode(errors="ignore")
    rest = len(data) - len(whole.encode())
    return whole + REPLACEMENT * (min(rest, 1) if kind == "byte-level" else rest)


@pytest.mark.parametrize("kind", list(WORDS))
@pytest.mark.parametrize("route", list(ROUTES))
async def test_text_is_what_the_tokens_spell_streamed_and_whole(
    serve: Serve, kind: str, route: str
) -> None:
    """With stop strings anywhere in it, and a prompt whose last character it completes."""
    vocabulary = WORDS[kind]
    engine = SayingEngine(chat_template=FakeTemplate())
    engine.tokenizer = vocabulary.tokenizer  # type: ignore[assignment]
    served = await serve(engine)
    loop = asyncio.get_running_loop()

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    @example(text="a😀ภาษา", stop=["ภา"], begun=0, limit=None, step=1, data=None)
    @example(text="😀b", stop=[], begun=2, limit=None, step=1, data=None)
    @example(text="日", stop=[], begun=1, limit=1, step=1, data=None)
    @example(text="😀", stop=[], begun=1, limit=2, step=2, data=None)
    @example(
        text="e\u0301👩\u200d👩\u200d👧!", stop=["\u200d👧"], begun=1, limit=None, step=3, data=None
    )
    @given(
        text=TEXTS,
        stop=st.lists(STOPS, max_size=3),
        begun=st.integers(0, 3),
        limit=st.none() | st.integers(1, 12),
        step=st.integers(1, 4),
        data=st.data(),
    )
    def check(
        text: str, stop: list[str], begun: int, limit: int | None, step: int, data: Any
    ) -> None:
        def choose(sizes: Sequence[int]) -> int:
            return max(sizes) if data is None else data.draw(st.sampled_from(sizes))

        spelled = text.encode()
        # Only completions take a prompt as tokens: so many bytes of the first character are in it.
        # (Half of a U+FFFD is what stands for any half of a character: it is left out.)
        takes_half = route == "completions" and text[0] != REPLACEMENT
        begun = min(begun, len(text[0].encode()) - 1) if takes_half else 0
        prompt = vocabulary.spell(b"x" + spelled[:begun], choose)
        engine.says = vocabulary.spell(spelled[begun:], choose)
        engine.tokens_a_step = step
        completed = True
        if limit is not None and limit < len(engine.says):
            bytes_said = b"".join(map(vocabulary.tokenizer.token_bytes, engine.says[:limit]))
            whole_text = cut_text(spelled[:begun] + bytes_said, kind)
            if begun and len(bytes_said) < len(text[0].encode()) - begun:
                # Not even the character that began in the prompt is whole: what stands for it, the
                # prompt has; but with SentencePiece each byte of it has a stand-in of its own.
                whole_text = cut_text(bytes_said, kind) if kind == "sentencepiece" else ""
                completed = False
        else:
            whole_text = text
        fields = {"prompt": prompt} | ({} if limit is None else {"max_tokens": limit})
        if limit is None:
            fields["max_tokens"] = 1000
        wanted, reasons = expected_text(whole_text, stop)
        run = ROUTES[route](served, **fields, stop=stop)
        whole, streamed, ended = asyncio.run_coroutine_threadsafe(run, loop).result(60)
        assert whole == wanted
        assert streamed == wanted
        assert ended in (None, reasons)
        if route == "completions":
            run = _completions(served, **fields, stop=stop, echo=True)
            whole, streamed, _ = asyncio.run_coroutine_threadsafe(run, loop).result(60)
            shown = "x" if completed else cut_text(b"x" + spelled[:begun], kind)
            assert whole == shown + wanted
            assert streamed == shown + wanted

    await asyncio.to_thread(check)
