"""Engines on a Ray cluster of two nodes on this machine: replicas and nodes are lost, and replaced.

What does not need Ray is tested in tests/unit/test_ray_engine.py and test_prefix_routing.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_control import Control, patiently, until

from cuengine.config import EngineConfig
from cuengine.errors import ConfigError, EngineDiedError, EngineStoppedError
from cuengine.ray_backend import environment
from cuengine.ray_backend.client import RayEngine
from cuengine.ray_backend.settings import RaySettings
from cuengine.sampling_params import SamplingParams
from cuengine.text_side import load_text_side

environment.prepare(starts_ray=False)
ray = pytest.importorskip("ray", reason="needs the package ray, of the extra `ray`")

from controlled_replica import ControlledReplica  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from cuengine.ray_backend import deployment  # noqa: E402
from cuengine.ray_backend.deployment import ServeFleet  # noqa: E402

pytestmark = [pytest.mark.accept, pytest.mark.asyncio(loop_scope="module")]

MARGIN = 4.0
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
TESTS = Path(__file__).parents[1]


@dataclass
class Machines:
    """Two nodes with room for one replica each; the first one is the head, which stays."""

    cluster: Cluster
    other: Any
    fleet: ServeFleet
    engine: RayEngine
    config: EngineConfig

    def signal_replica(self, node: Any, number: signal.Signals) -> None:
        """To the process of the replica on a node."""
        raylet = node.all_processes["raylet"][0].process.pid
        replicas = [pid for pid in children(raylet) if name_of(pid).startswith("ray::ServeReplica")]
        assert len(replicas) == 1
        os.kill(replicas[0], number)


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def start_cluster() -> tuple[Cluster, Any]:
    """Ray gives a node 30 seconds to start, which a busy machine may take longer for."""
    for attempts_left in (3, 2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(**NODE)
            return cluster, cluster.add_node(**NODE)
        except Exception:
            cluster.shutdown()
            if not attempts_left:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def cluster(module_control: Control) -> Iterator[tuple[Cluster, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setattr(deployment, "Replica", ControlledReplica)
        cluster, other = start_cluster()
        ray.init(address=cluster.address, logging_level="warning")
        yield cluster, other
        ray.shutdown()
        cluster.shutdown()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def machines(cluster: tuple[Cluster, Any], tiny_chat_model: Path) -> AsyncIterator[Machines]:
    config = EngineConfig(
        model=str(tiny_chat_model), device="cpu", max_model_len=640, num_blocks=1024
    )
    text = load_text_side(config, lambda _config: None)
    settings = RaySettings(replicas=2, cpus=0.6, prefix_margin=MARGIN, drain_timeout=60)
    fleet = ServeFleet(config, settings, step_timeout=0)
    ready = await asyncio.to_thread(fleet.deploy)
    engine = RayEngine(config, text, ready, fleet)
    await engine.start()
    yield Machines(*cluster, fleet, engine, config)
    await engine.stop()


@dataclass
class Listener:
    """Gets the answer to one request."""

    engine: RayEngine
    name: str
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    cached: int = 0

    async def listen(self) -> Listener:
        stream = self.engine.generate(self.prompt, self.params, request_id=self.name)
        async for delta in stream:
            self.cached = delta.num_cached_tokens
            for sample in delta.sequences:
                self.tokens += sample.token_ids
                self.text += sample.text
        return self


def forty(engine: RayEngine, name: str) -> list[Listener]:
    """Greedy ones, and such as draw."""
    return [
        Listener(
            engine,
            f"{name}{i}",
            [20 + i, 9, 30 + i],
            SamplingParams(temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True),
        )
        for i in range(40)
    ]


async def listen_to(listeners: list[Listener]) -> list[Listener]:
    return await patiently(asyncio.gather(*(listener.listen() for listener in listeners)))


def where(engine: RayEngine) -> Counter[str | None]:
    """Requests by the replica that has taken them."""
    return Counter(run.replica for run in engine._runs.values())


async def settled(engine: RayEngine) -> None:
    """Nothing runs anywhere, and all of that has been heard."""

    def idle() -> bool:
        replicas = engine.replicas().values()
        busy = any(s.num_running or s.num_waiting or s.num_used_blocks for s in replicas)
        return len(replicas) == 2 and not busy and not engine._runs

    await until(idle)


def shared_prefix(engine: RayEngine, name: str, count: int, first: int) -> list[Listener]:
    """Prompts that have 500 tokens in common, and no others."""
    prefix = [first + i % 7 for i in range(500)]
    wanted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return [Listener(engine, f"{name}{i}", [*prefix, *[10 + i] * 20], wanted) for i in range(count)]


async def test_a_shared_prefix_of_500_tokens_lands_on_one_replica_at_low_load(machines: Machines):
    engine = machines.engine
    await settled(engine)
    before = dict(engine.replicas())
    for listener in shared_prefix(engine, "low", 12, 100):
        await patiently(listener.listen())
        assert listener.cached in (0, 496)
    await asyncio.sleep(2)  # for the last figures
    await settled(engine)
    gained = {
        name: (
            stats.prompt_tokens - before[name].prompt_tokens,
            stats.prefix_hits - before[name].prefix_hits,
        )
        for name, stats in engine.replicas().items()
    }
    assert sorted(gained.values()) == [(0, 0), (12 * 520, 11 * 496)]
    print(
        f"\n12 requests with one prefix: {100 * 11 * 496 / (12 * 520):.0f} % of tokens were cached"
    )


async def test_the_same_prefix_is_spread_at_high_load(machines: Machines, control: Control):
    engine = machines.engine
    await settled(engine)
    control.close()
    tasks = asyncio.ensure_future(listen_to(shared_prefix(engine, "high", 40, 150)))
    await until(lambda: len(engine._runs) == 40 and None not in where(engine))
    counts = where(engine)
    assert len(counts) == 2
    assert max(counts.values()) - min(counts.values()) <= MARGIN + 2
    print(f"\n40 requests with one prefix at once: {sorted(counts.values())}")
    control.open()
    await tasks


async def test_a_client_that_leaves_frees_its_blocks(machines: Machines, control: Control):
    engine = machines.engine
    await settled(engine)
    control.close()
    listener = Listener(engine, "leaves", [5] * 100, SamplingParams(max_tokens=500))
    task = asyncio.create_task(listener.listen())
    await until(lambda: len(engine._runs) == 1 and None not in where(engine))
    begun = control.begun
    control.open()
    await until(lambda: len(listener.tokens) > 3)
    task.cancel()
    await until(lambda: not engine._runs)
    await settled(engine)
    assert control.begun > begun
    assert len(listener.tokens) < 500


async def test_a_stop_string_ends_one_sample_of_a_request_and_not_the_other(machines: Machines):
    engine = machines.engine

    async def answer(stop: list[str]) -> dict[int, list[int]]:
        wanted = SamplingParams(n=2, temperature=1, seed=3, max_tokens=40, ignore_eos=True)
        wanted.stop = stop
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async for delta in engine.generate([7, 8, 9], wanted, request_id=f"stop{len(stop)}"):
            for sample in delta.sequences:
                tokens[sample.index] += sample.token_ids
        return tokens

    whole = await patiently(answer([]))
    assert engine.tokenizer is not None
    texts = {i: [engine.tokenizer.decode([token]) for token in whole[i]] for i in (0, 1)}
    letter = next(
        c
        for c in texts[0][5:]
        if c.isascii() and c.isprintable() and c not in texts[1] and c != " "
    )
    ended = await patiently(answer([letter]))
    assert ended[1] == whole[1]
    assert ended[0] == whole[0][: texts[0].index(letter) + 1]
    await settled(engine)


async def test_a_view_is_of_the_replica_that_is_named(machines: Machines, control: Control):
    engine = machines.engine
    await settled(engine)
    control.close()
    task = asyncio.create_task(Listener(engine, "seen", [6] * 50, SamplingParams()).listen())
    await until(lambda: len(engine._runs) == 1 and None not in where(engine))
    [name] = where(engine)
    assert name is not None
    views = {}
    control.open()
    for replica in engine.replicas():
        views[replica] = await engine.view(replica)
    assert all(len(view.ref_counts) == 1024 for view in views.values())
    running = {s.request_id for view in views.values() for s in view.running}
    assert running <= {"seen"}
    assert not views[next(other for other in views if other != name)].running
    await patiently(task)


async def test_calls_to_a_replica_that_is_gone_fail_and_keep_none_from_being_routed(
    machines: Machines,
):
    for _ in range(20):
        with pytest.raises(LookupError, match="no replica gone"):
            await patiently(machines.fleet.finish("gone", "key", 0))
    wanted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answer = await patiently(Listener(machines.engine, "after", [1, 2, 3], wanted).listen())
    assert len(answer.tokens) == 4


async def test_a_replica_that_stops_and_goes_on_costs_no_stream_and_is_used_again(
    machines: Machines, control: Control
):
    engine = machines.engine
    await settled(engine)
    expected = [one.tokens for one in await listen_to(forty(engine, "moving"))]
    await settled(engine)
    lost = engine.num_restarts
    control.close()
    listeners = forty(engine, "stopped")
    answers = asyncio.ensure_future(listen_to(listeners))
    await until(lambda: len(engine._runs) == 40 and None not in where(engine))
    head = machines.cluster.head_node
    machines.signal_replica(head, signal.SIGSTOP)
    try:
        await until(lambda: engine.num_restarts == lost + 1)
        await until(lambda: len(where(engine)) == 1 and None not in where(engine))
        assert not engine.restarting
        control.open()
        assert [one.tokens for one in await answers] == expected
    finally:
        machines.signal_replica(head, signal.SIGCONT)
    await until(lambda: not engine._silence.names())
    await settled(engine)
    assert engine.num_restarts == lost + 1


async def test_a_replica_is_added_for_many_requests_and_removed_without_breaking_any(
    machines: Machines, control: Control, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deployment, "_SECONDS_TO_ADD", 1.0)
    monkeypatch.setattr(deployment, "_SECONDS_TO_REMOVE", 1.0)
    config = dataclasses.replace(machines.config, max_num_seqs=2)
    settings = RaySettings(replicas=1, max_replicas=2, cpus=0.1, app="grows", drain_timeout=60)
    fleet = ServeFleet(config, settings, step_timeout=0)
    ready = await asyncio.to_thread(fleet.deploy)
    text = load_text_side(config, lambda _config: None)
    engine = RayEngine(config, text, ready, fleet)
    await engine.start()
    try:
        wanted = SamplingParams(temperature=1, seed=1, max_tokens=20, ignore_eos=True)

        def listener(name: str) -> Listener:
            return Listener(engine, name, [5, 6, 7], wanted)

        expected = (await patiently(listener("first").listen())).tokens
        control.close()
        start = time.monotonic()
        many = asyncio.ensure_future(listen_to([listener(f"many{i}") for i in range(20)]))
        await until(lambda: len(fleet.replicas()) == 2)
        added = time.monotonic() - start
        control.open()
        assert all(one.tokens == expected for one in await many)
        start = time.monotonic()
        answered = 0
        while len(fleet.replicas()) == 2:
            assert (await patiently(listener(f"one{answered}").listen())).tokens == expected
            answered += 1
        assert engine.num_restarts == 0
        print(
            f"\nWith 20 requests a replica was added after {added:.0f} s, with one at a time "
            f"({answered} answered) removed after {time.monotonic() - start:.0f} s"
        )
    finally:
        await engine.stop()
        await asyncio.to_thread(deployment.serve.delete, "grows")


async def test_an_application_whose_server_is_gone_is_deleted(machines: Machines, control: Control):
    control.set("impatient")
    fleet = ServeFleet(machines.config, RaySettings(cpus=0.1, drain_timeout=0), step_timeout=0)
    fleet.application = "orphan"  # one of this process has that name already
    await asyncio.to_thread(fleet.deploy)
    [name] = fleet.replicas()
    await patiently(fleet.stats(name, "server"))  # the last thing that is heard of it
    while "orphan" in (await asyncio.to_thread(deployment.serve.status)).applications:
        await asyncio.sleep(0.5)


async def test_requests_end_with_an_error_where_somebody_deletes_the_application(
    machines: Machines, control: Control
):
    settings = RaySettings(cpus=0.1, app="deleted", drain_timeout=0)
    fleet = ServeFleet(machines.config, settings, step_timeout=0)
    ready = await asyncio.to_thread(fleet.deploy)
    text = load_text_side(machines.config, lambda _config: None)
    engine = RayEngine(machines.config, text, ready, fleet)
    await engine.start()
    control.close()
    task = asyncio.create_task(Listener(engine, "runs", [5] * 20, SamplingParams()).listen())
    await until(lambda: len(engine._runs) == 1 and None not in where(engine))
    assert not engine.failed
    await asyncio.to_thread(deployment.serve.delete, "deleted")
    with pytest.raises(EngineStoppedError, match="is gone"):
        await patiently(task)
    assert engine.failed
    with pytest.raises(EngineStoppedError, match="is gone"):
        await Listener(engine, "new", [5] * 20, SamplingParams()).listen()
    await engine.stop()


async def test_an_engine_that_cannot_be_loaded_is_a_clear_error(machines: Machines):
    bad = EngineConfig(model=machines.config.model, device="cpu", max_model_len=640, num_blocks=2)
    fleet = ServeFleet(bad, RaySettings(cpus=0.1, app="bad"), step_timeout=0)
    with pytest.raises(ConfigError, match="max_model_len=640 needs 40 KV blocks"):
        await asyncio.to_thread(fleet.deploy)
    await asyncio.to_thread(deployment.serve.delete, "bad")


async def test_a_request_that_kills_its_replicas_is_refused_and_the_others_are_answered(
    machines: Machines, control: Control
):
    engine = machines.engine
    await settled(engine)
    wanted = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def good(name: str) -> list[Listener]:
        return [Listener(engine, f"{name}{i}", [20 + i, 9], wanted) for i in range(6)]

    expected = [one.tokens for one in await listen_to(good("before"))]
    used = {token for tokens in expected for token in tokens}
    poison = next(token for token in range(100, 200) if token not in used)
    control.poison(poison)
    lost = engine.num_restarts
    killer = asyncio.create_task(Listener(engine, "killer", [poison], SamplingParams()).listen())
    answers = asyncio.create_task(listen_to(good("beside")))
    with pytest.raises(EngineDiedError):
        await patiently(killer)
    assert [one.tokens for one in await answers] == expected
    assert engine.num_restarts == lost + 4
    control.unset("poison")
    await until(lambda: len(machines.fleet.replicas()) == 2)


async def test_a_rolling_update_under_load_fails_no_request(machines: Machines):
    engine, fleet = machines.engine, machines.fleet
    await settled(engine)
    old = set(fleet.replicas())
    expected = [one.tokens for one in await listen_to(forty(engine, "before"))]
    updated = asyncio.create_task(asyncio.to_thread(fleet.update))
    answered = 0
    rounds = 0
    while not updated.done() or old & set(fleet.replicas()):
        rounds += 1
        answers = await listen_to(forty(engine, f"while{rounds}-"))
        assert [one.tokens for one in answers] == expected
        answered += len(answers)
    await updated
    assert not old & set(fleet.replicas())
    print(f"\n{answered} requests answered during a rolling update, {engine.num_restarts} moved")
    assert answered


async def test_forty_streams_outlive_a_replica_and_then_a_node(
    machines: Machines, control: Control
):
    engine, fleet = machines.engine, machines.fleet
    await until(lambda: len(fleet.replicas()) == 2)
    await settled(engine)
    expected = [(one.tokens, one.text) for one in await listen_to(forty(engine, "whole"))]
    assert all(len(tokens) == 60 for tokens, _ in expected)
    await settled(engine)
    lost = engine.num_restarts
    control.close()
    listeners = forty(engine, "disturbed")
    answers = asyncio.ensure_future(listen_to(listeners))
    await until(lambda: len(engine._runs) == 40 and None not in where(engine))
    control.allow(8)  # steps of each engine
    await until(lambda: all(len(one.tokens) >= 3 for one in listeners))
    before = where(engine)
    assert len(before) == 2
    machines.signal_replica(machines.cluster.head_node, signal.SIGKILL)
    start = time.monotonic()
    await until(lambda: engine.num_restarts == lost + 1 and len(engine._runs) == 40)
    noticed = time.monotonic() - start
    await until(lambda: len(where(engine)) == 1 and None not in where(engine))
    moved = time.monotonic() - start
    counts = [len(one.tokens) for one in listeners]
    assert max(counts) <= 9
    control.allow(4)
    await until(lambda: all(len(one.tokens) > was for one, was in zip(listeners, counts)))  # noqa: B905
    survivor, _ = where(engine).popitem()
    await asyncio.to_thread(machines.cluster.remove_node, machines.other, allow_graceful=False)
    start = time.monotonic()
    await until(lambda: engine.num_restarts == lost + 2)
    noticed_node = time.monotonic() - start
    control.open()
    answered = await answers
    assert [(one.tokens, one.text) for one in answered] == expected
    await until(lambda: survivor not in fleet.replicas() and len(fleet.replicas()) == 1)
    print(
        f"\n40 streams, {max(before.values())} and {min(before.values())} on each replica. One was "
        f"killed: seen after {noticed:.1f} s, all taken over after {moved:.1f} s. Its node's "
        f"neighbour was removed: seen after {noticed_node:.1f} s. All answers as without."
    )
