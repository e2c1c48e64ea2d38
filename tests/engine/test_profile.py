"""`cuengine profile` on tiny models: what it times, counts and writes, on the cpu and emulated."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chrome_trace_check import check_trace_file

from cuengine import LLM, SamplingParams
from cuengine.cli.main import main
from cuengine.config import EngineConfig
from cuengine.device.cuda.kernels import GEMM
from cuengine.device.emulated import host
from cuengine.device.interface import Device
from cuengine.engine import Engine
from cuengine.errors import ConfigError
from cuengine.loading import all_weights, layer_weights, load_engine
from cuengine.model.config import ModelConfig
from cuengine.outputs import EngineOutput
from cuengine.profiling import stream
from cuengine.profiling.device import OPERATIONS, Counts, ProfiledDevice
from cuengine.profiling.recording import Recorder, Span
from cuengine.profiling.report import Section
from cuengine.profiling.run import Profiler
from cuengine.profiling.stream import StreamTimes
from cuengine.profiling.work import NO_WORK, Work
from cuengine.profiling.workload import Workload

TinyModel = Callable[[str], Path]

MODEL = "gqa_default"
BATCH, CONTEXT, STEPS = 3, 20, 4
WORKLOAD = Workload(BATCH, CONTEXT, STEPS, step_tokens=32, block_size=8)
PHASES = ["schedule", "build", "copy-in", "forward", "sample", "copy-out", "collect"]


def engine_for(workload: Workload, folder: Path, device: str = "cpu") -> Engine:
    config = EngineConfig(
        model=str(folder),
        device=device,
        block_size=workload.block_size,
        max_num_batched_tokens=workload.step_tokens,
    )
    return load_engine(workload.settings(config))


def sizes_of(engine: Engine) -> ModelConfig:
    assert engine.model.config is not None
    return engine.model.config


@pytest.fixture(scope="module")
def profiled(tiny_model: TinyModel) -> tuple[Engine, Profiler, Section, Section]:
    engine = engine_for(WORKLOAD, tiny_model(MODEL))
    profiler = Profiler(engine, WORKLOAD)
    prefill, decode = profiler.run(lambda text: None)
    return engine, profiler, prefill, decode


Profiled = tuple[Engine, Profiler, Section, Section]


def test_every_step_asked_for_is_there_and_full(profiled: Profiled) -> None:
    _, profiler, prefill, decode = profiled
    # 60 tokens of prompts in steps of 32; then all three, a token further each time.
    assert (prefill.kind, prefill.num_steps) == ("prefill", 2)
    assert prefill.sizes == "2 sequences, 28 to 32 tokens, context 20"
    assert (decode.kind, decode.num_steps) == ("decode", STEPS)
    assert decode.sizes == "3 sequences, 3 tokens, context 21 to 24"
    assert [step.kind for step in profiler.recorded] == ["prefill"] * 2 + ["decode"] * STEPS


def test_phases_and_operations_are_those_of_the_engine_and_the_model(profiled: Profiled) -> None:
    engine, _, prefill, decode = profiled
    layers = sizes_of(engine).num_layers
    for section in (prefill, decode):
        assert list(section.phases) == PHASES
        calls = {
            name: row.calls / section.num_steps
            for phase in section.phases.values()
            for name, row in phase.operations.items()
        }
        each = ("linear qkv", "linear o", "linear gate_up", "linear down")
        assert calls == {
            **dict.fromkeys(("embedding", "rms_norm", "take_rows", "logits", "sample"), 1),
            **dict.fromkeys((*each, "rotary_cache", "paged_attention", "silu_mul"), layers),
            "add_rms_norm": 2 * layers,
        }
        assert not section.stream


def test_all_of_the_step_is_accounted_for(profiled: Profiled) -> None:
    for section in profiled[2:]:
        parts = [section.rest, *(phase.nanoseconds for phase in section.phases.values())]
        assert min(parts) >= 0
        assert sum(parts) == section.nanoseconds
        forward = section.phases["forward"]
        inside = sum(row.nanoseconds for row in forward.operations.values())
        assert 0 < inside + forward.between == forward.nanoseconds
        assert 0 < section.named_share < 1
        assert min(section.profiled, section.unprofiled) > 0


def total(section: Section, begin: str) -> Work:
    works = [
        row.work
        for phase in section.phases.values()
        for name, row in phase.operations.items()
        if name.startswith(begin)
    ]
    return sum(works, Work(0, 0))


def test_products_count_two_operations_for_each_weight_and_token(profiled: Profiled) -> None:
    engine, _, prefill, decode = profiled
    sizes = sizes_of(engine)
    products = total(decode, "linear").operations + total(decode, "logits").operations
    assert products == 2 * STEPS * BATCH * all_weights(sizes)
    assert total(prefill, "linear").operations == 2 * BATCH * CONTEXT * layer_weights(sizes)
    # A token is drawn where a prompt ends, and only there.
    assert total(prefill, "logits").operations == 2 * BATCH * sizes.vocab_size * sizes.hidden_size


def test_attention_counts_what_is_in_the_cache(profiled: Profiled) -> None:
    engine, _, prefill, decode = profiled
    sizes = sizes_of(engine)
    heads = sizes.num_layers * sizes.num_heads * sizes.head_dim
    contexts = BATCH * sum(range(CONTEXT + 1, CONTEXT + STEPS + 1))
    assert total(decode, "paged_attention").operations == 4 * heads * contexts
    # However prompts are cut into chunks, each token sees all before it and itself.
    pairs = BATCH * CONTEXT * (CONTEXT + 1) // 2
    assert total(prefill, "paged_attention").operations == 4 * heads * pairs


def test_the_engine_is_left_as_it_was(profiled: Profiled) -> None:
    engine, _, _, _ = profiled
    assert not isinstance(engine.runner.model.device, ProfiledDevice)  # type: ignore[attr-defined]
    assert engine.before_launch is None
    assert not engine.has_unfinished()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_tokens_are_the_same_with_profiling_and_copies_of_blocks_are_counted(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With biases, and two samples that share a half-full block until one writes to it.
    llm = LLM(str(tiny_model("bias")), device="cpu", skip_tokenizer_init=True, block_size=8)
    params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=6, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": list(range(3, 15))}

    def tokens() -> list[list[int]]:
        [output] = llm.generate(prompt, params)
        return [list(sample.token_ids) for sample in output.outputs]

    expected = tokens()
    llama = llm.engine.runner.model  # type: ignore[attr-defined]
    counts, recorder = Counts(llama, 8), Recorder()
    llama.device = ProfiledDevice(llama.device, counts, recorder, None)
    spans: list[Span] = []
    step = llm.engine.step

    def recorded() -> list[EngineOutput]:
        outputs = step()
        spans.extend(recorder.take())
        return outputs

    monkeypatch.setattr(llm.engine, "step", recorded)
    assert tokens() == expected
    copies = [span.work for span in spans if span.name == "copy_blocks"]
    assert copies == [Work(2 * counts.block_bytes + 8, 0)]
    sizes = sizes_of(llm.engine)
    assert counts.block_bytes == 4 * 2 * 8 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
    # With a bias, a row has one sum more for each number that comes out.
    first = next(span.work for span in spans if span.name == "linear qkv")
    outputs = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    assert first is not None
    assert sizes.attention_bias
    assert first.operations % ((2 * sizes.hidden_size + 1) * outputs) == 0


def test_all_that_a_device_does_in_a_step_is_timed() -> None:
    """A new operation of the interface has to be counted, or to be listed here."""
    methods = {name for name, value in vars(Device).items() if callable(value)}
    others = {
        *("free_memory", "kv_cache_budget", "upload", "upload_matrix", "download", "prepare"),
        *("allocate_kv_cache", "allocate_host_cache", "range", "stage", "replay"),
    }
    public = {name for name in methods if not name.startswith("_")}
    assert public - others == set(OPERATIONS)


# The emulated device


@pytest.mark.usefixtures("emulator")
def test_on_a_gpu_s_code_the_operations_are_timed_on_its_stream(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three sequences make steps that a graph would pad to four."""
    trace = tmp_path / "trace.json"
    flags = "--device emulated --batch 3 --context 20 --steps 2 --block-size 8"
    flags += f" --max-num-batched-tokens 32 --json --trace {trace}"
    assert main(["profile", str(tiny_model(MODEL)), *flags.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["dtype"]) == ("emulated", "float32")
    assert "of no GPU" in found["note"]
    prefill, decode = found["sections"]
    assert decode["sizes"] == "3 sequences, 3 tokens, context 21 to 22"
    for section in (prefill, decode):
        assert [phase["name"] for phase in section["phases"]] == PHASES
        assert not any("operations" in phase for phase in section["phases"])
        device = section["device"]
        seconds = [row["seconds"] for row in device["operations"]]
        assert min(seconds) > 0
        assert device["between_operations"] >= 0
        assert sum(seconds) + device["between_operations"] == pytest.approx(device["seconds"])
    rows = {row["name"]: row for row in decode["device"]["operations"]}
    assert rows["paged_attention"]["calls"] == 2 * 3
    assert rows["logits"]["operations"] == 2 * 3 * 2 * 256 * 64  # 3 rows, and not 4
    events = check_trace_file(trace.read_text())
    assert {event["tid"] for event in events} == {1, 2, 3}


KERNELS = {
    "embedding": ["embedding"],
    "rms_norm": ["rms_norm"],
    **{f"linear {name}": ["broadcast_row", GEMM] for name in ("qkv", "o", "gate_up", "down")},
    "rotary_cache": ["rotary_cache"],
    "add_rms_norm": ["add_rms_norm"],
    "silu_mul": ["silu_mul"],
    "logits": [GEMM],
    "sample": ["sample_tokens"],
}
"""Of a model whose matrices all have a bias; attention and `take_rows` are in the test."""


@pytest.mark.usefixtures("emulator")
def test_each_launch_of_a_profiled_step_is_told_by_the_name_of_its_kernel(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what comes to the runtime."""
    told_and_launched: list[tuple[str, str]] = []
    told = StreamTimes.launch
    launch, gemm = host.EmulatedRuntime.launch, host.EmulatedRuntime.gemm

    def note_told(times: StreamTimes, kernel: str) -> None:
        told_and_launched.append(("told", kernel))
        told(times, kernel)

    def note_launch(runtime: Any, function: Any, *rest: Any) -> None:
        told_and_launched.append(("launched", function.kernel.name))
        launch(runtime, function, *rest)

    def note_gemm(runtime: Any, *arrays: Any, **keywords: Any) -> None:
        told_and_launched.append(("launched", GEMM))
        gemm(runtime, *arrays, **keywords)

    monkeypatch.setattr(StreamTimes, "launch", note_told)
    monkeypatch.setattr(host.EmulatedRuntime, "launch", note_launch)
    monkeypatch.setattr(host.EmulatedRuntime, "gemm", note_gemm)
    workload = Workload(2, 12, 1, step_tokens=32, block_size=8)
    engine = engine_for(workload, tiny_model("bias"), "emulated")
    profiler = Profiler(engine, workload)
    prefill, decode = profiler.run(lambda text: None)

    first = next(i for i, (what, _) in enumerate(told_and_launched) if what == "told")
    last = max(i for i, (what, _) in enumerate(told_and_launched) if what == "told")
    watched = told_and_launched[first : last + 2]
    assert {what for what, _ in watched[::2]} == {"told"}
    for (_, name), (what, symbol) in zip(watched[::2], watched[1::2], strict=True):
        assert what == "launched"
        # A template's symbol holds its name and the name's length.
        assert symbol == name or f"{len(name)}{name}I" in symbol
    assert len(told_and_launched) > last + 20  # what runs after profiling is not told

    for section, attention in (
        (prefill, "paged_attention_prefill_plain"), (decode, "paged_attention_decode_plain"),
    ):  # fmt: skip
        found = {name: list(row.kernels) for name, row in section.stream.items()}
        take_rows = found.pop("take_rows")
        assert found == KERNELS | {"paged_attention": [attention]}
        assert take_rows == ([] if section is decode else ["take_rows"])
        for row in section.stream.values():
            assert sum(kernel.nanoseconds for kernel in row.kernels.values()) in (
                0, row.nanoseconds,
            )  # fmt: skip
            assert {kernel.calls for kernel in row.kernels.values()} <= {row.calls}
    assert decode.stream["take_rows"].work == NO_WORK
    assert prefill.stream["take_rows"].work != NO_WORK


class SlowHost:
    """A stream that does a copy in 1 ms and whatever is launched in 0.1 ms, and a host that takes
    0.2 ms to launch anything, and no time to record an event. waits: until a copy is done."""

    def __init__(self, *, waits: bool = False) -> None:
        self.host = self.stream = 0.0
        self.waits = waits

    def now(self) -> int:
        return round(self.host * 1e6)

    def queue(self, milliseconds: float) -> None:
        self.stream = max(self.stream, self.host) + milliseconds

    def launch(self) -> None:
        self.host += 0.2
        self.queue(0.1)

    def copy_in(self, target: object, source: object) -> None:
        self.queue(1.0)
        if self.waits:
            self.host = self.stream

    def event(self, *, timing: bool) -> SlowHost.Event:
        assert timing
        return SlowHost.Event(self)

    def pinned(self, shape: object, dtype: object) -> bytearray:
        return bytearray()

    def empty(self, shape: object, dtype: object) -> None:
        return None

    class Event:
        def __init__(self, gpu: SlowHost) -> None:
            self.gpu = gpu

        def record(self) -> None:
            self.gpu.queue(0)
            self.reached = self.gpu.stream

        def wait(self) -> None:
            self.gpu.host = max(self.gpu.host, self.reached)

        def elapsed_ms(self, since: SlowHost.Event) -> float:
            return self.reached - since.reached


def test_launches_queue_up_behind_a_hold_so_that_the_device_is_measured_and_not_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu: Any = SlowHost()
    monkeypatch.setattr(stream, "now", gpu.now)
    times = StreamTimes(gpu)

    def step() -> list[float]:
        times.hold()
        for _ in range(20):
            times.begin("operation", Work(1, 1))
            gpu.launch()
            times.end()
        return [span.duration / 1e6 for span in times.take()]

    assert step()[-1] == pytest.approx(0.2)  # one copy was too short: the stream ran dry
    assert step() == pytest.approx([0.1] * 20)
    # Where launching takes no more than that, the hold gets shorter again.
    times.hold()
    times.begin("operation", Work(1, 1))
    gpu.launch()
    times.end()
    before = gpu.stream
    [span] = times.take()
    assert span.duration == pytest.approx(0.1e6)
    times.hold()
    assert gpu.stream == pytest.approx(before + 1.0)


def test_the_launches_of_an_operation_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = SlowHost()
    monkeypatch.setattr(stream, "now", gpu.now)
    times = StreamTimes(gpu)
    times.launch("gather_tokens")  # of no operation
    for _ in range(2):
        times.hold()
        for kernels in (["a"], ["b", "c", "b"], []):
            times.begin("operation", Work(1, 1))
            for kernel in kernels:
                times.launch(kernel)
                gpu.launch()
            times.end()
        one, three, none = times.take()
        assert [launch.name for launch in one.launches] == ["a"]
        assert [launch.name for launch in three.launches] == ["b", "c", "b"]
        for span in (one, three):
            ends = [launch.end for launch in span.launches]
            assert [launch.start for launch in span.launches] == [span.start, *ends[:-1]]
            assert ends[-1] == span.end
            assert span.work == Work(1, 1)
        assert (none.launches, none.duration, none.work) == ([], 0, NO_WORK)
    assert [launch.duration / 1e6 for launch in three.launches] == pytest.approx([0.1] * 3)


def test_a_stream_that_lets_the_host_wait_is_not_held_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu: Any = SlowHost(waits=True)
    monkeypatch.setattr(stream, "now", gpu.now)
    times = StreamTimes(gpu)
    for _ in range(3):
        before = gpu.stream
        times.hold()
        assert gpu.stream - before < 1.5
        for _ in range(20):
            times.begin("operation", Work(1, 1))
            gpu.launch()
            times.end()
        times.take()


# The command


def run(folder: Path, *flags: str) -> int:
    return main(["profile", str(folder), "--device", "cpu", *flags])


def test_the_command_prints_a_table_of_prefill_and_one_of_decode_and_writes_a_trace(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("an old one")
    flags = f"--batch 2 --context 9 --steps 3 --trace {trace}"
    assert run(tiny_model(MODEL), *flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gqa_default on cpu, float32"
    assert any(line.startswith("prefill: 1 step of 2 sequences, 18 tokens") for line in lines)
    assert any(line.startswith("decode: 3 steps of 2 sequences, 2 tokens") for line in lines)
    assert sum("of the time has a name" in line for line in lines) == 2
    written = json.loads(trace.read_text())
    assert written["otherData"]["model"] == MODEL
    names = [event["name"] for event in check_trace_file(trace.read_text())]
    assert names.count("prefill step") == 1
    assert names.count("decode step") == 3
    assert names.count("layer 2") == 4


def test_what_cannot_be_run_leaves_an_old_trace_alone_and_makes_no_empty_one(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    old, new, link = (tmp_path / name for name in ("old.json", "new.json", "link.json"))
    old.write_text("an old one")
    link.symlink_to(tmp_path / "nothing.json")
    for trace in (old, new, link):
        assert run(tiny_model(MODEL), "--context", "5000", "--trace", str(trace)) == 1
    assert old.read_text() == "an old one"
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "link.json"}


SMALL = ("--batch", "1", "--context", "4", "--steps", "1")


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_trace_that_cannot_be_written_costs_nothing_but_the_trace(
    tiny_model: TinyModel, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_model(MODEL), *SMALL, *flags, "--trace", "/dev/full") == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "cuengine: --trace /dev/full: cannot be written: No space left on device\n"
    )
    if flags:
        assert [section["kind"] for section in json.loads(captured.out)["sections"]] == [
            "prefill", "decode",
        ]  # fmt: skip
    else:
        assert captured.out.count("of the time has a name") == 2


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_tables_that_cannot_be_written_cost_nothing_but_the_tables(
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.json"
    monkeypatch.setattr(sys, "stdout", FullDisk())
    monkeypatch.setattr("cuengine.cli.main._discard_output", lambda: None)
    assert run(tiny_model(MODEL), *SMALL, "--trace", str(trace)) == 1
    assert "the output cannot be written: No space left on device" in capsys.readouterr().err
    check_trace_file(trace.read_text())


def test_a_trace_may_go_to_what_is_no_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(pipe.read_text)
        assert run(tiny_model(MODEL), *SMALL, "--trace", str(pipe)) == 0
        check_trace_file(text.result())


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--batch 0", 2, "'0' is not a whole number from 1 to 2147483647"),
        ("--context x", 2, "'x' is not a whole number from 1 to 2147483647"),
        ("--batch 9 --max-num-batched-tokens 16", 2, "ask for a batch of at most 8"),
        # 2 steps for the sequences to come in, 32 to decode, and one more
        ("--context 500", 1, "535 tokens, and this model's context is 512: ask for --context 477 "),
        ("--context 400 --steps 200", 1, "ask for --context 309 or --steps 109 at most"),
        ("--context 9 --steps 600", 1, "this model's context is 512: ask for --steps 500 at most"),
        ("--context 600 --steps 600", 1, "this model's context is 512: ask for less of both"),
        (
            "--batch 8 --context 256 --kv-cache-memory 256KiB",
            1,
            "needs 160 KV blocks of 16 tokens, and the cache has 21: ask for a batch of at most 1",
        ),
        ("--trace /nowhere/trace.json", 2, "--trace /nowhere/trace.json: cannot be written"),
        ("--trace /tmp", 2, "--trace /tmp: cannot be written: Is a directory"),
        ("--trace /dev/null/x", 2, "--trace /dev/null/x: cannot be written: Not a directory"),
        (f"--trace {'a' * 300}", 2, "cannot be written: File name too long"),
    ],
)
def test_what_cannot_be_profiled_is_one_line_that_says_what_can(
    tiny_model: TinyModel, flags: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = run(tiny_model(MODEL), *flags.split())
    except SystemExit as stop:
        ended = stop.code
    assert ended == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("workload", "fits"),
    [(Workload(2, 400, 50, 64, 16), True), (Workload(2, 500, 50, 64, 16), False)],
)
def test_the_longest_context_that_the_error_names_is_allowed(
    workload: Workload, fits: bool
) -> None:
    if fits:
        workload.check_model(512)
        return
    with pytest.raises(ConfigError) as caught:
        workload.check_model(512)
    most = int(str(caught.value).rpartition("--context ")[2].split()[0])
    Workload(2, most, 50, 64, 16).check_model(512)
    with pytest.raises(ConfigError):
        Workload(2, most + 1, 50, 64, 16).check_model(512)


def test_nothing_but_its_command_knows_the_profiler() -> None:
    """Without it nothing is timed, so there is nothing that could cost."""
    spec = importlib.util.find_spec("cuengine")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent

    def sources() -> Iterator[Path]:
        for folder in (root, root.parent / "model", root.parent / "api"):
            yield from folder.rglob("*.py")

    knowing = {path for path in sources() if "cuengine.profiling" in path.read_text("utf-8")}
    outside = {path for path in knowing if path.parent.name != "profiling"}
    assert outside == {root / "cli" / "profile.py"}
