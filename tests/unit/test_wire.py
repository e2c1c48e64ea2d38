"""What two processes say to each other: messages survive the way, broken bytes are noticed."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuengine import wire
from cuengine.config import EngineConfig
from cuengine.engine_view import EngineView, QueuedView, SequenceView, StepView
from cuengine.errors import RequestError
from cuengine.outputs import EngineOutput, Logprob, TokenOutput
from cuengine.sampling_params import BeamSearchParams, SamplingParams
from cuengine.sequence import Progress
from cuengine.stats import EngineStats
from cuengine.structured_outputs import StructuredOutputsParams
from cuengine.wire import (
    MAX_FRAME,
    Abort,
    Add,
    AddBeams,
    Admitted,
    Command,
    FinishSample,
    FrameReader,
    Launching,
    LoadFailed,
    Log,
    Look,
    Message,
    News,
    Ready,
    Report,
    Seen,
    Start,
    WireError,
    frame,
)

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}

SHAPE = StructuredOutputsParams(json={"a": [1, None]})

COMMANDS: list[Message] = [
    Start(
        EngineConfig(model="m", kv_cache_memory=2**40, speculative_config=SPECULATION),
        {"": 30, "cuengine": 10},
    ),
    Add("1", [1, 2, 3], SamplingParams(seed=2**64 - 1, logit_bias={7: -1.5}, stop=["\u0e17", "x"])),
    Add("2", [0], SamplingParams(seed=-(2**63)), -3, "salt", Progress([[5, 6], None, []], 16)),
    Add(
        "3", [0], SamplingParams(structured_outputs=StructuredOutputsParams(json={"a": [1, None]}))
    ),
    AddBeams("4", [1], BeamSearchParams(4, None, early_stopping="never", length_penalty=0.5)),
    FinishSample("1", 2),
    Abort("2"),
    Look(),
]
REPORTS: list[Message] = [
    Ready(2048, 100, 49152),
    LoadFailed("ModelError", "config.json: missing"),
    Admitted("1"),
    Admitted("2", "too long", "prompt", "context_length_exceeded"),
    Launching(2**40, ["1", "2"]),
    News(
        [
            EngineOutput(
                "1",
                [
                    TokenOutput(0, 5, {5: Logprob(-0.5, 1), 9: Logprob(float("-inf"))}),
                    TokenOutput(2, 6, None, "stop", 6),
                ],
                [None, {3: Logprob(-2.0, 4)}],
                32,
            )
        ],
        EngineStats(num_steps=3, mean_batch=1.5, num_accepted_tokens_per_pos=(2, 1)),
        3,
    ),
    Seen(
        EngineView(
            time=12.5,
            block_size=16,
            ref_counts=bytes([0, 1, 255]),
            cached=b"\x05",
            running=[SequenceView("1", 2, 1, 10, 20, 19, 20, b"\1\0\0\0\2\0\0\0")],
            queue=[QueuedView("2", 0, 7, "swapped")],
            queued={"waiting": 0, "swapped": 1},
            num_host_blocks=8,
            num_free_host_blocks=7,
            steps=[StepView(2**40, 3, 12, 2, 8)],
            token_budget=512,
            speculative=True,
            stats=EngineStats(num_steps=3, num_accepted_tokens_per_pos=(2, 1)),
        )
    ),
    Log("cuengine", 30, "lowered", 12.5, "Traceback"),
]


@pytest.mark.parametrize(("kind", "messages"), [(Command, COMMANDS), (Report, REPORTS)])
def test_messages_arrive_as_they_were_sent_however_the_bytes_are_cut(
    kind: object, messages: list[Message]
):
    data = b"".join(map(frame, messages))
    rng = random.Random(0)
    for longest in (1, 2, 7, 100, len(data)):
        reader: FrameReader[Message] = FrameReader(kind)
        received: list[Message] = []
        at = 0
        while at < len(data):
            size = rng.randint(1, longest)
            received += reader.feed(data[at : at + size])
            at += size
        assert received == messages


def test_every_message_there_is_was_tried():
    tried = {type(message) for message in COMMANDS + REPORTS}
    assert tried == {kind for kind in Message.__subclasses__() if kind.__module__ == wire.__name__}


def test_a_frame_that_is_not_complete_is_waited_for():
    reader: FrameReader[Message] = FrameReader(Command)
    data = frame(Abort("1"))
    assert reader.feed(data[:-1]) == []
    assert reader.feed(data[-1:] + data) == [Abort("1"), Abort("1")]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"key": "1"}),
        msgspec.msgpack.encode(["abort"]),
        msgspec.msgpack.encode(["nonsense", "1"]),
        msgspec.msgpack.encode(["finish", "1", "two"]),
        msgspec.msgpack.encode(["abort", "1"])[:-1],
        msgspec.msgpack.encode(["abort", "1"]) + b"\x00",
        b"\x91" * 5000,
    ],
)
def test_content_that_is_no_message_is_an_error(content: bytes):
    reader: FrameReader[Message] = FrameReader(Command)
    with pytest.raises(WireError, match="no message"):
        reader.feed(len(content).to_bytes(4, "big") + content)


def test_a_value_that_its_own_class_refuses_is_an_error():
    bad = msgspec.msgpack.encode(["add", "1", [1], {"temperature": -1}])
    reader: FrameReader[Message] = FrameReader(Command)
    with pytest.raises(WireError, match="temperature"):
        reader.feed(len(bad).to_bytes(4, "big") + bad)


def test_a_frame_longer_than_allowed_is_refused_before_it_has_come():
    reader: FrameReader[Message] = FrameReader(Command)
    with pytest.raises(WireError, match=f"at most {MAX_FRAME}"):
        reader.feed(b"\xff\xff\xff\xff")


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(data: bytes):
    reader: FrameReader[Message] = FrameReader(Command)
    try:
        messages = reader.feed(data)
    except WireError:
        return
    assert all(isinstance(message, Message) for message in messages)


@pytest.mark.parametrize(
    "message",
    [
        Add("1", [1], SamplingParams(), priority=2**70),
        Add("1", [1], SamplingParams(), cache_salt="\ud800"),
    ],
)
def test_what_msgpack_cannot_say_is_an_error_of_who_says_it(message: Message):
    with pytest.raises(WireError, match="cannot be sent"):
        frame(message)


def test_a_problem_comes_back_as_the_error_it_was():
    error = Admitted("1", "too long", "prompt", "context_length_exceeded").error
    assert isinstance(error, RequestError)
    assert (str(error), error.param, error.code) == (
        "too long",
        "prompt",
        "context_length_exceeded",
    )
    assert Admitted("1").error is None
