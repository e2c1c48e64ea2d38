"""Who is suspected when the engine dies, and who is to blame: tried on engines that some kill."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.suspicion import Suspicion


def died(suspicion: Suspicion, *batch: str, steps_completed: bool = False) -> list[str]:
    return suspicion.died(batch, alone=len(batch) == 1, steps_completed=steps_completed)


def test_being_in_the_batch_at_one_death_proves_nothing():
    suspicion = Suspicion()
    assert died(suspicion, "a", "b") == []
    assert suspicion.suspects == []


def test_two_deaths_with_no_step_between_make_suspects_of_all_that_were_in_both_batches():
    suspicion = Suspicion()
    died(suspicion, "a", "b", "c")
    died(suspicion, "d", "c", "b")
    assert suspicion.suspects == ["b", "c"]


def test_one_that_was_alone_at_two_deaths_is_to_blame_and_forgotten():
    suspicion = Suspicion()
    died(suspicion, "a", "b")
    died(suspicion, "a", "b")
    assert died(suspicion, "a") == []
    assert died(suspicion, "a") == ["a"]
    assert suspicion.suspects == ["b"]


def test_a_token_clears_a_suspect():
    suspicion = Suspicion()
    died(suspicion, "a", "b")
    died(suspicion, "a", "b")
    suspicion.clear("a")
    assert suspicion.suspects == ["b"]
    suspicion.clear("b")
    assert not suspicion
    assert died(suspicion, "a") == []


def test_deaths_with_steps_between_them_weigh_less():
    suspicion = Suspicion()
    for _ in range(3):
        assert died(suspicion, "a", steps_completed=True) == []
        assert suspicion.suspects == []
    assert died(suspicion, "a", steps_completed=True) == ["a"]


def test_in_company_nobody_is_to_blame():
    suspicion = Suspicion()
    for _ in range(10):
        assert died(suspicion, "a", "b") == []


@dataclass
class Job:
    """A request of some steps without a token, then of tokens.

    kills  the number of tokens at which it kills the engine; None: never
    """

    prefill: int
    tokens: int
    kills: int | None
    got: int = 0


jobs = st.builds(
    Job, st.integers(1, 4), st.integers(1, 5), st.none() | st.none() | st.integers(0, 4)
)


@settings(deadline=None)
@given(
    st.dictionaries(st.text("abcdefgh", min_size=1, max_size=1), jobs, min_size=1),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), max_size=6),
)
def test_only_who_kills_is_refused_and_all_others_get_through(
    work: dict[str, Job], max_num_seqs: int, outer_kills: list[int]
):
    """An engine that runs max_num_seqs jobs at a time, in order, and that others kill, too: after
    so many steps of each life.
    """
    suspicion = Suspicion()
    waiting = dict(work)
    refused: list[str] = []
    kills = iter(outer_kills)
    for _ in range(400):  # lives
        outer = next(kills, None)
        prefilled = dict.fromkeys(work, 0)
        steps = 0
        while waiting:
            suspects = suspicion.suspects
            batch = suspects[:1] or [*waiting][:max_num_seqs]
            killers = [
                name
                for name in batch
                if prefilled[name] >= work[name].prefill - 1 and work[name].kills == work[name].got
            ]
            if killers or outer == steps:
                guilty = suspicion.died(batch, alone=len(batch) == 1, steps_completed=steps > 0)
                refused += guilty
                for name in guilty:
                    del waiting[name]
                break
            steps += 1
            for name in batch:
                prefilled[name] += 1
                if prefilled[name] < work[name].prefill:
                    continue
                work[name].got += 1
                suspicion.clear(name)
                if work[name].got == work[name].tokens:
                    del waiting[name]
                elif name in suspects:
                    prefilled[name] = 0  # it is taken back, and comes again with all the others
        if not waiting:
            break
    assert not waiting, "no end in sight"
    killers = {n for n, job in work.items() if job.kills is not None and job.kills < job.tokens}
    assert killers <= set(refused)
    if not outer_kills:
        assert killers == set(refused)
