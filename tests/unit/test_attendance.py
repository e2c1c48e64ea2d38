"""Servers and replicas that are not heard of any more, in looks."""

from __future__ import annotations

import pytest

from cuengine.ray_backend.attendance import (
    LOOK_SECONDS,
    LOOKS,
    LOOKS_FOR_SERVER,
    SECONDS_UNATTENDED,
    SECONDS_UNATTENDED_AT_FIRST,
    Servers,
    Silence,
)


def test_a_replica_is_silent_after_so_many_looks_and_that_is_said_once():
    silence = Silence()
    for _ in range(LOOKS):
        assert not silence.look(["a", "b"])
    silence.heard("b")
    assert silence.look(["a", "b"]) == ["a"]
    assert silence.names() == ["a"]
    assert not silence.look(["a", "b"])
    assert silence.heard("a")
    assert not silence.heard("a")
    assert not silence.names()


def test_replicas_that_nobody_asks_about_are_forgotten():
    silence = Silence()
    for _ in range(LOOKS + 1):
        silence.look(["a"])
    assert "a" in silence
    silence.look([])
    assert "a" not in silence
    assert None not in silence


def test_a_server_that_asks_no_more_is_gone_once_others_have_asked_often_enough():
    servers = Servers()
    servers.has_requests("never asked")
    for _ in range(LOOKS_FOR_SERVER - 1):
        servers.asked("lives")
        assert servers.look() == []
    servers.asked("lives")
    servers.asked("late")
    assert servers.look() == ["never asked"]
    for _ in range(LOOKS_FOR_SERVER - 1):
        servers.asked("lives")
        assert servers.look() == []
    servers.asked("lives")
    assert servers.look() == ["late"]
    servers.asked("lives")
    assert servers.look() == []


def test_no_server_is_gone_where_none_asks_as_of_a_replica_that_is_being_replaced():
    servers = Servers()
    servers.asked("a")
    servers.look()
    assert not any(servers.look() for _ in range(10 * LOOKS_FOR_SERVER))
    servers.asked("a")
    assert servers.look() == []


@pytest.mark.parametrize("drain", [0.0, 300.0])
def test_a_replica_is_unattended_after_the_time_that_it_has_to_end_and_not_while_others_load(
    drain: float,
):
    servers = Servers()

    def seconds() -> float:
        looks = 0
        while not servers.unattended(drain):
            servers.look()
            looks += 1
        return looks * LOOK_SECONDS

    assert SECONDS_UNATTENDED_AT_FIRST < seconds() <= SECONDS_UNATTENDED_AT_FIRST + LOOK_SECONDS
    servers.asked("a")
    servers.look()
    assert not servers.unattended(drain)
    limit = SECONDS_UNATTENDED + drain
    assert limit < seconds() <= limit + LOOK_SECONDS
