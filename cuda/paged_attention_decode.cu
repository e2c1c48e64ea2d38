// paged_attention_decode: attention of the newest query of each sequence over its cached tokens, itself included;
// or of its newest 2 to 8, causal, where drafted tokens are verified.
//
//   q, out           T [num_tokens, num_heads, kHeadDim]
//   partial_out      float32 [num_splits, num_tokens, num_heads, kHeadDim]      unused when num_splits is 1
//   partial_logs     float32 [num_splits, num_tokens, num_heads]
//   kv_layer         T [2, num_blocks, num_kv_heads, block_size, kHeadDim]      K, then V
//   block_tables     int32 [num_seqs, max_blocks]
//   query_start_loc  int32 [num_seqs + 1]            tokens [i] to [i + 1] belong to sequence i
//   seq_lens         int32 [num_seqs]                tokens in the cache, queries included
//   max_queries      sequences with more queries are left to paged_attention_prefill, with none skipped
//
// All query heads of a KV head are worked on together, as the rows of one tile, so that K and V are read once.
// Where sequences are few and long the context is split over blocks, and paged_attention_reduce puts the parts
// together: out = sum over splits of 2^(log - highest) * partial_out, over the sum of these weights.
// Must move 2 * kHeadDim * sizeof(T) bytes per KV head and cached token: bound by memory.
//
// paged_attention_decode (fp16, bf16; sm_80 and later). Grid: (num_kv_heads * row_tiles, num_seqs, num_splits), 4 warps
// (2 at head_dim 256); row_tiles = ceil(max_queries * group / 16). The rows, up to 16, are one tensor-core tile;
// a group of one wastes 15 of 16 products, which costs nothing: the tensor cores wait for memory all the same. Each
// warp goes through every 4th tile of 16 keys on its own, with two stages of K and V filled by cp.async and no
// barrier between warps. At the end the warps' results meet in shared memory.
//
// At head_dim 128 a tile is 8 KB, and shared memory has room for 3 blocks on a multiprocessor of 227 KB: at least
// 96 KB are on their way at any time, where 4.8 TB/s over 132 multiprocessors with 1 us of latency need 36 KB. A warp
// spends some 350 issue slots on a tile; a multiprocessor gets one every 390 cycles at that rate and has 4 slots a
// cycle, so a quarter of them is used.
//
// paged_attention_decode_plain (fp32, older chips). The same grid, with tiles of 8 rows; see attention_plain.cuh.
#include "include/attention_plain.cuh"
#include "include/attention_tensor.cuh"

constexpr int kDecodeRows = 16;
constexpr int kDecodeKeys = 16;
constexpr int kPlainRowsPerWarp = 2;

template <int kHeadDim>
__host__ __device__ constexpr int decode_warps() {
    return kHeadDim > 128 ? 2 : 4;
}

// Blocks that a multiprocessor should have room for: no register more, and none less.
template <int kHeadDim>
__host__ __device__ constexpr int decode_blocks() {
    return kHeadDim > 64 ? 3 : 5;
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(decode_warps<kHeadDim>() * kWarpSize, decode_blocks<kHeadDim>())
paged_attention_decode(
    T* out, float* partial_out, float* partial_logs, const T* q, const T* kv_layer,
    const int* block_tables, const int* query_start_loc, const int* seq_lens, int num_tokens,
    int num_heads, int num_kv_heads, int num_blocks, int block_size, int max_blocks,
    int max_queries, float scale) {
    using Rows = SharedRows<kHeadDim>;
    constexpr int kWarps = decode_warps<kHeadDim>();
    constexpr int kThreads = kWarps * kWarpSize;
    constexpr int kTileBytes = Rows::bytes(kDecodeKeys);  // of K, or of V
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float warp_maximum[kWarps][kDecodeRows], warp_total[kWarps][kDecodeRows];

    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int kv_head = blockIdx.x % num_kv_heads, group = num_heads / num_kv_heads;
    const int first_row = blockIdx.x / num_kv_heads * kDecodeRows;
    const Queries queries(query_start_loc, seq_lens, blockIdx.y);
    const int num_rows = min(queries.count * group - first_row, kDecodeRows);
    if (queries.count > max_queries || num_rows <= 0) return;
    const PagedHead<T, kHeadDim> cache(
        kv_layer, block_tables + static_cast<int64>(blockIdx.y) * max_blocks, kv_head, num_kv_heads,
        num_blocks, block_size);
    const int length = queries.context + (first_row + num_rows - 1) / group + 1;
    const KeyRange range(length, blockIdx.z, gridDim.z, kWarps * kDecodeKeys);
    RowOutput<T, kHeadDim> output{out, partial_out, partial_logs, num_tokens,
                                  num_heads, static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z)};

    const uint32 shared_q = shared_address(shared);
    const uint32 stages = shared_q + Rows::bytes(kDecodeRows) + warp * 4 * kTileBytes;
    for (int i = threadIdx.x; i < kDecodeRows * Rows::kChunks; i += kThreads) {
        const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
        const int index = first_row + min(row, num_rows - 1);
        const int64 source = output.row(queries.first_token + index / group,
                                        kv_head * group + index % group);
        copy_async(shared_q + Rows::offset(row, chunk), q + source * kHeadDim + chunk * 8,
                   row < num_rows);
    }
    commit_copies();

    auto load_tile = [&](int first_key, int stage) {
        // Eight keys from a multiple of 8 on are in one block, and their vectors one stretch of memory.
        const int last_group = (range.end - 1) & ~7;
        const char* upper = cache.find(min(first_key, last_group)) + lane * 16;
        const char* lower = cache.find(min(first_key + 8, last_group)) + lane * 16 - 8 * kHeadDim * 2;
        const uint32 keys = stages + stage * 2 * kTileBytes;
        static_assert(kDecodeKeys * Rows::kChunks % kWarpSize == 0, "a tile: whole turns of a warp");
#pragma unroll
        for (int first = 0; first < kDecodeKeys * Rows::kChunks; first += kWarpSize) {
            const int row = (first + lane) / Rows::kChunks, chunk = (first + lane) % Rows::kChunks;
            // What lies behind the last key is neither read nor left as it was: 0 * NaN would be NaN.
            const bool valid = first_key + row < range.end;
            const char* source = (row < 8 ? upper : lower) + first * 16;
            const uint32 target = keys + Rows::offset(row, chunk);
            copy_async(target, source, valid);
            copy_async(target + kTileBytes, source + cache.value_bytes, valid);
        }
    };
    auto seen_by = [&](int row) {
        row = first_row + min(row, num_rows - 1);
        return min(queries.context + row / group + 1, range.end);
    };
    const int all_see = seen_by(0), seen[2] = {seen_by(lane / 4), seen_by(8 + lane / 4)};

    WarpAttention<T, kHeadDim, 1, kDecodeKeys> attention;
    attention.start();
    constexpr int kStep = kWarps * kDecodeKeys;
    int first_key = range.first + warp * kDecodeKeys;
    if (first_key < range.end) load_tile(first_key, 0);
    commit_copies();
    wait_copies<1>();
    __syncthreads();  // the queries are there, for all warps
    for (int stage = 0; first_key < range.end; first_key += kStep, stage ^= 1) {
        if (first_key + kStep < range.end) load_tile(first_key + kStep, stage ^ 1);
        commit_copies();
        wait_copies<1>();
        __syncwarp();
        const uint32 keys = stages + stage * 2 * kTileBytes;
        attention.step(shared_q, keys, keys + kTileBytes, first_key + kDecodeKeys > all_see,
                       [&](int, int half) { return seen[half] - first_key; }, scale * kLog2E);
        __syncwarp();  // the next turn copies into this stage
    }
    attention.finish();

    // The warps' results replace their stages: float32 [kWarps, kDecodeRows, kHeadDim].
    wait_copies<0>();
    __syncthreads();
    float* results = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + lane / 4;
        if (lane % 4 == 0) {
            warp_maximum[warp][row] = attention.reference[0][half] * (scale * kLog2E);
            warp_total[warp][row] = attention.total[0][half];
        }
        float* target = results + (warp * kDecodeRows + row) * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            *reinterpret_cast<float2*>(target + n * 8) =
                make_float2(attention.out[0][n][2 * half], attention.out[0][n][2 * half + 1]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows * kHeadDim; i += kThreads) {
        const int row = i / kHeadDim, column = i % kHeadDim;
        float highest = -CUENGINE_INFINITY;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, warp_maximum[w][row]);
        const float base = highest == -CUENGINE_INFINITY ? 0.0f : highest;
        float total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = exp2f(warp_maximum[w][row] - base);
            total += weight * warp_total[w][row];
            sum += weight * results[(w * kDecodeRows + row) * kHeadDim + column];
        }
        const int token = queries.first_token + (first_row + row) / group;
        const int head = kv_head * group + (first_row + row) % group;
        if (column == 0) output.write_log(token, head, highest, total);
        output.write(token, head, column, total > 0.0f ? sum / total : 0.0f);
    }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads) paged_attention_decode_plain(
    T* out, float* partial_out, float* partial_logs, const T* q, const T* kv_layer,
    const int* block_tables, const int* query_start_loc, const int* seq_lens, int num_tokens,
    int num_heads, int num_kv_heads, int num_blocks, int block_size, int max_blocks,
    int max_queries, float scale) {
    constexpr int kRows = kAttentionWarps * kPlainRowsPerWarp;
    extern __shared__ __align__(128) unsigned char shared[];
    const int kv_head = blockIdx.x % num_kv_heads, group = num_heads / num_kv_heads;
    const int first_row = blockIdx.x / num_kv_heads * kRows;
    const Queries queries(query_start_loc, seq_lens, blockIdx.y);
    const int num_rows = min(queries.count * group - first_row, kRows);
    if (queries.count > max_queries || num_rows <= 0) return;
    const PagedHead<T, kHeadDim> cache(
        kv_layer, block_tables + static_cast<int64>(blockIdx.y) * max_blocks, kv_head, num_kv_heads,
        num_blocks, block_size);
    const int length = queries.context + (first_row + num_rows - 1) / group + 1;
    const KeyRange range(length, blockIdx.z, gridDim.z, kPlainKeys);
    const RowOutput<T, kHeadDim> output{out, partial_out, partial_logs, num_tokens, num_heads,
                                        static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z)};
    attend_plain<T, kHeadDim, kPlainRowsPerWarp>(output, q, cache, queries, range, first_row, kv_head,
                                                 group, scale, shared);
}

// Grid: (num_heads, num_seqs, max_queries); a multiple of 32 threads, at least kHeadDim.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(256) paged_attention_reduce(
    T* out, const float* partial_out, const float* partial_logs, const int* query_start_loc,
    int num_splits, int num_tokens, int num_heads, int max_queries) {
    const int first_token = query_start_loc[blockIdx.y];
    const int count = query_start_loc[blockIdx.y + 1] - first_token;
    const int query = blockIdx.z, column = threadIdx.x;
    if (query >= count || count > max_queries || column >= kHeadDim) return;
    const int64 row = static_cast<int64>(first_token + query) * num_heads + blockIdx.x;
    const int64 split_rows = static_cast<int64>(num_tokens) * num_heads;

    float highest = -CUENGINE_INFINITY;
    for (int s = 0; s < num_splits; ++s) highest = fmaxf(highest, partial_logs[s * split_rows + row]);
    float total = 0.0f, sum = 0.0f;
    for (int s = 0; s < num_splits; ++s) {
        const float log = partial_logs[s * split_rows + row];
        if (log == -CUENGINE_INFINITY) continue;  // its partial_out was not written
        const float weight = exp2f(log - highest);
        total += weight;
        sum += weight * partial_out[(s * split_rows + row) * kHeadDim + column];
    }
    out[row * kHeadDim + column] = from_float<T>(total > 0.0f ? sum / total : 0.0f);
}
