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

    // Where this lane loads matrices from the first 16 rows and 2 chunks of a tile. The four matrices come in the
    // order in which multiply_add wants them, else the compiler would move two registers for every product:
    // of queries and values first the rows, of keys first the chunks.
    __device__ __forceinline__ static uint32 rows_first() {
        const int lane = threadIdx.x % kWarpSize;
        return offset(lane % 16, lane / 16);
    }
    __device__ __forceinline__ static uint32 chunks_first() {
        const int lane = threadIdx.x % kWarpSize;
        return offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
    // The same for another 16 rows and 2 chunks. Whole multiples of 8 rows leave the swizzle as it is, and two
    // chunks change other bits of it than those that tell lanes apart.
    __device__ __forceinline__ static uint32 advance(uint32 offset, int rows_16, int chunks_2) {
        const uint32 column = kSwizzled ? offset ^ (chunks_2 * 32) : offset + chunks_2 * 32;
        return column + bytes(rows_16 * 16);
    }
};

template <typename T, int kHeadDim, int kRowTiles, int kKeys>
struct WarpAttention {
    using Rows = SharedRows<kHeadDim>;

    // Lane l has rows l / 4 (half 0) and l / 4 + 8 (half 1) of every row tile, columns 2 * (l % 4) and the next
    // of every 8: elements 2 * half and 2 * half + 1.
    float out[kRowTiles][kHeadDim / 8][4];
    float reference[kRowTiles][2];  // score (of q * k, not scaled) whose weight is 1
    float total[kRowTiles][2];      // of this lane's columns, until `finish`

    // Weights may grow to 2^kSlack before the reference follows the highest score: after the first few tiles it
    // nearly never has to, and the output is not multiplied by 1 again and again. float16 and bfloat16 keep
    // weights of up to 2^8 as precisely as those of up to 1.
    static constexpr float kSlack = 8.0f;

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                reference[m][half] = -CUENGINE_INFINITY;
                total[m][half] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
            }
        }
    }

    // One tile of keys. Shared addresses; `queries` is that of the warp's first row. masked: some row does not see
    // all keys; `visible(m, half)` says how many, from the tile's first key on.
    template <typename Visible>
    __device__ __forceinline__ void step(uint32 queries, uint32 keys, uint32 values, bool masked,
                                         Visible visible, float scale_log2) {
        const uint32 rows_first = Rows::rows_first(), chunks_first = Rows::chunks_first();
        float scores[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            uint32 a[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                load_matrices(a[m], queries + Rows::advance(rows_first, m, k));
            }
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32 b[4];
                load_matrices(b, keys + Rows::advance(chunks_first, n, k));
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    multiply_add<T>(scores[m][2 * n], a[m], b[0], b[1]);
                    multiply_add<T>(scores[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            if (masked) {
                hide(scores[m], 0, visible(m, 0));
                hide(scores[m], 1, visible(m, 1));
            }
            soften(scores[m], m, scale_log2);
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
                load_matrices_transposed(b, values + Rows::advance(rows_first, k, n));
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

    // Scores of a row tile become weights.
    __device__ __forceinline__ void soften(float (&scores)[kKeys / 8][4], int m, float scale_log2) {
        float highest[2] = {-CUENGINE_INFINITY, -CUENGINE_INFINITY};  // of this lane
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) highest[i / 2] = fmaxf(highest[i / 2], scores[n][i]);
        }
        const bool far_above = (highest[0] - reference[m][0]) * scale_log2 > kSlack ||
                               (highest[1] - reference[m][1]) * scale_log2 > kSlack;
        if (__any_sync(kWholeWarp, far_above)) {
            raise_reference(highest[0], m, 0, scale_log2);
            raise_reference(highest[1], m, 1, scale_log2);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float base = scaled_reference(m, half, scale_log2);
            float sum = total[m][half];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_approx(scores[n][i] * scale_log2 - base);
                    sum += scores[n][i];
                }
            }
            total[m][half] = sum;
        }
    }

    // 0 for a row that has seen no key: its weights are 2^-inf then, not NaN.
    __device__ __forceinline__ float scaled_reference(int m, int half, float scale_log2) const {
        const float score = reference[m][half];
        return score == -CUENGINE_INFINITY ? 0.0f : score * scale_log2;
    }

    // The row's highest score so far becomes its reference, and what was summed is brought to it.
    __device__ __forceinline__ void raise_reference(float highest, int m, int half, float scale_log2) {
        highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
        const float before = reference[m][half] * scale_log2;
        reference[m][half] = fmaxf(reference[m][half], highest);
        const float correction = exp2_approx(before - scaled_reference(m, half, scale_log2));
        total[m][half] *= correction;
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
