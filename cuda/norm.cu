// rms_norm:      y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight
// add_rms_norm:  residual[t, :] += x[t, :] first, rounded to T; then the same of residual.
//
//   x, residual, y   T [num_tokens, hidden]      (hidden a multiple of 16 bytes)
//   weight           T [hidden]
//
// Grid: one block per token; block: a multiple of 32 threads, up to 1024. A thread takes every
// blockDim.x-th 16-byte vector of the row; the sum of squares is float32, by warp shuffles and one word of
// shared memory per warp. The second look at the row finds it in L1. Moves 2 (rms_norm) or 4 (add_rms_norm)
// * hidden * sizeof(T) bytes a token, and weight from L2: bound by memory, or by launch for few tokens.
#include "include/common.cuh"

template <typename T, bool kAdd>
__device__ __forceinline__ void normalize_row(
    T* y, const T* x, T* residual, const T* weight, int hidden, float eps) {
    __shared__ float words[kWarpSize];
    constexpr int kVec = Vec<T>::kSize;
    const int64 row = static_cast<int64>(blockIdx.x) * hidden;

    float squares = 0.0f;
    for (int i = threadIdx.x * kVec; i < hidden; i += blockDim.x * kVec) {
        Vec<T> values = load_vec(x + row + i);
        if constexpr (kAdd) {
            const Vec<T> old = load_vec(residual + row + i);
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                values.values[j] =
                    from_float<T>(to_float(values.values[j]) + to_float(old.values[j]));
            }
            store_vec(residual + row + i, values);
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            const float value = to_float(values.values[j]);
            squares += value * value;
        }
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, words) / hidden + eps);

    // Each thread reads back only what it wrote itself.
    const T* source = kAdd ? residual : x;
    for (int i = threadIdx.x * kVec; i < hidden; i += blockDim.x * kVec) {
        Vec<T> values = load_vec(source + row + i);
        const Vec<T> weights = load_vec(weight + i);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            values.values[j] =
                from_float<T>(to_float(values.values[j]) * scale * to_float(weights.values[j]));
        }
        store_vec(y + row + i, values);
    }
}

template <typename T>
__global__ void __launch_bounds__(1024)
rms_norm(T* y, const T* x, const T* weight, int hidden, float eps) {
    normalize_row<T, false>(y, x, nullptr, weight, hidden, eps);
}

template <typename T>
__global__ void __launch_bounds__(1024)
add_rms_norm(T* y, const T* x, T* residual, const T* weight, int hidden, float eps) {
    normalize_row<T, true>(y, x, residual, weight, hidden, eps);
}
