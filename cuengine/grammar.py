"""Grammars: which tokens may come next, so that an answer has the shape that was asked for.

A request's demand is compiled once (`GrammarCompiler.compile`, from any thread, cached), and gives
each sample a `Matcher` that follows its tokens and fills the sample's row of
`SamplingBatch.allowed_mask` before each draw. The work is llguidance's (a lexer of derivatives and
an Earley parser, with no table to build: a schema compiles in a millisecond or two), which is
imported when the first grammar is compiled. What a mask costs, `bench/structured.py` measures.

What samplers do with a mask is in device/sampler.py, when a sample ends in engine.py.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from cuengine.batch import UInt32
from cuengine.beside import Beside
from cuengine.errors import RequestError
from cuengine.grammar_errors import NOTHING, TOO_SLOW, in_own_words, without_lark
from cuengine.grammar_schema import (
    HALF_ESCAPE,
    countable,
    ends_in_an_escape,
    parts,
    problem_in,
    schemas,
)
from cuengine.structured_outputs import StructuredOutputsParams, bad_field

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

CACHED_GRAMMARS = 256
_MARK = "\x02"
_FORCED_TEXT = 256
"""Characters that are tokenized to find the first token of a text."""
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""What means something in a regular expression."""
# Between the tokens of JSON. llguidance would take any amount, and small models never stop.
WHITESPACE = r" |\r?\n[ \t]{0,40}"
_CLOSING, _ENDING = re.compile(rb"[\]}]"), re.compile(rb'"?\s*[,:]?\s*')
ALL_TOKENS = np.uint32(0xFFFFFFFF)
_PARALLEL_ROWS = 4
"""Masks from which on threads are worth their waking."""
MAX_DEMAND_BYTES = 256 * 1024
_STACK_BYTES = 512 << 20
"""llguidance goes as deep as the references of a demand. Only what is used takes memory."""
_MAX_ITEMS = 100_000
"""Of the parser, for one token: twice what llguidance has. Steps wait for them, 5 to 200 ms for
as many; a schema of 1,000 optional properties needs most of them. Its limit for one byte, 2,000,
would end choices between more than that, and bounds no more than this one does."""
_TOKEN_SECONDS, _KIB_SECONDS, _DEBT_TOKENS = 0.003, 0.001, 50
"""What a token may take of a CPU's time in the long run: as much for any demand, and as much more
for each of its KiB. An answer may be in debt with what so many tokens may take. Steps wait for it,
and items do not bound it: where many derivations lead to one item, as in an ambiguous grammar, it
is looked for that often among all the others. Ordinary schemas take 0.2 ms a token, one of 1,000
optional properties (40 KiB) 10 ms."""
_MAX_KIB = 64
"""Of a demand that count for that."""
_SLOW = 0.02
"""Seconds for masks that were computed together, from which on each is watched alone."""
_TRIALS, _TRIAL_TOKENS, _LONG_TRIAL_TOKENS = 2, 8, 32
"""Beginnings of answers that are tried before a grammar is taken, and their length; the last for
demands of more than `_LONG_DEMAND` bytes."""
_LONG_DEMAND = 4096
_MAX_BLAMED = 200
"""Schemas to compile in search of the one that is wrong."""


class GrammarTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Grammar:
    """A compiled demand."""

    def __init__(self, start: Matcher) -> None:
        self._start = start

    def matcher(self) -> Matcher:
        """For a sample that has no token yet."""
        return self._start.fork()


class Matcher:
    """Where one sample is in its grammar. Not thread-safe.

    complete  the text is all that the grammar allows, and its last token belongs to it
    watched   its masks are to be computed with nothing beside them, so that their time is known
    """

    __slots__ = ("_debt", "_inner", "_token_seconds", "_vocabulary", "complete", "watched")

    def __init__(
        self, inner: llguidance.LLMatcher, vocabulary: Vocabulary, token_seconds: float
    ) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._token_seconds = token_seconds
        self._debt = 0.0
        self.complete = False
        self.watched = False

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that are allowed where the grammar may end."""
        return self._vocabulary.eos_ids

    def fork(self) -> Matcher:
        """Another sample that has the same tokens so far."""
        other = Matcher(self._inner.deep_copy(), self._vocabulary, self._token_seconds)
        other._debt = self._debt
        return other

    @property
    def problem(self) -> str:
        """Why it can be followed no further; "" where it can."""
        if self._overdue:
            return TOO_SLOW
        return in_own_words(self._inner.get_error()) if self._inner.is_error() else ""

    def consume(self, token_id: int) -> Literal["stop", "error"] | None:
        """Follow a token that was drawn under the mask; why the sample ends with it, if it does.

        "stop": the grammar can go no further. "error": it cannot be followed any more, because a
        limit on time or memory was hit, or because no token of the vocabulary fits; see `problem`.
        """
        start = time.thread_time()
        ending = self._consume(token_id)
        self._debt = max(0.0, self._debt - self._token_seconds)
        self._charge(start)
        return "error" if ending is None and self._overdue else ending

    @property
    def _overdue(self) -> bool:
        return self._debt > _DEBT_TOKENS * self._token_seconds

    def _charge(self, start: float) -> None:
        """For what was computed since then, by this thread."""
        self._debt += time.thread_time() - start

    def _consume(self, token_id: int) -> Literal["stop", "error"] | None:
        inner = self._inner
        accepting = inner.is_accepting()
        failed = inner.is_error()
        if not failed and inner.consume_token(token_id):
            if not inner.is_stopped():
                return None
            if not inner.is_error():
                self.complete = token_id not in self._vocabulary.eos_ids
                return "stop"
        elif accepting and not failed:
            return "stop"  # Nothing could follow, and the model has no token to say so.
        return "error"

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens that were consumed."""
        if num_tokens:
            self._inner.rollback(num_tokens)
            self.complete = False

    def fill(self, row: UInt32, forbidden: Collection[int] = (), ahead: Sequence[int] = ()) -> None:
        """The mask of the next token, into `row` [ceil(vocab / 32)]. The matcher stays where it is.

        forbidden  tokens not to allow, unless there are no others
        ahead      tokens that may come before: behind one that the grammar refuses, and that so
                   cannot be drawn, all are allowed
        """
        start = time.thread_time()
        taken = 0
        while taken < len(ahead) and self._inner.try_consume_tokens([ahead[taken]]):
            taken += 1
        self._charge(start)
        if taken == len(ahead):
            self._vocabulary.fill_rows([(self, row, forbidden)])
        else:
            row[:] = ALL_TOKENS
        self.rollback(taken)

    def compute_mask(self, address: int, size: int) -> None:
        """The mask of the next token, to memory of `size` bytes."""
        start = time.thread_time()
        self._inner.unsafe_compute_mask_ptr(address, size)
        self._charge(start)
        self.watched = time.thread_time() - start > _SLOW


class MaskRow(NamedTuple):
    """What `Matcher.fill` is given for a row."""

    matcher: Matcher
    forbidden: Collection[int] = ()
    ahead: Sequence[int] = ()


def allowed_mask(rows: Sequence[MaskRow | None]) -> UInt32 | None:
    """`SamplingBatch.allowed_mask`: a row for each matcher, all tokens where there is none.

    None where no row has a matcher.
    """
    first = next((row for row in rows if row is not None), None)
    if first is None:
        return None
    vocabulary = first.matcher._vocabulary
    masks = np.full((len(rows), vocabulary.num_words), ALL_TOKENS)
    # The samples of a prompt that is just through have one matcher between them.
    first_rows: dict[Matcher, int] = {}
    todo: list[_Target] = []
    for i, row in enumerate(rows):
        if row is not None and not row.ahead and first_rows.setdefault(row.matcher, i) == i:
            todo.append((row.matcher, masks[i], row.forbidden))
    vocabulary.fill_rows(todo)
    for i, row in enumerate(rows):
        if row is None:
            continue
        if row.ahead:
            row.matcher.fill(masks[i], row.forbidden, row.ahead)
        elif first_rows[row.matcher] != i:
            masks[i] = masks[first_rows[row.matcher]]
    return masks


_Target = tuple[Matcher, UInt32, Collection[int]]
"""A matcher, where its mask goes, and tokens that are allowed only if there are no others."""


class Vocabulary:
    """A model's tokens as llguidance sees them.

    num_words  32-bit words of a mask
    eos_ids    allowed where the grammar may end
    closing    a mask of the tokens that close an object or list of JSON
    ending     a mask of those that end a string, a name or a value
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        import llguidance

        self.eos_ids = frozenset(eos_ids)
        self.num_words = -(-vocab_size // 32)
        known = range(min(vocab_size, tokenizer.vocab_size))
        tokens = [tokenizer.token_bytes(token_id) for token_id in known]
        tokens += [b""] * (vocab_size - len(tokens))
        ends = sorted(self.eos_ids)
        if not ends:
            # llguidance insists on one: a token that no sampler can draw.
            ends = [vocab_size]
            tokens.append(b"")
        special = {i for i in tokenizer.special_ids if i < vocab_size} | set(ends)
        source = _TokenSource(tokenizer, tokens, special, ends[0])
        self.tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(source), eos_token=ends)
        self._words_filled = -(-len(tokens) // 32)
        self.closing = self.bits([i for i in known if _CLOSING.search(tokens[i])])
        self.ending = self.bits([i for i in known if _ENDING.fullmatch(tokens[i])])

    def fill_rows(self, rows: Sequence[_Target]) -> None:
        """All masks at once, on several threads where there are many."""
        masks = np.empty((len(rows), self._words_filled), np.uint32)
        size = masks.shape[1] * 4
        address = masks.ctypes.data
        matchers = [matcher for matcher, _, _ in rows]
        alone = [i for i, m in enumerate(matchers) if m.watched or len(rows) < _PARALLEL_ROWS]
        if len(alone) < len(rows):
            together = [(m._inner, i) for i, m in enumerate(matchers) if not m.watched]
            start = time.perf_counter()
            self._executor.unsafe_compute_mask_ptr(together, address, size, len(rows))
            if time.perf_counter() - start > _SLOW:
                for _, i in together:
                    matchers[i].watched = True
        for i in alone:
            matchers[i].compute_mask(address + i * size, size)
        for mask, (_, row, forbidden) in zip(masks[:, : self.num_words], rows, strict=True):
            row[:] = mask
            if forbidden:
                rest = mask & ~self.bits(forbidden)
                if rest.any():
                    row[:] = rest

    def bits(self, token_ids: Collection[int]) -> UInt32:
        """A mask of these tokens alone."""
        bits: UInt32 = np.zeros(self.num_words, np.uint32)
        for token_id in token_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return bits

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        import llguidance

        return llguidance.LLExecutor()


class _TokenSource:
    """What llguidance asks of a tokenizer; the names are its own.

    Text that a grammar forces is given as the tokens that the model would have for it: it knows no
    others so well.
    """

    bos_token_id = None

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        tokens: list[bytes],
        special_ids: Collection[int],
        eos_token_id: int,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_token_id
        self._special_ids = frozenset(special_ids)
        self._encode = tokenizer.encode
        self._ids: dict[bytes, int] = {}
        for token_id in reversed(range(len(tokens))):
            if token_id not in self._special_ids:
                self._ids[tokens[token_id]] = token_id
        self._longest = max(map(len, self._ids), default=0)
        self._enough = max(_FORCED_TEXT, 8 * self._longest)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text is given as str")
        # Of text that is forced the mask has the first token, and the rest comes again with the
        # next: taken whole each time, a long text would take the square of its time.
        text = text[: self._enough]
        data = text.encode()
        token_ids = self._encode(text, add_special_tokens=False)
        if self._spell(token_ids, data):
            return token_ids
        # SentencePiece begins each text with a space. Behind a character that no token has more of,
        # the text is as it would be behind others.
        token_ids = self._encode(_MARK + text, add_special_tokens=False)
        for i, token_id in enumerate(token_ids):
            if token_id < len(self.tokens) and self.tokens[token_id].endswith(_MARK.encode()):
                if self._spell(token_ids[i + 1 :], data):
                    return token_ids[i + 1 :]
                break
        return list(self._longest_first(data))

    def _spell(self, token_ids: list[int], data: bytes) -> bool:
        """Whether they are the text and nothing else: no special token of that name."""
        if any(i in self._special_ids or i >= len(self.tokens) for i in token_ids):
            return False
        return b"".join(self.tokens[i] for i in token_ids) == data

    def _longest_first(self, data: bytes) -> Iterator[int]:
        """Ends at a byte that no token begins with."""
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token_id = self._ids.get(data[at : at + size])
                if token_id is not None:
                    yield token_id
                    at += size
                    break
            else:
                return


class GrammarCompiler:
    """Compiles demands for one model. May be used from several threads at once.

    vocab_size  rows of the model's logits
    eos_ids     tokens that end an answer where its grammar may end
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        self._make_vocabulary = partial(Vocabulary, tokenizer, vocab_size, eos_ids)
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises RequestError, with the place in `param`, for what cannot be followed.

        Threads that ask for the same at once wait for the one that compiles it.
        """
        key = params.key()
        with self._lock:
            future = self._cache.get(key)
            mine = future is None
            if future is None:
                future = self._cache[key] = Future()
            self._cache.move_to_end(key)
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        if mine:
            try:
                future.set_result(self._compile(params, len(key.encode())))
            except BaseException as error:
                with self._lock:
                    self._cache.pop(key, None)
                future.set_exception(error)
        return future.result()

    def _compile(self, params: StructuredOutputsParams, size: int) -> Grammar:
        if size > MAX_DEMAND_BYTES:
            raise bad_field(
                params.kind, f"it has {size} bytes, and at most {MAX_DEMAND_BYTES} can be compiled"
            )
        for name, regex in (
            ("regex", params.regex),
            ("whitespace_pattern", params.whitespace_pattern),
        ):
            if ends_in_an_escape(regex):
                raise bad_field(name, HALF_ESCAPE)
        if params.kind == "json":
            _check_schema(_schema(params))
        if params.kind == "grammar":
            _check_lark(params.grammar or "")
        return Beside(lambda: self._start(params, size), stack_bytes=_STACK_BYTES).result()

    def _start(self, params: StructuredOutputsParams, size: int) -> Grammar:
        with self._vocabulary_lock:
            vocabulary = self._vocabulary = self._vocabulary or self._make_vocabulary()
        start, problem = _start(vocabulary, _source(params), size)
        if problem:
            raise _explained(params, problem, lambda source: _start(vocabulary, source, size)[1])
        return Grammar(start)


def _start(vocabulary: Vocabulary, source: str, size: int) -> tuple[Matcher, str]:
    """A matcher, and what is wrong with the grammar, or "". Other threads may run meanwhile.

    size  of the demand, in bytes
    """
    import llguidance

    limits = llguidance.LLParserLimits(
        max_items_in_row=_MAX_ITEMS, step_max_items=_MAX_ITEMS, verbose_errors=False
    )
    inner = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)
    token_seconds = _TOKEN_SECONDS + _KIB_SECONDS * min(size / 1024, _MAX_KIB)
    start = Matcher(inner, vocabulary, token_seconds)
    if not inner.is_error():
        # The first mask costs more than those that follow: it is taken here, off the engine's step,
        # and no answer has to pay for it.
        mask = np.empty(vocabulary.num_words, np.uint32)
        start.fill(mask, vocabulary.eos_ids)
        start = Matcher(inner, vocabulary, token_seconds)
        if not inner.is_error():
            useful = inner.is_accepting() or (mask & ~vocabulary.bits(vocabulary.eos_ids)).any()
            tokens = _TRIAL_TOKENS if size <= _LONG_DEMAND else _LONG_TRIAL_TOKENS
            return start, _trouble_ahead(start, mask, tokens) if useful else NOTHING
    return start, start.problem


def _trouble_ahead(start: Matcher, mask: UInt32, num_tokens: int) -> str:
    """What ends answers within their first tokens, or "". mask: that of the first token.

    A grammar that outgrows llguidance's limits mostly does so where an answer gets to its widest
    part, which is soon. Some beginnings are tried, so that such a demand is refused, and no answer
    to it cut off. Every other token ends something if one can, so that objects get past their
    first properties; none closes one, as long as there are others.
    """
    vocabulary = start._vocabulary
    ends = vocabulary.bits(vocabulary.eos_ids)
    for trial in range(_TRIALS):
        matcher, row, rng = start.fork(), mask, random.Random(trial)
        for i in range(num_tokens):
            possible = _first_of(row & ~ends & ~vocabulary.closing, row & ~ends)
            if i % 2:
                possible = _first_of(possible & vocabulary.ending, possible)
            bits = np.unpackbits(possible.astype("<u4").view(np.uint8), bitorder="little")
            token_ids = np.flatnonzero(bits)
            if not len(token_ids):
                break
            ending = matcher.consume(int(rng.choice(token_ids)))
            if ending == "stop":
                break
            row = np.empty_like(mask)
            if ending is None:
                matcher.fill(row)
            if matcher.problem:
                return matcher.problem
    return ""


def _first_of(*masks: UInt32) -> UInt32:
    """The first that allows anything, or else the last."""
    return next((mask for mask in masks if mask.any()), masks[-1])


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises RequestError for what llguidance would take for ever over, or let pass."""
    for place, part in schemas("json", schema):
        if "x-guidance" in part:
            raise bad_field(f"{place}.x-guidance", "the server's options are not the client's")
    if found := problem_in("json", schema):
        raise bad_field(*found)


def _json_in_lark(grammar: str) -> Iterator[tuple[re.Match[str], int, Any]]:
    """The schemas in a grammar: where each is announced, where it ends, and the schema itself."""
    for found in re.finditer(r"%json\s*(?={)", grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance says what is wrong with it
        yield found, end, schema


def _check_lark(grammar: str) -> None:
    """The same for the schemas in a grammar, with the place as llguidance writes it: line(column).

    Options stay: there they are the grammar's own.
    """
    for found, _, schema in _json_in_lark(grammar):
        if problem := problem_in("%json", schema):
            line = grammar.count("\n", 0, found.start()) + 1
            column = found.start() - grammar.rfind("\n", 0, found.start())
            raise bad_field("grammar", f"at {line}({column}): {problem[0]}: {problem[1]}")


def _source(params: StructuredOutputsParams) -> str:
    """The demand in llguidance's own format."""
    from llguidance import LLMatcher

    match params.kind:
        case "json":
            return _json_source(params, _schema(params))
        case "json_object":
            return _json_source(params, {"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            # As one expression: for as many rules llguidance would take the square of their time.
            choices = (_SYNTAX.sub(r"\\\g<0>", text) for text in params.choice or ())
            return LLMatcher.grammar_from_regex("|".join(choices))
        case "grammar":
            return LLMatcher.grammar_from_lark(_countable_lark(_lark(params.grammar or "")))


def _schema(params: StructuredOutputsParams) -> dict[str, Any]:
    schema = params.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad_field("json", f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise bad_field("json", f"the schema is not a JSON object: {json.dumps(schema):.80}")
    return schema


def _json_source(params: StructuredOutputsParams, schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    pattern = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    options: JsonCompileOptions = {"whitespace_pattern": pattern}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    try:
        return LLMatcher.grammar_from_json_schema(countable(schema), overrides=options)
    except (ValueError, TypeError, RecursionError) as error:
        raise bad_field("json", f"the schema is not JSON: {error}") from None


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises whatever Python can
        raise bad_field("grammar", f"neither Lark nor GBNF: {error!s:.300}") from None


def _countable_lark(grammar: str) -> str:
    """With each schema in it made countable, in its place."""
    done, at = "", 0
    for found, end, schema in _json_in_lark(grammar):
        other = countable(schema)
        if other is not schema:
            done += grammar[at : found.end()] + json.dumps(other)
            at = end
    return done + grammar[at:]


def _explained(
    params: StructuredOutputsParams, problem: str, problem_of: Callable[[str], str]
) -> RequestError:
    """The error for a demand that does not compile, with the place within a schema."""
    if params.whitespace_pattern is not None:
        from llguidance import LLMatcher

        if trouble := problem_of(LLMatcher.grammar_from_regex(params.whitespace_pattern)):
            return bad_field("whitespace_pattern", without_lark(trouble))
    if params.kind != "json":
        return bad_field(
            params.kind, problem if params.kind == "grammar" else without_lark(problem)
        )
    schema = _schema(params)
    shared: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions") if name in schema
    }
    tries = iter(range(_MAX_BLAMED))

    def is_to_blame(part: object) -> bool:
        """Whether it fails in the same way on its own."""
        if not isinstance(part, dict) or next(tries, None) is None:
            return False
        try:
            return problem_of(_json_source(params, shared | part)) == problem
        except RequestError:
            return False

    place, part = "json", schema
    while found := next(((name, sub) for name, sub in parts(part) if is_to_blame(sub)), None):
        place, part = f"{place}.{found[0]}", found[1]
        shared = {name: shared[name] for name in shared if name not in part}
    return bad_field(place, problem)
