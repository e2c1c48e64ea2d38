#!/bin/sh
# Why one kernel takes as long as it does, by Nsight Compute:
#
#     deploy/nsight/kernel.sh KERNEL MODEL [flags of cuengine profile]
#     deploy/nsight/kernel.sh paged_attention_decode MODEL --batch 64 --context 4096 --steps 2
#
# KERNEL is the beginning of a name in cuda/*.cu. Of its launches in steps of the engine the first $SKIP
# (64) are let pass, and the next $COUNT (2) measured, each replayed some 40 times. Writes
# $OUT.ncu-rep (KERNEL) and prints it; `ncu-ui` shows it with the lines of cuda/*.cu.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
kernel=$1
shift
out=${OUT:-$kernel}

# --enforce-eager: within a CUDA graph a launch has no NVTX range.
ncu --set full --import-source yes --clock-control none --target-processes all \
    --nvtx --nvtx-include 'step/' --kernel-name "regex:^$kernel" \
    --launch-skip "${SKIP:-64}" --launch-count "${COUNT:-2}" \
    --export "$out" --force-overwrite \
    cuengine profile "$@" --device cuda --enforce-eager

ncu --import "$out.ncu-rep" --page details
