// rotary_cache: turns q and k by their positions, writes k and v into their slots of the KV cache and q to
// q_out, all in one pass over qkv.
//
//   qkv            T [num_tokens, (num_heads + 2 * num_kv_heads) * kHeadDim]     q heads, k heads, v heads
//   q_out          T [num_tokens, num_heads * kHeadDim]
//   cos_sin        float32 [max_len, kHeadDim]       cosines in the first half of a row, sines in the second
//   kv_layer       T [2, num_blocks, num_kv_heads, block_size, kHeadDim]         K, then V
//   positions      int32 [num_tokens]
//   slot_mapping   int64 [num_tokens]                block * block_size + offset; -1: k and v go nowhere
//
// Pairs are (i, i + kHeadDim / 2), as transformers' rotate_half has them: first' = first * cos - second * sin,
// second' = second * cos + first * sin, in float32.
//
// Grid: one block per token. Work items of a token are pairs of 16-byte vectors, one from each half of a head;
// a thread takes every blockDim.x-th. Moves 2 * qkv bytes and one row of cos_sin a token: bound by memory.
#include "include/common.cuh"

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(256) rotary_cache(
    T* q_out, const T* qkv, const float* cos_sin, T* kv_layer, const int* positions,
    const int64* slot_mapping, int num_heads, int num_kv_heads, int num_blocks, int block_size) {
    constexpr int kVec = Vec<T>::kSize;
    constexpr int kHalf = kHeadDim / 2;
    constexpr int kItems = kHalf / kVec;  // of one head
    static_assert(kHalf % kVec == 0, "half a head is whole 16-byte vectors");

    const int64 token = blockIdx.x;
    const int64 slot = slot_mapping[token];
    const int64 block = slot / block_size, offset = slot % block_size;
    const int64 layer_half = static_cast<int64>(num_blocks) * num_kv_heads * block_size * kHeadDim;
    const float* cosines = cos_sin + static_cast<int64>(positions[token]) * kHeadDim;
    const int heads = num_heads + 2 * num_kv_heads;
    const T* source = qkv + token * heads * kHeadDim;

    for (int item = threadIdx.x; item < heads * kItems; item += blockDim.x) {
        const int head = item / kItems;
        const int i = item % kItems * kVec;
        Vec<T> first = load_vec(source + head * kHeadDim + i);
        Vec<T> second = load_vec(source + head * kHeadDim + i + kHalf);
        const bool is_q = head < num_heads;
        const bool is_v = head >= num_heads + num_kv_heads;
        if (!is_v) {
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                const float cosine = cosines[i + j], sine = cosines[i + j + kHalf];
                const float a = to_float(first.values[j]), b = to_float(second.values[j]);
                first.values[j] = from_float<T>(a * cosine - b * sine);
                second.values[j] = from_float<T>(b * cosine + a * sine);
            }
        }
        T* target;
        if (is_q) {
            target = q_out + (token * num_heads + head) * kHeadDim;
        } else {
            if (slot < 0) continue;
            const int kv_head = head - num_heads - (is_v ? num_kv_heads : 0);
            target = kv_layer + (is_v ? layer_half : 0) +
                     ((block * num_kv_heads + kv_head) * block_size + offset) * kHeadDim;
        }
        store_vec(target + i, first);
        store_vec(target + i + kHalf, second);
    }
}
