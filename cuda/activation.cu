// silu_mul: y[t, i] = silu(gate[t, i]) * up[t, i], silu(g) = g / (1 + exp(-g)).
//
//   gate_up   T [num_tokens, 2 * width]   gate in the first half of a row, up in the second
//   y         T [num_tokens, width]       (width a multiple of 16 bytes)
//
// Grid: (ceil(width / vector / blockDim.x), num_tokens); one 16-byte vector of y per thread.
// Moves 3 * width * sizeof(T) bytes a token, one exponential an element: bound by memory.
#include "include/common.cuh"

template <typename T>
__global__ void __launch_bounds__(256) silu_mul(T* y, const T* gate_up, int width) {
    constexpr int kVec = Vec<T>::kSize;
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * kVec;
    if (i >= width) return;
    const int64 token = blockIdx.y;
    const T* gate = gate_up + token * 2 * width;
    Vec<T> gates = load_vec(gate + i);
    const Vec<T> ups = load_vec(gate + width + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
        const float g = to_float(gates.values[j]);
        gates.values[j] = from_float<T>(g / (1.0f + expf(-g)) * to_float(ups.values[j]));
    }
    store_vec(y + token * width + i, gates);
}
