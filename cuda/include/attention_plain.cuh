// Attention without tensor cores, for float32 and for chips before sm_80: one algorithm for decode and prefill.
#pragma once

#include "attention.cuh"

constexpr int kPlainKeys = kWarpSize;  // keys of a tile: one per lane

// Elements from one row of a shared tile to the next: an odd count of 16-byte vectors, so that the lanes of a
// warp, each reading its own row, meet in no bank.
template <typename T, int kHeadDim>
__host__ __device__ constexpr int plain_stride() {
    return (kHeadDim / Vec<T>::kSize | 1) * Vec<T>::kSize;
}

// The rows first_row to first_row + 4 * kRowsPerWarp - 1 of one KV head over the keys of `range`.
//
// Each warp has kRowsPerWarp rows. A tile of 32 keys is brought to shared memory; lane k scores key k against
// all rows of its warp, the warp shares maximum and sum by shuffles, then the tile is replaced by the values and
// lane l sums columns l, l + 32, ...  shared: float32 [4 * kRowsPerWarp, kHeadDim] queries, then one tile.
template <typename T, int kHeadDim, int kRowsPerWarp>
__device__ void attend_plain(
    RowOutput<T, kHeadDim> output, const T* q, const PagedHead<T, kHeadDim>& cache,
    const Queries& queries, KeyRange range, int first_row, int kv_head, int group, float scale,
    unsigned char* shared) {
    constexpr int kVec = Vec<T>::kSize;
    constexpr int kVectors = kHeadDim / kVec;
    constexpr int kStride = plain_stride<T, kHeadDim>();
    constexpr int kColumns = (kHeadDim + kWarpSize - 1) / kWarpSize;
    constexpr int kRows = kAttentionWarps * kRowsPerWarp;
    float* shared_q = reinterpret_cast<float*>(shared);
    T* tile = reinterpret_cast<T*>(shared_q + kRows * kHeadDim);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int num_rows = queries.count * group;

    // Scores come out in units of log2.
    for (int i = threadIdx.x; i < kRows * kHeadDim; i += kAttentionThreads) {
        const int row = first_row + i / kHeadDim;
        float value = 0.0f;
        if (row < num_rows) {
            const int64 source = output.row(queries.first_token + row / group,
                                            kv_head * group + row % group);
            value = to_float(q[source * kHeadDim + i % kHeadDim]) * (scale * kLog2E);
        }
        shared_q[i] = value;
    }

    float out[kRowsPerWarp][kColumns] = {};
    float maximum[kRowsPerWarp], total[kRowsPerWarp];
    int visible[kRowsPerWarp];  // keys that the row may see
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
        maximum[r] = -CUENGINE_INFINITY;
        total[r] = 0.0f;
        visible[r] = queries.context + (first_row + warp * kRowsPerWarp + r) / group + 1;
    }

    auto load_tile = [&](int first_key, int count, int64 to_kind) {
        for (int i = threadIdx.x; i < count * kVectors; i += kAttentionThreads) {
            const int key = i / kVectors, column = i % kVectors * kVec;
            const char* source = cache.find(first_key + key) + to_kind;
            store_vec(tile + key * kStride + column,
                      load_vec(reinterpret_cast<const T*>(source) + column));
        }
    };

    for (int first_key = range.first; first_key < range.end; first_key += kPlainKeys) {
        const int count = min(kPlainKeys, range.end - first_key);
        __syncthreads();
        load_tile(first_key, count, 0);
        __syncthreads();

        float scores[kRowsPerWarp] = {};
        if (lane < count) {
#pragma unroll 4
            for (int i = 0; i < kHeadDim; i += kVec) {
                const Vec<T> key = load_vec(tile + lane * kStride + i);
#pragma unroll
                for (int r = 0; r < kRowsPerWarp; ++r) {
                    const float* row = shared_q + (warp * kRowsPerWarp + r) * kHeadDim + i;
#pragma unroll
                    for (int j = 0; j < kVec; ++j) scores[r] += row[j] * to_float(key.values[j]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; ++r) {
            const bool seen = lane < count && first_key + lane < visible[r];
            const float score = seen ? scores[r] : -CUENGINE_INFINITY;
            const float highest = fmaxf(maximum[r], warp_max(score));
            const float base = highest == -CUENGINE_INFINITY ? 0.0f : highest;
            const float correction = exp2f(maximum[r] - base);
            scores[r] = exp2f(score - base);
            total[r] = total[r] * correction + warp_sum(scores[r]);
            maximum[r] = highest;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) out[r][c] *= correction;
        }
        __syncthreads();
        load_tile(first_key, count, cache.value_bytes);
        __syncthreads();
        for (int key = 0; key < count; ++key) {
            float weights[kRowsPerWarp];
#pragma unroll
            for (int r = 0; r < kRowsPerWarp; ++r) {
                weights[r] = __shfl_sync(kWholeWarp, scores[r], key);
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int column = lane + c * kWarpSize;
                if (kHeadDim % kWarpSize != 0 && column >= kHeadDim) continue;
                const float value = to_float(tile[key * kStride + column]);
#pragma unroll
                for (int r = 0; r < kRowsPerWarp; ++r) out[r][c] += weights[r] * value;
            }
        }
    }

#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
        const int row = first_row + warp * kRowsPerWarp + r;
        if (row >= num_rows) continue;
        const int token = queries.first_token + row / group, head = kv_head * group + row % group;
        const float inverse = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
        if (lane == 0) output.write_log(token, head, maximum[r], total[r]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int column = lane + c * kWarpSize;
            if (kHeadDim % kWarpSize != 0 && column >= kHeadDim) continue;
            output.write(token, head, column, out[r][c] * inverse);
        }
    }
}
