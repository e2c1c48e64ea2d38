// Rows of a matrix by index.
//
// embedding:      y[t, :] = weight[token_ids[t], :]
// take_rows:      y[r, :] = x[indices[r], :]                 rows whose logits are wanted
// broadcast_row:  y[t, :] = row[:]                           a bias, before a GEMM that adds to it
// gather_tokens:  token_ids[t] = sampled[sources[t]]         where sources[t] >= 0: decode inputs that
//                                                            the last step left on the device
//
//   weight T [vocab, width]   x T [any, width]   y T [rows, width]   (width a multiple of 16 bytes)
//   token_ids, indices, sources, sampled int32
//
// Grid of the first three: (ceil(width / vector / blockDim.x), rows), one 16-byte vector per thread; of
// gather_tokens: ceil(num_tokens / blockDim.x). They move 2 * width * sizeof(T) bytes a row: bound by memory.
#include "include/common.cuh"

template <typename T>
__device__ __forceinline__ void copy_row(T* y, const T* source, int width) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * Vec<T>::kSize;
    if (i < width) store_vec(y + static_cast<int64>(blockIdx.y) * width + i, load_vec(source + i));
}

template <typename T>
__global__ void __launch_bounds__(256)
embedding(T* y, const T* weight, const int* token_ids, int width) {
    copy_row(y, weight + static_cast<int64>(token_ids[blockIdx.y]) * width, width);
}

template <typename T>
__global__ void __launch_bounds__(256)
take_rows(T* y, const T* x, const int* indices, int width) {
    copy_row(y, x + static_cast<int64>(indices[blockIdx.y]) * width, width);
}

template <typename T>
__global__ void __launch_bounds__(256) broadcast_row(T* y, const T* row, int width) {
    copy_row(y, row, width);
}

extern "C" __global__ void __launch_bounds__(256)
gather_tokens(int* token_ids, const int* sampled, const int* sources, int num_tokens) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < num_tokens && sources[t] >= 0) token_ids[t] = sampled[sources[t]];
}
