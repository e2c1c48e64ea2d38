"""Loads all that the CUDA device loads before it asks for a GPU.

start.py runs it in an image for GPUs; arguments: the architectures that have kernels built ahead.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import cupy

import cuengine.device.cuda
from cuengine.device.cuda.cublas import find_cublas, library_version
from cuengine.device.cuda.find import cupy_cuda_major
from cuengine.device.kernel_cache import get_kernels
from cuengine.device.kernel_variants import DTYPES, HEAD_DIMS, programs
from cuengine.device.nvrtc import NvrtcError, find_nvrtc
from cuengine.paths import PREBUILT_VARIABLE

for module in pkgutil.iter_modules(cuengine.device.cuda.__path__, "cuengine.device.cuda."):
    importlib.import_module(module.name)
print(f"CuPy {cupy.__version__}, with {cupy.cuda.Stream.__name__}, {cupy.cuda.Memory.__name__}")
major = cupy_cuda_major()
library = find_cublas(major)
print(f"cuBLAS {library_version(library)}, {library}")
try:
    print(f"NVRTC {'.'.join(map(str, find_nvrtc(major).version))}")
    if sys.argv[1:]:
        sys.exit("NVRTC is there, and kernels were built ahead")
except NvrtcError as error:
    if not sys.argv[1:]:
        raise
    print(f"no NVRTC: {error}")
built = Path(os.environ[PREBUILT_VARIABLE])
for architecture in sys.argv[1:] or ["sm_90"]:
    models = [
        (dtype, head_dim)
        for dtype, short in DTYPES.items()
        for head_dim in HEAD_DIMS
        if (built / f"paged_attention_decode_{short}_{head_dim}.{architecture}.json").exists()
    ]
    if sys.argv[1:] and not models:
        sys.exit(f"{built} has nothing for {architecture}")
    for dtype, head_dim in models or [("bfloat16", 128)]:
        number = int(architecture.removeprefix("sm_"))
        found = [get_kernels(program, number) for program in programs(dtype, head_dim, number)]
        size = sum(kernels.cubin.stat().st_size for kernels in found)
        print(f"{architecture}, {dtype}, heads of {head_dim}: {len(found)} programs, {size} bytes")
