"""bench/throughput.py: the work it hands out and the lines it prints."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("throughput")


def result(engine: str, seconds: float, token_ids: list[list[int]]) -> dict[str, Any]:
    return {
        "engine": engine,
        "load_seconds": 1.25,
        "seconds": seconds,
        "token_ids": token_ids,
        "steps": 4,
        "mean_batch": 1.75,
        "settings": "",
    }


WORKLOAD = {"prompts": [[5, 6, 7], [8]], "max_tokens": [3, 4]}


def test_the_trace_s_first_requests_are_read_as_counted_by_hand(throughput: ModuleType) -> None:
    requests = throughput.read_trace(throughput.DEFAULT_TRACE, 48, 256)
    # Counted from the file by hand: the first two pairs are [197, 41] and [14, 242].
    assert requests[:3] == [(197, 41), (14, 242), (149, 256)]
    assert sum(prompt for prompt, _ in requests) == 4548
    assert sum(output for _, output in requests) == 9586


def test_more_requests_than_the_trace_has_are_refused(throughput: ModuleType) -> None:
    with pytest.raises(SystemExit, match="has 2000 requests"):
        throughput.read_trace(throughput.DEFAULT_TRACE, 2001, 256)


def test_prompts_have_the_trace_s_lengths_and_no_special_tokens(
    throughput: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    added = [{"id": 0, "content": "<s>"}, {"id": 8, "content": "</s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    tokens = throughput.ordinary_tokens(tmp_path)
    assert tokens == [1, 2, 3, 4, 5, 6, 7]
    prompts = throughput.random_prompts([3, 500], tokens, seed=0)
    assert [len(prompt) for prompt in prompts] == [3, 500]
    assert {token for prompt in prompts for token in prompt} == set(tokens)
    assert prompts == throughput.random_prompts([3, 500], tokens, seed=0)
    assert prompts != throughput.random_prompts([3, 500], tokens, seed=1)


def test_a_result_line_counts_tokens_in_and_out(throughput: ModuleType) -> None:
    tokens = [[1, 2, 3], [4, 5, 6, 7]]
    line = throughput.result_line(result("x", 2.0, tokens), WORKLOAD, 3 * 2**20)
    assert line == {
        "engine": "x",
        "requests": 2,
        "tokens_in": 4,
        "tokens_out": 7,
        "seconds": 2.0,
        "output_tokens_per_second": 3.5,
        "peak_rss_mib": 3,
        "steps": 4,
        "mean_batch": 1.8,
        "load_seconds": 1.2,
        "settings": "",
        "token_ids": tokens,
    }


def test_an_engine_that_gave_fewer_tokens_than_asked_for_has_no_speed(
    throughput: ModuleType,
) -> None:
    with pytest.raises(SystemExit, match=r"x: gave \[3, 3\] output tokens, not \[3, 4\]"):
        throughput.result_line(result("x", 2.0, [[1, 2, 3], [4, 5, 6]]), WORKLOAD, 0)


def test_ratios_are_the_first_engine_s_speed_over_the_others(throughput: ModuleType) -> None:
    runs = [
        result("a", 1.0, [[1, 2, 3], [4, 5, 6, 7]]),
        result("b", 2.0, [[1, 2, 3], [4, 5, 0, 7]]),  # 3 and 2 tokens until they differ
    ]
    lines = [throughput.result_line(run, WORKLOAD, 0) for run in runs]
    comparison = throughput.compare(lines)
    assert comparison["ratios"] == {"a/b": 2.0}
    assert comparison["same_tokens"] == {"a/b": round(5 / 7, 3)}
    assert throughput.missed(comparison["ratios"], {"b": 1.9, "not run": 6.0}) == []
    assert throughput.missed(comparison["ratios"], {"b": 2.5}) == [
        "a/b: 2.0 is below the required 2.5"
    ]


def test_an_engine_that_is_not_installed_is_named_and_skipped(
    throughput: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    monkeypatch.delenv("CUENGINE_BENCH_PYTHON_VLLM", raising=False)
    missing = str(tmp_path / "python")
    command = ["throughput.py", "--model", str(tmp_path), "--engine", "vllm"]
    monkeypatch.setattr(sys, "argv", [*command, "--python", f"vllm={missing}"])
    throughput.main()
    assert json.loads(capsys.readouterr().out) == {
        "engine": "vllm",
        "skipped": f"no vllm in {missing}",
    }


def test_engines_that_read_no_codes_get_the_same_numbers_in_float32(
    throughput: ModuleType, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source, folder = tiny_model("linear_rope"), tmp_path / "model"
    assert throughput.folder_for("vllm", source) == source
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    weights = load_file(source / "model.safetensors")
    random = np.random.default_rng(0)
    expected, stored = {}, {}
    for name, tensor in weights.items():
        expected[name] = tensor.astype(np.float32)
        if not name.endswith("proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        codes = random.integers(0, 256, tensor.shape, np.uint8)
        scales, offsets = random.integers(1, 9, (2, rows, columns // 8)).astype(np.float32)
        expected[name] = codes * np.repeat(scales, 8, 1) + np.repeat(offsets, 8, 1)
        stored |= {f"{name}.codes": codes, f"{name}.scales": scales, f"{name}.offsets": offsets}
    save_file(stored, folder / "model.safetensors")

    assert throughput.folder_for("cuengine", folder) == folder
    made = throughput.folder_for("vllm", folder)
    assert (made / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    got = load_file(made / "model.safetensors")
    assert set(got) == set(expected)
    for name, tensor in got.items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    changed = (made / "model.safetensors").stat().st_mtime_ns
    assert throughput.folder_for("hf", folder) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == changed


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_resident_memory_is_about_what_the_kernel_says(throughput: ModuleType) -> None:
    # One without descendants: a test before may have left this process a server that still runs.
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = 1024 * int(status.partition("VmRSS:")[2].split()[0])
        assert throughput.resident_bytes(process.pid) == pytest.approx(resident, rel=0.2)
        process.communicate(b"\n")
