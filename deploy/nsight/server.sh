#!/bin/sh
# The timeline of a server under load, by Nsight Systems:
#
#     deploy/nsight/server.sh MODEL [flags of cuengine serve]
#
# Records $DURATION seconds (10), $DELAY seconds (60) after the start; put load on it by then. The
# server then ends as on SIGTERM. Writes $OUT.nsys-rep (server) and prints where the time went:
# by kernel, by what NVTX ranges launched, by NVTX range of the host.
set -eu
out=${OUT:-server}

# The engine is a child process of the server's, which nsys follows. node: the kernels in a CUDA
# graph one by one. A decode step is such a graph; --enforce-eager among the flags launches its
# kernels within `layer N` ranges instead.
nsys profile \
    --trace=cuda,nvtx,cublas --cuda-graph-trace=node --sample=none --cpuctxsw=none \
    --delay="${DELAY:-60}" --duration="${DURATION:-10}" --kill=sigterm \
    --output="$out" --force-overwrite=true \
    cuengine serve "$@" --device cuda

nsys stats --report cuda_gpu_kern_sum --report nvtx_gpu_proj_sum --report nvtx_pushpop_sum \
    "$out.nsys-rep"
