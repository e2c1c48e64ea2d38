"""bench/kv_memory.py: its counts on traces small enough to count by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cuengine.batch import SamplingBatch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def kv_memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("kv_memory")


@pytest.fixture
def contiguous(kv_memory: ModuleType) -> ModuleType:
    return sys.modules["contiguous"]


@pytest.fixture
def paged(kv_memory: ModuleType) -> ModuleType:
    return sys.modules["paged"]


def test_the_smallest_run_that_fits_is_halved_until_it_does_so_barely(
    contiguous: ModuleType,
) -> None:
    memory = contiguous.BuddyMemory(13)  # runs of 8, 4 and 1, at 0, 8 and 12
    assert memory.allocate(2) == 8
    assert memory.allocate(1) == 12
    assert memory.allocate(1) == 10
    assert memory.allocate(5) == 0
    assert memory.allocate(2) is None
    assert memory.allocate(1) == 11
    assert memory.allocate(1) is None


def test_freed_halves_become_whole_again(contiguous: ModuleType) -> None:
    memory = contiguous.BuddyMemory(12)
    starts = [memory.allocate(3) for _ in range(3)]
    assert sorted(starts) == [0, 4, 8]
    assert memory.allocate(1) is None
    for start in starts:
        memory.free(start, 3)
    # The run at 8 is no half of 16 slots, though it lies where one would be.
    assert memory.allocate(9) is None
    assert memory.allocate(8) == 0
    assert memory.allocate(4) == 8


def test_the_baselines_reserve_what_the_paper_s_do(contiguous: ModuleType) -> None:
    policies = contiguous.policies(2048)
    # "if the true output length is 25, it reserves 32 positions for outputs" (section 6.1)
    assert policies["next power of two"](100, 25) == 132
    assert policies["next power of two"](100, 32) == 132
    assert policies["next power of two"](100, 1) == 101
    assert policies["maximum length"](100, 25) == 2048
    assert policies["oracle"](100, 25) == 124


def test_contiguous_slots_are_told_apart_by_use(contiguous: ModuleType) -> None:
    # Each reserves 3 + 4 slots, which take 8; it comes to 5. Two run, for three steps, while the
    # third waits.
    reserve = contiguous.policies(64)["next power of two"]
    usage = contiguous.replay([(3, 3)] * 3, reserve, 16)
    assert (usage.steps, usage.sequences) == (3, 6)
    assert usage.tokens == 2 * (3 + 4 + 5)
    assert usage.reservation == 2 * (2 + 1 + 0)
    assert usage.internal == 3 * 2 * 2
    assert usage.external == 3 * 2 * 1
    assert usage.used == 24 / 42
    assert usage.shares() == {
        "tokens": 24 / 48,
        "reservation": 6 / 48,
        "internal": 12 / 48,
        "external": 6 / 48,
    }
    assert usage.mean_sequences == 2


def test_contiguous_memory_serves_who_comes_first(contiguous: ModuleType) -> None:
    # The second needs all memory, and the third, which would fit beside the first, is behind it.
    usage = contiguous.replay([(2, 3), (7, 2), (1, 1)], contiguous.policies(8)["oracle"], 8)
    # Three steps of the first, with 2, 3 and 4 tokens, and two of the second, with 7 and 8.
    assert (usage.steps, usage.sequences, usage.tokens) == (5, 5, 2 + 3 + 4 + 7 + 8)
    assert usage.external == 3 * 4


def test_a_request_that_never_fits_into_contiguous_memory_is_an_error(
    contiguous: ModuleType,
) -> None:
    with pytest.raises(ValueError, match="9 slots do not fit into 8"):
        contiguous.replay([(9, 1)], contiguous.policies(8)["oracle"], 8)


def test_slots_in_blocks_are_told_apart_by_use(paged: ModuleType) -> None:
    # Two of the three run, while one of four blocks is kept free for each; they come to 9 tokens,
    # in the second block of each, at the third step. The last waits until they are done.
    usage = paged.replay_alone([(7, 3)] * 3, paged.Memory(32, 8, 32), seed=0)
    assert (usage.steps, usage.sequences) == (3, 6)
    assert usage.tokens == 2 * (7 + 8 + 9)
    assert usage.reservation == 2 * 1
    assert usage.internal == 2 * 7
    assert usage.external == 2 * 16
    assert usage.used == 48 / 64


def test_blocks_are_saved_as_the_engine_shares_them(paged: ModuleType) -> None:
    # Two samples with 12 to 16 tokens, in two blocks each: both are shared in the first step, and
    # from the second on only the first block. The other request needs two blocks of the four.
    requests = [(12, 5)] * 2
    runner = paged.MadeUpTokens(paged.NO_RECORDING, seed=0)
    sharing = paged.replay_shared(requests, paged.parallel(2), paged.Memory(32, 8, 32), runner)
    assert (sharing.steps, sharing.sequences) == (5, 10)
    assert (sharing.logical, sharing.physical) == (5 * 4, 2 + 4 * 3)
    assert sharing.saved == pytest.approx(0.3)
    assert paged.prompts_alone(requests, 2, 8) == pytest.approx(0.3)


def test_prompts_alone_are_shared_by_all_samples(paged: ModuleType) -> None:
    # 16 and 17 tokens: 2 and 3 blocks for each of four, of which three find 2 and 2 there.
    assert paged.prompts_alone([(16, 2)], 4, 8) == (3 * 2 + 3 * 2) / (4 * 2 + 4 * 3)
    # Without one full block, only the first step shares anything.
    assert paged.prompts_alone([(7, 2), (7, 2)], 2, 8) == 2 / 8


@pytest.mark.parametrize(
    ("candidates", "physical"),
    [
        # Both beams always come from the better one: its full blocks are shared by both.
        ([[-1.0, -1.5], [-4.0, -4.5]], 1 + 2 + 8 * 3 + 4),
        # Each goes on by itself: after the first step nothing is shared.
        ([[-1.0, -9.0], [-0.5, -9.0]], 1 + 2 + 8 * 4 + 6),
    ],
)
def test_beams_share_what_their_recorded_scores_let_them(
    paged: ModuleType, candidates: list[list[float]], physical: int
) -> None:
    # Two beams with 7, 8, ... 17 tokens in blocks of 8, while the other request waits for five of
    # the six blocks and one to spare.
    requests = [(7, 11), (40, 1)]
    runner = paged.MadeUpTokens(np.array([candidates], np.float32), seed=0)
    sharing = paged.replay_shared(requests, paged.beam(2), paged.Memory(48, 8, 48), runner)
    assert sharing.steps == 11
    assert sharing.logical == 2 * (1 + 1 + 8 * 2 + 3)
    assert sharing.physical == physical


def test_a_search_goes_through_the_recording_step_by_step(paged: ModuleType) -> None:
    recording = np.arange(3 * 2 * 2, dtype=np.float32).reshape(3, 2, 2)
    sampling = SamplingBatch.greedy(4)
    sampling.num_logprobs[:] = 2
    sampling.seeds[:] = (4, 4, 4, 3)
    sampling.positions[:] = (0, 1, 1, 9)
    sampling.sample_indices[:] = (0, 0, 1, 3)
    output = paged.MadeUpTokens(recording, seed=0).draw(sampling)
    assert output.top_logprobs.tolist() == [[4, 5], [8, 9], [10, 11], [2, 3]]
    assert all(len(set(row)) == 2 for row in output.top_ids.tolist())


def row(memory: str, used: float) -> dict[str, object]:
    return {"memory": memory, "used of reserved": used}


def saved(method: str, size: int, share: float, alone: float) -> dict[str, object]:
    return {"method": method, "size": size, "saved": share, "prompts alone": alone}


def test_what_falls_short_is_named(kv_memory: ModuleType) -> None:
    uses = [row("maximum length", 20), row("cuengine, blocks of 16", 96)]
    good = [
        saved("parallel", 2, 16.2, 18.0),
        saved("parallel", 4, 14.6, 15),
        saved("beam", 2, 45, 9),
    ]
    limits = {"max_waste": 4.0, "tolerance": 0.5}
    assert kv_memory.missed(uses, good, **limits) == []
    uses[1] = row("cuengine, blocks of 16", 95.9)
    bad = [
        saved("parallel", 2, 15.6, 18.0),
        saved("parallel", 4, 14.4, 15),
        saved("beam", 2, 43, 9),
    ]
    assert kv_memory.missed(uses, bad, **limits) == [
        "cuengine, blocks of 16: 4.1 % wasted, more than 4.0 %",
        "parallel 2: 15.6 % saved, less than 16.2 %",
        "parallel 4: 14.4 % saved, less than 15 %",
        "beam 2: 43 % saved, less than 44.3 %",
    ]


def test_a_run_prints_tables_and_json_and_draws_a_picture(
    kv_memory: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    trace.write_text(json.dumps({"requests": [[20, 20]] * 8}))
    command = ["kv_memory.py", "--trace", str(trace), "--num", "8", "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", [*command, "--kv-slots", "256", "--max-model-len", "64"])
    kv_memory.main()
    printed = capsys.readouterr().out
    assert "| memory | tokens |" in printed
    line = json.loads(printed.splitlines()[-1])
    assert (line["requests"], line["kv_slots"], line["max_model_len"]) == (8, 256, 64)
    assert [use["memory"] for use in line["uses"]][2:4] == ["oracle", "cuengine, blocks of 8"]
    assert [(row["method"], row["size"]) for row in line["sharing"]] == [
        (method, size) for method in ("parallel", "beam") for size in (2, 4, 6)
    ]
    text = picture.read_text()
    assert "next power of two" in text
    kv_memory.main()
    assert picture.read_text() == text, "the same figures give the same picture"
