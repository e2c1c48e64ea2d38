"""What the server's process and the engine's say to each other, and how it looks on their socket.

A frame is the length of its content as four bytes, most significant first, and then one message in
msgpack. Who says what when is in async_engine.py and engine_process.py.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from cuengine.config import EngineConfig
from cuengine.engine_view import EngineView
from cuengine.errors import CuengineError, RequestError
from cuengine.outputs import EngineOutput
from cuengine.sampling_params import BeamSearchParams, SamplingParams
from cuengine.sequence import Progress
from cuengine.stats import EngineStats

MAX_FRAME = 2**31 - 1
"""Bytes of one message. (100 log-probabilities for each token of a prompt of 128k are 600 MB.)"""

_HEADER = 4


class WireError(CuengineError):
    """Bytes that are no message: the other side is broken."""


class Message(msgspec.Struct, gc=False, array_like=True):
    """Anything that is said; its first element in msgpack names it."""


class Start(Message, tag="start"):
    """First of all: what to load, and which log records are wanted.

    log_levels  logger name -> level, "" for all others
    """

    config: EngineConfig
    log_levels: dict[str, int]


class Add(Message, tag="add"):
    """A request, and what it has got already from an engine that is gone.

    key  names it from now on; never used twice in the life of a process
    """

    key: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    progress: Progress | None = None


class AddBeams(Message, tag="add_beams"):
    """A beam search, which always begins at the prompt; else as Add."""

    key: str
    prompt_token_ids: list[int]
    params: BeamSearchParams
    priority: int = 0
    cache_salt: str | None = None


class FinishSample(Message, tag="finish"):
    """End one sample: its text has come to a stop string."""

    key: str
    index: int


class Abort(Message, tag="abort"):
    """Forget a request."""

    key: str


class Look(Message, tag="look"):
    """Say what is to be seen of the engine; answered by one Seen."""


class Ready(Message, tag="ready"):
    """The engine is loaded."""

    max_model_len: int
    num_blocks: int
    vocab_size: int


class LoadFailed(Message, tag="failed"):
    """It is not, for a reason that its user is told; the name is that of an error's class."""

    error: str
    message: str


class Admitted(Message, tag="admitted"):
    """A request has its place in the queue, or has none because of a problem."""

    key: str
    problem: str | None = None
    param: str | None = None
    code: str | None = None

    @property
    def error(self) -> RequestError | None:
        if self.problem is None:
            return None
        return RequestError(self.problem, param=self.param, code=self.code)


class Launching(Message, tag="launching"):
    """Whom the steps from this one on run, until another message says so; the first step is 1."""

    step: int
    keys: list[str]


class News(Message, tag="news"):
    """What a step brought, and how things are.

    num_steps  steps whose tokens are known by now
    """

    outputs: list[EngineOutput]
    stats: EngineStats
    num_steps: int


class Seen(Message, tag="seen"):
    """The engine between two steps; its requests are named by their keys."""

    view: EngineView


class Log(Message, tag="log"):
    """A log record. exception: its traceback, where there was one."""

    logger: str
    level: int
    message: str
    created: float
    exception: str | None = None


Command = Start | Add | AddBeams | FinishSample | Abort | Look
Report = Ready | LoadFailed | Admitted | Launching | News | Seen | Log

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """A message as it is sent.

    Raises WireError for what msgpack has not (a number of more than 64 bits, text that is not
    Unicode, nesting without end) and for more than MAX_FRAME bytes.
    """
    buffer = bytearray(_HEADER)
    try:
        _encoder.encode_into(message, buffer, _HEADER)
    except (OverflowError, UnicodeError, RecursionError) as error:
        raise WireError(f"it cannot be sent between processes: {error}") from error
    length = len(buffer) - _HEADER
    if length > MAX_FRAME:
        raise WireError(f"a message of {length} bytes; at most {MAX_FRAME} are allowed")
    buffer[:_HEADER] = length.to_bytes(_HEADER, "big")
    return bytes(buffer)


class FrameReader(Generic[T]):
    """Puts messages together from bytes as they come. After a WireError it is of no more use."""

    def __init__(self, kind: Any) -> None:
        """kind: T, the union of the messages that may come."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes. Raises WireError for bytes that are none."""
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _HEADER:
            length = int.from_bytes(buffer[start : start + _HEADER], "big")
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
            end = start + _HEADER + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as whole, whole[start + _HEADER : end] as content:
                messages.append(self._decode(content))
            start = end
        del buffer[:start]
        return messages

    def _decode(self, content: memoryview) -> T:
        try:
            return self._decoder.decode(content)
        except (msgspec.MsgspecError, CuengineError, RecursionError) as error:
            raise WireError(f"a frame of {len(content)} bytes is no message: {error}") from error
