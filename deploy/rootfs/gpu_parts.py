"""Loads all that the CUDA device loads before it asks for a GPU.

start.py runs it in an image for GPUs; arguments: the architectures that have kernels built ahead.
"""

import importlib
import pkgutil
import sys

import cupy

import cuengine
from cuengine.device.cuda.cublas import find_cublas, library_version
from cuengine.device.cuda.find import cupy_cuda_major
from cuengine.device.kernel_cache import get_kernels
from cuengine.device.kernel_variants import programs
from cuengine.device.nvrtc import NvrtcError, find_nvrtc

for module in pkgutil.walk_packages(cuengine.__path__, "cuengine."):
    if not module.name.endswith("__main__"):
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
found = [
    get_kernels(program, int(architecture.removeprefix("sm_")))
    for architecture in sys.argv[1:] or ["sm_90"]
    for program in programs("bfloat16", 128, int(architecture.removeprefix("sm_")))
]
size = sum(kernels.cubin.stat().st_size for kernels in found)
print(f"{len(found)} programs in bfloat16 with heads of 128, {size} bytes of code")
