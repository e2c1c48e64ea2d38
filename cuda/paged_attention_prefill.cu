// paged_attention_prefill: causal attention of the queries of prompt chunks over their sequences' cached tokens,
// themselves included. Query i of a sequence sees the first seq_len - count + i + 1 tokens.
//
//   q, out           T [num_tokens, num_heads, kHeadDim]
//   kv_layer         T [2, num_blocks, num_kv_heads, block_size, kHeadDim]      K, then V
//   block_tables     int32 [num_seqs, max_blocks]
//   query_start_loc  int32 [num_seqs + 1]            tokens [i] to [i + 1] belong to sequence i
//   seq_lens         int32 [num_seqs]                tokens in the cache, queries included
//   tiles            int32 [num_tiles, 2]            sequence, and first row of a tile in it: what blocks work on;
//                                                    give those with the longest contexts first
//
// paged_attention_prefill (fp16, bf16; sm_80 and later). Grid: (num_heads, num_tiles), 4 warps. A row is a query,
// a tile 128 of them (64 at head_dim 256): each warp has two 16-row tiles (one), so that what it reads of K and V
// from shared memory feeds four tensor-core products. Keys come in tiles of 64 (32 from head_dim 80 on), K and V by
// cp.async into two stages: one is on its way while the other is worked on, with one barrier a tile. Tiles behind a
// warp's last query are skipped, and only those on the diagonal or at the end are masked.
//
// Does 4 * head_dim operations per query head, query and visible key: bound by the tensor cores. At head_dim 128 a
// warp does 128 products (m16n8k16) on a tile of keys, with 48 matrix loads, 32 exponentials and some 340 other
// instructions: 4.3 issue slots a product, where 300 TFLOP/s on 132 multiprocessors leave 12. It takes every register
// there is, so two blocks are on a multiprocessor, two warps for each scheduler. Must move q and out, and K and V once
// per query head and tile of queries, mostly from L2: 128 operations a byte.
//
// paged_attention_prefill_plain (fp32, older chips). Grid: (num_kv_heads, num_tiles), 4 warps. A row is a query and
// a head of the group, a tile 16 of them; see attention_plain.cuh. Bound by float32 arithmetic and shared memory.
#include "include/attention_plain.cuh"
#include "include/attention_tensor.cuh"

template <int kHeadDim>
struct PrefillTile {
    static constexpr int kRowTiles = kHeadDim > 128 ? 1 : 2;
    static constexpr int kKeys = kHeadDim > 64 ? 32 : 64;
    static constexpr int kQueries = kAttentionWarps * 16 * kRowTiles;
    static constexpr int kStageBytes = SharedRows<kHeadDim>::bytes(kKeys);  // of K, or of V
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, 2) paged_attention_prefill(
    T* out, const T* q, const T* kv_layer, const int* block_tables, const int* query_start_loc,
    const int* seq_lens, const int* tiles, int num_heads, int num_kv_heads, int num_blocks,
    int block_size, int max_blocks, float scale) {
    using Tile = PrefillTile<kHeadDim>;
    using Rows = SharedRows<kHeadDim>;
    constexpr int kKeys = Tile::kKeys;
    static_assert(Tile::kQueries * Rows::kChunks % kAttentionThreads == 0, "queries: whole turns of all threads");
    extern __shared__ __align__(128) unsigned char shared[];

    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int head = blockIdx.x, kv_head = head / (num_heads / num_kv_heads);
    const int seq = tiles[2 * blockIdx.y], first_query = tiles[2 * blockIdx.y + 1];
    const Queries queries(query_start_loc, seq_lens, seq);
    const PagedHead<T, kHeadDim> cache(kv_layer, block_tables + static_cast<int64>(seq) * max_blocks,
                                       kv_head, num_kv_heads, num_blocks, block_size);
    const int last_query = min(first_query + Tile::kQueries, queries.count) - 1;
    const int num_keys = queries.context + last_query + 1;
    const int num_tiles = (num_keys + kKeys - 1) / kKeys;

    const uint32 shared_q = shared_address(shared);
    const uint32 stages = shared_q + Rows::bytes(Tile::kQueries);

#pragma unroll 4
    for (int first = 0; first < Tile::kQueries * Rows::kChunks; first += kAttentionThreads) {
        const int i = first + threadIdx.x;
        const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
        const int query = min(first_query + row, last_query);
        const int64 source = static_cast<int64>(queries.first_token + query) * num_heads + head;
        copy_async(shared_q + Rows::offset(row, chunk), q + source * kHeadDim + chunk * 8,
                   first_query + row <= last_query);
    }
    auto load_tile = [&](int tile) {
        const uint32 keys = stages + tile % 2 * 2 * Tile::kStageBytes;
        // A count of turns that the compiler knows, so that it unrolls them without tests.
#pragma unroll
        for (int first = 0; first < kKeys * Rows::kChunks; first += kAttentionThreads) {
            const int i = first + threadIdx.x;
            if (first + kAttentionThreads > kKeys * Rows::kChunks && i >= kKeys * Rows::kChunks) break;
            const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
            const int key = tile * kKeys + row;
            // What lies behind the last key is neither read nor left as it was: 0 * NaN would be NaN.
            const char* source = cache.find(min(key, num_keys - 1)) + chunk * 16;
            const uint32 target = keys + Rows::offset(row, chunk);
            copy_async(target, source, key < num_keys);
            copy_async(target + Tile::kStageBytes, source + cache.value_bytes, key < num_keys);
        }
    };

    WarpAttention<T, kHeadDim, Tile::kRowTiles, kKeys> attention;
    attention.start();
    const int warp_row = warp * 16 * Tile::kRowTiles;
    const int first_token = queries.first_token - queries.context;  // of position 0, were it in the batch
    const uint32 warp_queries = shared_q + Rows::bytes(warp_row);
    // Keys that the first row of the warp sees; each further row sees one more.
    const int first_visible = queries.context + first_query + warp_row + 1;

    load_tile(0);
    commit_copies();
    for (int tile = 0; tile < num_tiles; ++tile) {
        wait_copies<0>();
        __syncthreads();  // the tile is there, and nobody works on the one before it any more
        if (tile + 1 < num_tiles) load_tile(tile + 1);
        commit_copies();
        const int first_key = tile * kKeys;
        const uint32 keys = stages + tile % 2 * 2 * Tile::kStageBytes;
        if (first_key < first_visible + 16 * Tile::kRowTiles - 1) {
            auto visible = [&](int m, int half) {
                return first_visible - first_key + m * 16 + half * 8 + lane / 4;
            };
            attention.step(warp_queries, keys, keys + Tile::kStageBytes,
                           first_key + kKeys > first_visible, visible, scale * kLog2E);
        }
    }
    attention.finish();

#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // The query by its position: what the loop keeps anyway tells all about it.
            const int position = first_visible - 1 + m * 16 + half * 8 + lane / 4;
            if (position >= num_keys) continue;
            const int64 token = first_token + position;
            const float inverse = 1.0f / attention.total[m][half];
            T* target = out + (token * num_heads + head) * kHeadDim + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                *reinterpret_cast<uint32*>(target + n * 8) =
                    pack_pair<T>(attention.out[m][n][2 * half] * inverse,
                                 attention.out[m][n][2 * half + 1] * inverse);
            }
        }
    }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads) paged_attention_prefill_plain(
    T* out, const T* q, const T* kv_layer, const int* block_tables, const int* query_start_loc,
    const int* seq_lens, const int* tiles, int num_heads, int num_kv_heads, int num_blocks,
    int block_size, int max_blocks, float scale) {
    constexpr int kRowsPerWarp = 4;
    extern __shared__ __align__(128) unsigned char shared[];
    const int kv_head = blockIdx.x, group = num_heads / num_kv_heads;
    const int seq = tiles[2 * blockIdx.y], first_row = tiles[2 * blockIdx.y + 1];
    const Queries queries(query_start_loc, seq_lens, seq);
    const PagedHead<T, kHeadDim> cache(kv_layer, block_tables + static_cast<int64>(seq) * max_blocks,
                                       kv_head, num_kv_heads, num_blocks, block_size);
    const int last_row = min(first_row + kAttentionWarps * kRowsPerWarp, queries.count * group) - 1;
    const KeyRange range(queries.context + last_row / group + 1, 0, 1, kPlainKeys);
    const RowOutput<T, kHeadDim> output{out, nullptr, nullptr, 0, num_heads, 0, 1};
    attend_plain<T, kHeadDim, kRowsPerWarp>(output, q, cache, queries, range, first_row, kv_head,
                                            group, scale, shared);
}
