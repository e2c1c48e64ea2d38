// One warp's share of FlashAttention-2 (Dao, arXiv 2307.08691) on tensor cores: some 16-row tiles of queries against
// a tile of keys and values, all in shared memory, with the softmax carried along in registers. Who brings the
// tiles, and what becomes of the result, is the kernels' business.
#pragma once

#include "attention.cuh"
#include "ptx.cuh"

// Rows of kHeadDim 16-bit elements in shared memory, in 16-byte chunks so placed that the 8 rows of an ldmatrix
// meet in no bank: by XOR with the row where a row is whole multiples of 128 bytes, else by an odd row length.
template <int kHeadDim>
struct SharedRows {
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr bool kSwizzled = kChunks % 8 == 0;
    static constexpr int kStride = kSwizzled ? kChunks : kChunks | 1;

    __host__ __device__ static constexpr int bytes(int rows) { return rows * kStride * 16; }
    __device__ __forceinline__ static uint32 offset(int row, int chunk) {
        return (row * kStride + (kSwizzled ? chunk ^ (row & 7) : chunk)) * 16;
    }
};

template <typename T, int kHeadDim, int kRowTiles, int kKeys>
struct WarpAttention {
    using Rows = SharedRows<kHeadDim>;

    // Lane l has rows l / 4 (half 0) and l / 4 + 8 (half 1) of every row tile, columns 2 * (l % 4) and the next
    // of every 8: elements 2 * half and 2 * half + 1.
    float out[kRowTiles][kHeadDim / 8][4];
    float maximum[kRowTiles][2];  // of q * k, not scaled
    float total[kRowTiles][2];    // of this lane's columns, until `finish`

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                maximum[m][half] = -CUENGINE_INFINITY;
                total[m][half] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
            }
        }
    }

    // One tile of keys. All three operands are loaded by the same lane pattern, 16 rows by 2 chunks, so that one set
    // of swizzled offsets in registers serves them all. Shared addresses; query_row: the warp's first row in `queries`. masked: some row
    // does not see all keys; `visible(m, half)` says how many, from the tile's first key on.
    template <typename Visible>
    __device__ __forceinline__ void step(uint32 queries, int query_row, uint32 keys, uint32 values,
                                         bool masked, Visible visible, float scale_log2) {
        const int lane = threadIdx.x % kWarpSize;
        float scores[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            uint32 a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                load_matrices(a[m], queries + Rows::offset(query_row + m * 16 + lane % 16,
                                                           2 * k + lane / 16));
            }
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32 b[4];
                load_matrices(b, keys + Rows::offset(n * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    multiply_add<T>(scores[m][2 * n], a[m], b[0], b[2]);
                    multiply_add<T>(scores[m][2 * n + 1], a[m], b[1], b[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (masked) hide(scores[m], half, visible(m, half));
                soften(scores[m], m, half, scale_log2);
            }
        }
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            uint32 a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                const float(&left)[4] = scores[m][2 * k], (&right)[4] = scores[m][2 * k + 1];
                a[m][0] = pack_pair<T>(left[0], left[1]);
                a[m][1] = pack_pair<T>(left[2], left[3]);
                a[m][2] = pack_pair<T>(right[0], right[1]);
                a[m][3] = pack_pair<T>(right[2], right[3]);
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 16; ++n) {
                uint32 b[4];
                load_matrices_transposed(
                    b, values + Rows::offset(k * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    multiply_add<T>(out[m][2 * n], a[m], b[0], b[1]);
                    multiply_add<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Keys that a row does not see.
    __device__ __forceinline__ void hide(float (&scores)[kKeys / 8][4], int half, int visible) {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (n * 8 + column + i >= visible) scores[n][2 * half + i] = -CUENGINE_INFINITY;
            }
        }
    }

    // Scores of one row become weights; what was summed so far is brought to the new maximum.
    __device__ __forceinline__ void soften(float (&scores)[kKeys / 8][4], int m, int half,
                                           float scale_log2) {
        float highest = maximum[m][half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                highest = fmaxf(highest, scores[n][2 * half + i]);
            }
        }
        highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
        const float base = highest == -CUENGINE_INFINITY ? 0.0f : highest * scale_log2;
        const float correction = exp2f(maximum[m][half] * scale_log2 - base);
        maximum[m][half] = highest;
        float sum = total[m][half] * correction;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = scores[n][2 * half + i];
                score = exp2f(score * scale_log2 - base);
                sum += score;
            }
        }
        total[m][half] = sum;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            out[m][n][2 * half] *= correction;
            out[m][n][2 * half + 1] *= correction;
        }
    }

    // Totals of whole rows.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& sum = total[m][half];
                sum += __shfl_xor_sync(kWholeWarp, sum, 1);
                sum += __shfl_xor_sync(kWholeWarp, sum, 2);
            }
        }
    }
};
