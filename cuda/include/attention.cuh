// What all attention kernels share: where a key lies in the paged cache, which rows a block has, and how a row's
// result leaves. A row is one query head of one query; the rows of a KV head in one sequence are numbered
// query * group + head within the group, so that all that read the same K and V stand together.
#pragma once

#include "common.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = kAttentionWarps * kWarpSize;

// K or V of one KV head of one sequence.
//   layer         T [2, num_blocks, num_kv_heads, block_size, kHeadDim]
//   block_table   int32 [blocks of the sequence]
template <typename T, int kHeadDim>
struct PagedHead {
    const char* keys;
    int64 value_bytes;  // from a key to its value
    const int* block_table;
    int block_bytes, block_shift, block_mask;  // block_size is a power of two

    __device__ PagedHead(const T* layer, const int* table, int kv_head, int num_kv_heads,
                         int num_blocks, int block_size) {
        const int head_bytes = block_size * kHeadDim * static_cast<int>(sizeof(T));
        block_bytes = num_kv_heads * head_bytes;
        keys = reinterpret_cast<const char*>(layer) + static_cast<int64>(kv_head) * head_bytes;
        value_bytes = static_cast<int64>(num_blocks) * block_bytes;
        block_table = table;
        block_shift = __ffs(block_size) - 1;
        block_mask = block_size - 1;
    }

    // The key of token `key`; its value is value_bytes further on. In bytes, so that what is a constant away from
    // it costs no arithmetic.
    __device__ __forceinline__ const char* find(int key) const {
        return keys + static_cast<int64>(block_table[key >> block_shift]) * block_bytes +
               (key & block_mask) * (kHeadDim * static_cast<int>(sizeof(T)));
    }
};

// One sequence's queries as the batch has them.
struct Queries {
    int first_token;  // in the batch
    int count;
    int context;  // tokens in the cache before the first query

    __device__ Queries(const int* query_start_loc, const int* seq_lens, int seq) {
        first_token = query_start_loc[seq];
        count = query_start_loc[seq + 1] - first_token;
        context = seq_lens[seq] - count;
    }
};

// Where kernels put their results: `out` when the context is not split, else the partial results that
// paged_attention_reduce puts together. Sums and maxima are in units of log2.
//   out            T [num_tokens, num_heads, kHeadDim]
//   partial_out    float32 [num_splits, num_tokens, num_heads, kHeadDim]
//   partial_logs   float32 [num_splits, num_tokens, num_heads]    log2 of the sum of exp2; -inf: no keys
template <typename T, int kHeadDim>
struct RowOutput {
    T* out;
    float* partial_out;
    float* partial_logs;
    int num_tokens, num_heads, split, num_splits;

    __device__ __forceinline__ int64 row(int token, int head) const {
        return static_cast<int64>(token) * num_heads + head;
    }
    __device__ __forceinline__ int64 partial_row(int token, int head) const {
        return static_cast<int64>(split) * num_tokens * num_heads + row(token, head);
    }
    __device__ __forceinline__ void write_log(int token, int head, float maximum, float total) {
        if (num_splits == 1) return;
        partial_logs[partial_row(token, head)] =
            total > 0.0f ? maximum + log2f(total) : -CUENGINE_INFINITY;
    }
    // value: already divided by the row's total.
    __device__ __forceinline__ void write(int token, int head, int column, float value) {
        if (num_splits == 1) {
            out[row(token, head) * kHeadDim + column] = from_float<T>(value);
        } else {
            partial_out[partial_row(token, head) * kHeadDim + column] = value;
        }
    }
};

// Keys of one split: [first, end) of `length`, whole steps of `step` keys but for the last.
struct KeyRange {
    int first, end;

    __device__ KeyRange(int length, int split, int num_splits, int step) {
        const int steps = (length + step - 1) / step;
        const int per_split = (steps + num_splits - 1) / num_splits * step;
        first = split * per_split;
        end = min(length, first + per_split);
    }
};
