// copy_blocks: whole KV blocks within the cache, in all layers: copy-on-write.
// swap_blocks: whole KV blocks between the cache and pinned host memory, either way: preemption by swapping.
//
//   cache, target, source   16-byte vectors [num_layers * 2, blocks, vectors_per_block]
//   pairs                   int32 [num_pairs, 2]     (from, to) block numbers; no block is both in one launch
//
// Both sides have the cache's layout, with block counts of their own. Grid: (num_pairs, num_layers * 2); a block
// of threads copies one KV block of one layer's K or V, a 16-byte vector per thread and turn. Moves twice the
// blocks' bytes; swap_blocks at the speed of the bus, so give it few blocks of threads at a time and leave the
// rest of the chip to the model.
#include "include/common.cuh"

__device__ __forceinline__ void copy_block(
    uint4* target, const uint4* source, const int* pairs, int64 target_blocks, int64 source_blocks,
    int vectors_per_block) {
    const int64 layer = blockIdx.y;
    const int64 from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    source += (layer * source_blocks + from) * vectors_per_block;
    target += (layer * target_blocks + to) * vectors_per_block;
    for (int i = threadIdx.x; i < vectors_per_block; i += blockDim.x) target[i] = source[i];
}

extern "C" __global__ void __launch_bounds__(256)
copy_blocks(uint4* cache, const int* pairs, int num_blocks, int vectors_per_block) {
    copy_block(cache, cache, pairs, num_blocks, num_blocks, vectors_per_block);
}

extern "C" __global__ void __launch_bounds__(256)
swap_blocks(uint4* target, const uint4* source, const int* pairs, int target_blocks,
            int source_blocks, int vectors_per_block) {
    copy_block(target, source, pairs, target_blocks, source_blocks, vectors_per_block);
}
