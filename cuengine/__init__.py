"""cuengine: a small serving engine for LLaMA-family models.

The names below are imported when first used, so that `import cuengine` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuengine.async_engine import AsyncEngine as AsyncEngine
    from cuengine.config import EngineConfig as EngineConfig
    from cuengine.engine import Engine as Engine
    from cuengine.errors import ConfigError as ConfigError
    from cuengine.errors import CuengineError as CuengineError
    from cuengine.errors import EngineStoppedError as EngineStoppedError
    from cuengine.errors import ModelError as ModelError
    from cuengine.errors import RequestError as RequestError
    from cuengine.llm import LLM as LLM
    from cuengine.loading import load_engine as load_engine
    from cuengine.outputs import BeamSearchOutput as BeamSearchOutput
    from cuengine.outputs import CompletionOutput as CompletionOutput
    from cuengine.outputs import RequestDelta as RequestDelta
    from cuengine.outputs import RequestOutput as RequestOutput
    from cuengine.sampling_params import BeamSearchParams as BeamSearchParams
    from cuengine.sampling_params import SamplingParams as SamplingParams
    from cuengine.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_MODULES = {
    "AsyncEngine": "async_engine",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "CuengineError": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineStoppedError": "errors",
    "LLM": "llm",
    "ModelError": "errors",
    "RequestDelta": "outputs",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
    "load_engine": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cuengine' has no attribute {name!r}")
    return getattr(import_module(f"cuengine.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
