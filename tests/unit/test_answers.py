"""What a replica says of its requests, and how often."""

from __future__ import annotations

import asyncio

import pytest

from cuengine.outputs import EngineOutput, FinishReason, TokenOutput
from cuengine.ray_backend import answers
from cuengine.ray_backend.answers import Answers
from cuengine.ray_backend.messages import Taken, Told
from cuengine.sampling_params import SamplingParams
from cuengine.stats import EngineStats
from cuengine.wire import Abort, Add, Command, FrameReader, News, frame


class Listener:
    """Reads a stream, and notes when there was nothing in an item but a sign of life."""

    def __init__(self, replica: Answers, key: str, signs: list[str]) -> None:
        self.items: list[bytes] = []
        self._key, self._signs = key, signs
        command = Add(key, [1, 2], SamplingParams(max_tokens=4), 0, None, None)
        self.task = asyncio.create_task(self._listen(replica, command))

    async def _listen(self, replica: Answers, command: Add) -> None:
        async for item in replica.stream(command):
            self.items.append(item)
            if not item:
                self._signs.append(self._key)


async def test_of_a_thousand_waiting_streams_one_has_the_sign_of_life_for_all_of_its_server(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(answers, "HEARTBEAT", 0.02)
    replica = Answers("replica", 8, lambda _command: None)
    signs: list[str] = []
    start = asyncio.get_running_loop().time()
    listeners = [Listener(replica, f"{'ab'[i % 2]}-{i}", signs) for i in range(1000)]
    while any(sum(sign[0] == server for sign in signs) < 10 for server in "ab"):
        await asyncio.sleep(0.01)
    seconds = asyncio.get_running_loop().time() - start
    assert len(signs) <= 2 * (seconds / (0.75 * 0.02) + 1)
    for listener in listeners:
        listener.task.cancel()
    await asyncio.gather(*(listener.task for listener in listeners), return_exceptions=True)
    assert not len(replica)


async def test_what_a_server_that_is_gone_had_running_is_aborted():
    sent: list[Command] = []
    replica = Answers("replica", 8, sent.append)
    listeners = [Listener(replica, key, []) for key in ("a-0", "b-0", "a-1")]
    while len(replica) < 3 or not all(listener.items for listener in listeners):
        await asyncio.sleep(0)
    assert replica.give_up("a") == 2
    await asyncio.gather(listeners[0].task, listeners[2].task)
    assert [command for command in sent if isinstance(command, Abort)] == [
        Abort("a-0"),
        Abort("a-1"),
    ]
    assert len(replica) == 1
    reader: FrameReader[Taken] = FrameReader(Taken)
    assert reader.feed(listeners[0].items[0]) == [Taken("replica")]
    assert listeners[0].items == [frame(Taken("replica"))]
    listeners[1].task.cancel()


async def test_tokens_that_come_faster_than_ray_can_take_them_come_together_and_the_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(answers, "ITEMS_A_SECOND", 0.001)  # none, as far as this test goes
    replica = Answers("replica", 8, lambda _command: None)
    listener = Listener(replica, "a-0", [])

    async def draw(token_id: int, finish_reason: FinishReason | None = None) -> list[list[int]]:
        token = TokenOutput(0, token_id, finish_reason=finish_reason)
        replica.on_report(News([EngineOutput("a-0", [token])], EngineStats(num_running=1), 1))
        for _ in range(20):
            await asyncio.sleep(0)
        reader: FrameReader[Told] = FrameReader(Told)
        return [
            [token.token_id for output in told.outputs for token in output.tokens]
            for item in listener.items
            for told in reader.feed(item)
            if isinstance(told, News)
        ]

    for _ in range(5):
        await asyncio.sleep(0)
    assert await draw(1) == [[1]]
    assert await draw(2) == [[1]]
    assert await draw(3) == [[1]]
    assert await draw(4, "length") == [[1], [2, 3, 4]]
    await listener.task
