"""Which part may import which: read from the sources, and checked once in a running interpreter."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"cuengine": "cuengine", "model": "cuengine.model", "api": "cuengine.api"}

ASSEMBLY = {
    "cuengine.engine",
    "cuengine.loading",
    "cuengine.text_side",
    "cuengine.llm",
    "cuengine.async_engine",
    "cuengine.front_desk",
}
"""Modules in cuengine/ that put the parts together and so know models; all others are core."""

API_USES = {
    "cuengine.async_engine",
    "cuengine.config",
    "cuengine.counted",
    "cuengine.engine_view",
    "cuengine.errors",
    "cuengine.extras",
    "cuengine.outputs",
    "cuengine.sampling_params",
    "cuengine.shortage",
    "cuengine.stats",
    "cuengine.structured_outputs",
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all product modules."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives a.b if b is ours."""
    ours = modules()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the package's name"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in ours else node.module


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offences(names: list[str], *forbidden: str) -> list[str]:
    return [
        f"{name} imports {imported}"
        for name in names
        for imported in imports(modules()[name])
        if within(imported, *forbidden)
    ]


def core() -> list[str]:
    return [
        name
        for name, path in modules().items()
        if path.parent == ROOT / "cuengine" and name not in {*ASSEMBLY, "cuengine"}
    ]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_the_rules_see_the_modules_they_are_about():
    assert {"cuengine.batch", "cuengine.sampling_params"} <= set(core())
    assert {"cuengine.model.llama", "cuengine.api", "cuengine.device.interface"} <= set(modules())
    assert "cuengine.device.interface" in set(imports(modules()["cuengine.model.llama"]))


def test_core_imports_no_model_server_or_gpu_code():
    assert not offences(core(), "cuengine.model", "cuengine.api", "cuengine.cli", "aiohttp", "cupy")


def test_core_reaches_devices_only_through_their_interface():
    uses = [use for use in offences(core(), "cuengine.device") if not use.endswith(".interface")]
    assert not uses


def test_devices_know_neither_models_nor_the_engine():
    devices = [name for name in modules() if within(name, "cuengine.device")]
    allowed = {"cuengine.batch", "cuengine.beside", "cuengine.errors"}
    allowed |= {"cuengine.extras", "cuengine.paths", "cuengine.quantized"}
    forbidden = [name for name in core() if name not in allowed]
    assert not offences(devices, "cuengine.model", "cuengine.api", *ASSEMBLY, *forbidden)


def test_model_imports_a_device_only_through_its_interface():
    model = [name for name in modules() if within(name, "cuengine.model")]
    uses = [use for use in offences(model, "cuengine.device") if not use.endswith(".interface")]
    assert not uses


def test_model_imports_neither_engine_nor_server():
    model = [name for name in modules() if within(name, "cuengine.model")]
    engine = {"cuengine.scheduler", "cuengine.block_pool", "cuengine.model_runner", *ASSEMBLY}
    assert not offences(model, "cuengine.api", "cuengine.cli", "aiohttp", *engine)


def test_api_uses_the_engine_only_through_the_async_engine():
    api = [name for name in modules() if within(name, "cuengine.api")]
    uses = [
        f"{name} imports {imported}"
        for name in api
        for imported in imports(modules()[name])
        if within(imported, "cuengine") and not within(imported, "cuengine.api", *API_USES)
    ]
    assert not uses


def test_cupy_is_imported_by_the_runtime_of_the_cuda_device_alone():
    others = [name for name in modules() if name != "cuengine.device.cuda.cupy_runtime"]
    assert not offences(others, "cupy", "cupy_backends", "cupyx")


def words_of(path: Path) -> Iterator[str]:
    """Names and strings in a file's code; docstrings, and comments, are for readers."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in prose else node.value


def test_neither_the_cuda_device_nor_the_model_asks_what_runs_the_kernels():
    """Its arrays are opaque on the emulated runtime, so it cannot compute with them by CuPy."""
    own = {"cuengine.device.cuda.cupy_runtime", "cuengine.device.cuda.find"}
    names = [n for n in modules() if within(n, "cuengine.device.cuda", "cuengine.model")]
    names = [n for n in (*names, "cuengine.model_runner") if n not in own]
    assert {"cuengine.device.cuda.device", "cuengine.model.llama"} <= set(names)
    assert not offences(names, "cuengine.device.emulated", "cupy", "cupy_backends")
    asks = re.compile("emulat|cupy", re.IGNORECASE)
    found = [f"{n}: {w}" for n in names for w in words_of(modules()[n]) if asks.search(w)]
    assert not found
    for path in (ROOT / "cuda").rglob("*.cu*"):
        assert not re.search("emulat|__CUDACC_RTC__|#ifn?def", path.read_text()), path


def test_the_product_imports_no_torch_and_no_transformers():
    assert not offences(list(modules()), "torch", "transformers", "vllm", "llama_cpp")


def test_tests_import_torch_and_transformers_only_where_marked_reference():
    for path in python_files("tests"):
        if any(within(name, "torch", "transformers") for name in imports(path)):
            assert "pytest.mark.reference" in path.read_text(encoding="utf-8"), path


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = [
        *project["dependencies"],
        *extras["cpu"],
        *extras["cuda12"],
        *extras["otel"],
        *extras["ray"],
    ]
    names = [re.split(r"[<>=\[;]", line)[0].strip() for line in required]
    declared = {name.removesuffix("-cuda12x").replace("-", "_") for name in names}
    # Distributions of one namespace package, opentelemetry.
    declared |= {name.partition("_")[0] for name in declared if name.startswith("opentelemetry_")}
    known = declared | set(sys.stdlib_module_names) | {"cuengine"}
    unknown = {
        f"{name} imports {imported}"
        for name, path in modules().items()
        for imported in imports(path)
        if imported.split(".")[0] not in known
    }
    assert not unknown


def test_the_kernels_folder_holds_no_python():
    # With an __init__.py it would shadow NVIDIA's `cuda` package for whoever starts Python here.
    assert not list((ROOT / "cuda").rglob("*.py"))


@pytest.mark.parametrize("folder", [*PACKAGES, "bench", "tests"])
def test_every_module_says_what_lives_in_it(folder: str):
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files(folder)
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_no_module_is_called_utils():
    vague = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [path for path in python_files(*PACKAGES, "bench") if path.name in vague]


def test_every_package_of_the_sources_is_listed_for_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert listed == packages | {"cuengine.cuda"}
    folders = {name.rpartition(".")[0] for name, path in modules().items() if path.stem[0] != "_"}
    assert folders <= packages


def loaded_by(statement: str) -> set[str]:
    """Modules in a fresh interpreter after a statement, less those it had from the start."""
    script = (
        "import sys\nbefore = set(sys.modules)\n"
        f"{statement}\nprint('\\n'.join(set(sys.modules) - before))"
    )
    # -P: not the working folder's cuda/, model/ and api/, but what is installed.
    command = [sys.executable, "-P", "-c", script]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(output.split())


def test_the_servers_process_loads_neither_numpy_nor_the_engine():
    loaded = loaded_by("import cuengine.async_engine, cuengine.api.server")
    unwanted = ("numpy", "numba", "cupy", "cuengine.engine", "cuengine.scheduler")
    assert not [name for name in loaded if within(name, *unwanted)]
    assert "cuengine.engine_link" in loaded


def test_importing_cuengine_loads_nothing_heavy():
    top = {name.split(".")[0] for name in loaded_by("import cuengine")}
    third_party = top & set(importlib.metadata.packages_distributions()) - {"cuengine"}
    assert not third_party


def test_importing_the_core_loads_no_model_server_or_compiler():
    names = ", ".join(core())
    loaded = loaded_by(f"import {names}")
    unwanted = ("cuengine.model", "cuengine.api", "aiohttp", "numba", "cupy", "tokenizers", "gguf")
    unwanted = (*unwanted, "llguidance")
    assert not [name for name in loaded if within(name, *unwanted)]
    assert "cuengine.scheduler" in loaded


def test_ray_is_imported_by_four_modules_that_nobody_imports_before_it_is_asked_for():
    names = ("connection", "deployment", "replica", "router")
    with_ray = {f"cuengine.ray_backend.{name}" for name in names}
    assert not offences([name for name in modules() if name not in with_ray], "ray")
    loaded = loaded_by(
        "import cuengine.cli.serve, cuengine.cli.arguments, cuengine.api.server\n"
        "import cuengine.ray_backend.client, cuengine.ray_backend.answers\n"
        "cuengine.cli.arguments.build_parser()"
    )
    assert not [name for name in loaded if within(name, "ray", *with_ray)]


def test_the_core_does_not_know_the_ray_backend():
    assert not offences(core(), "cuengine.ray_backend")
