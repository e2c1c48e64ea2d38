"""Which device and dtype are taken, and what is said about it."""

from __future__ import annotations

import pytest

from cuengine.config import DEVICES, DTYPES, EngineConfig
from cuengine.device import select
from cuengine.device.cuda import find
from cuengine.device.select import choose_device, choose_dtype, select_device
from cuengine.errors import ConfigError


def test_the_settings_know_the_devices_and_dtypes_that_there_are() -> None:
    assert DEVICES == select.DEVICES
    assert DTYPES == select.DTYPES


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        ("tpu", "auto", "auto, cuda, cpu, emulated"),
        ("cpu", "bfloat16", "auto, float32"),
        ("emulated", "int8", "auto, float32, float16, bfloat16"),
    ],
)
def test_an_unknown_device_or_dtype_is_refused_with_what_is_allowed(
    name: str, dtype: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"is not one of: {allowed}"):
        select_device(name, dtype)


def test_auto_takes_cuda_where_a_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "usable_gpu", lambda: (True, "found a GPU"))
    assert choose_device("auto") == ("cuda", "found a GPU")


def test_one_log_line_says_that_auto_took_cpu_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(find, "usable_gpu", lambda: (False, "no driver"))
    with caplog.at_level("INFO"):
        assert select_device("auto", "auto").name == "cpu"
    (record,) = [r for r in caplog.records if r.name == "cuengine.device.select"]
    assert record.getMessage().startswith("device cpu (no driver), dtype float32")


def test_auto_falls_back_to_cpu_where_the_gpu_turns_out_unusable_but_cuda_says_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ConfigError("CuPy cannot be imported")

    monkeypatch.setattr(find, "usable_gpu", lambda: (True, "found a GPU"))
    monkeypatch.setattr("cuengine.device.cuda.cupy_runtime.CupyRuntime", broken)
    with caplog.at_level("INFO"):
        assert select_device("auto", "auto").name == "cpu"
    assert "found a GPU, but it cannot be used: CuPy cannot be imported" in caplog.text
    with pytest.raises(ConfigError, match="CuPy cannot be imported"):
        select_device("cuda", "auto")


@pytest.mark.parametrize(
    ("dtype", "checkpoint", "architecture", "expected"),
    [
        ("auto", "float32", 90, "float32"),
        ("auto", "float16", 90, "float16"),
        ("auto", "bfloat16", 90, "bfloat16"),
        ("auto", "bfloat16", 75, "float16"),
        ("auto", None, 80, "bfloat16"),
        ("auto", None, 75, "float16"),
        ("float32", "bfloat16", 90, "float32"),
        ("float16", None, 90, "float16"),
    ],
)
def test_auto_is_the_checkpoints_dtype_or_what_quantized_weights_get(
    dtype: str, checkpoint: str | None, architecture: int, expected: str
) -> None:
    assert choose_dtype(dtype, checkpoint, architecture)[0] == expected


def test_bfloat16_is_refused_where_the_gpu_has_no_products_in_it() -> None:
    with pytest.raises(ConfigError, match="sm_75"):
        choose_dtype("bfloat16", "bfloat16", 75)


@pytest.mark.parametrize("share", [0, -0.5, 1.1, True, "0.9"])
def test_a_share_of_memory_out_of_range_is_refused(share: object) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization="):
        EngineConfig(gpu_memory_utilization=share)  # type: ignore[arg-type]
