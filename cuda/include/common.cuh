// What every kernel shares: element types, 16-byte vectors, sums over a warp and a block.
// Inline PTX is in ptx.cuh. No kernel lives here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using fp32 = float;
using fp16 = __half;
using bf16 = __nv_bfloat16;
using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int kWarpSize = 32;
constexpr uint32 kWholeWarp = 0xffffffffu;
#define CUENGINE_INFINITY __int_as_float(0x7f800000)

// 16 bytes of T: what one thread loads or stores at a time.
template <typename T>
struct alignas(16) Vec {
    static constexpr int kSize = 16 / sizeof(T);
    T values[kSize];
};

template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const T* source) {
    return *reinterpret_cast<const Vec<T>*>(source);
}

template <typename T>
__device__ __forceinline__ void store_vec(T* target, const Vec<T>& vec) {
    *reinterpret_cast<Vec<T>*>(target) = vec;
}

__device__ __forceinline__ float to_float(fp32 x) { return x; }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ fp32 from_float<fp32>(float x) { return x; }
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
    }
    return x;
}

// Sum over the block, given to all its threads. blockDim.x is a multiple of 32; one call per kernel
// and `words` (a second needs a barrier before it).
__device__ __forceinline__ float block_sum(float x, float* words) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    x = warp_sum(x);
    if (lane == 0) words[warp] = x;
    __syncthreads();
    const int num_warps = blockDim.x / kWarpSize;
    return warp_sum(lane < num_warps ? words[lane] : 0.0f);
}
