// From logits to tokens, one block of threads per row, with the rules of cuengine/device/sampler.py and without a sort.
//
//   apply_constraints   scores = logits with allowed tokens, bias and penalties applied
//   sample_tokens       a token for each row of scores: greedy, or temperature, min-p, top-k, top-p and a Gumbel draw
//   report_logprobs     log-probability and rank of the token, and the most likely tokens, from the raw logits
//
//   logits, scores   float32 [num_rows, vocab]
//   maxima      float32 [num_rows]           the largest score of each row; NaN or +inf where a logit is
//   counts      int32 [num_rows, vocab]      working space where there are penalties, else null
//   token_ids   int32 [num_rows]             a target that was given is reported, not drawn
//   the rest is as SamplingBatch and SamplerOutput have it; optional arrays are null
//
// Grid: num_rows; 1024 threads, each with every 1024th token, or group of four for a draw (the four words of one
// Philox counter). Every pass over a row reads 4 * vocab bytes from L2, as fast as one multiprocessor can:
//   greedy 1; a draw 1 more, with 20 operations of Philox and 2 logarithms for each token that may be drawn;
//   top-k 4: the smallest value it keeps, by radix select with a histogram of 256 bins in shared memory;
//   top-p 9: the sum, and two selections by probabilities instead of counts, one more for ties. These are summed
//   as integers (2^-40), so that the order of the threads changes nothing.
// Only what can be among the k largest, or in the nucleus, gets into a histogram: there threads wait for each other.
#include "include/common.cuh"
#include "include/philox.cuh"

constexpr int kSampleThreads = 1024;
constexpr int kSampleWarps = kSampleThreads / kWarpSize;
constexpr int kBins = 256;
constexpr float kLeastGap = -26.02f;      // philox.py: MIN_NOISE - MAX_NOISE; no noise lifts what is below
constexpr float kNoiseTolerance = 1e-3f;  // far more than float32 noise can be wrong by
constexpr double kProbabilityUnit = 1099511627776.0;  // 2^40
constexpr int kSeenInPrompt = 1 << 30;    // in counts, beside the count in the output

// The float's bits so that their order as integers is the order of the floats.
__device__ __forceinline__ uint32 ordered(float x) {
    const uint32 bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A token and its score as one number, so that the larger is the better one: the higher score, of equals the lower
// id. NaN is above all, so that it is seen. 0 is below all.
__device__ __forceinline__ uint64 ranked(float score, int id) {
    const uint32 key = isnan(score) ? 0xffffffffu : ordered(score);
    return static_cast<uint64>(key) << 32 | ~static_cast<uint32>(id);
}
__device__ __forceinline__ float score_of(uint64 ranked) {
    return from_ordered(static_cast<uint32>(ranked >> 32));
}
__device__ __forceinline__ int id_of(uint64 ranked) {
    return static_cast<int>(~static_cast<uint32>(ranked));
}

// The same where float32 cannot tell scores apart.
struct Draw {
    double score;
    int id;
};

__device__ __forceinline__ uint64 shuffle_xor(uint64 x, int step) {
    return __shfl_xor_sync(kWholeWarp, x, step);
}
__device__ __forceinline__ Draw shuffle_xor(Draw x, int step) {
    return Draw{__shfl_xor_sync(kWholeWarp, x.score, step), __shfl_xor_sync(kWholeWarp, x.id, step)};
}

// All threads' values combined, given to all threads.
template <typename V, typename Combine>
__device__ V block_reduce(V x, Combine combine) {
    static_assert(kSampleWarps == kWarpSize, "one word for each lane");
    __shared__ V words[kSampleWarps];
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) x = combine(x, shuffle_xor(x, step));
    __syncthreads();
    if (threadIdx.x % kWarpSize == 0) words[threadIdx.x / kWarpSize] = x;
    __syncthreads();
    x = words[threadIdx.x % kWarpSize];
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) x = combine(x, shuffle_xor(x, step));
    return x;
}

__device__ uint64 block_max(uint64 x) {
    return block_reduce(x, [](uint64 a, uint64 b) { return max(a, b); });
}

__device__ uint64 block_sum(uint64 x) {
    return block_reduce(x, [](uint64 a, uint64 b) { return a + b; });
}

// One element of what is selected from: its key, and how much it weighs; 0: not among them.
struct Item {
    uint32 key;
    uint64 weight;
};

struct Selected {
    uint32 key;    // the largest for which items with it or a larger key weigh `target` or more together
    uint64 above;  // what those with larger keys weigh
};

// Sums of weights by one byte of the key. Additions of 64 bits to shared memory are loops of compare and swap, slow
// where many threads meet in a bin; those of 32 bits are one instruction, so each sum is two words.
struct Histogram {
    uint32 low[kBins], high[kBins];

    __device__ __forceinline__ void clear() {
        for (int bin = threadIdx.x; bin < kBins; bin += kSampleThreads) low[bin] = high[bin] = 0;
    }
    __device__ __forceinline__ void add(int bin, uint64 weight) {
        const uint32 part = static_cast<uint32>(weight);
        const bool carry = atomicAdd(&low[bin], part) + part < part;
        const uint32 rest = static_cast<uint32>(weight >> 32) + carry;
        if (rest != 0) atomicAdd(&high[bin], rest);
    }
    __device__ __forceinline__ uint64 weight(int bin) const {
        return static_cast<uint64>(high[bin]) << 32 | low[bin];
    }
};

// Radix select over items 0 to count - 1, from the highest byte of the key down. 0 < target <= all weights. Thread i
// asks for items i, i + 1024, ...
template <typename GetItem>
__device__ Selected select_key(int count, uint64 target, GetItem get) {
    __shared__ Histogram bins;
    __shared__ Selected selected;
    uint32 prefix = 0;
    uint64 above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        bins.clear();
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += kSampleThreads) {
            const Item item = get(i);
            // Of the bytes above this one, all must be those already chosen.
            const bool candidate = shift == 24 || item.key >> (shift + 8) == prefix >> (shift + 8);
            if (item.weight != 0 && candidate) bins.add(item.key >> shift & 0xff, item.weight);
        }
        __syncthreads();
        if (threadIdx.x < kWarpSize) {
            // Each lane has some bins, the first lane the topmost.
            constexpr int kBinsPerLane = kBins / kWarpSize;
            int bin = kBins - 1 - threadIdx.x * kBinsPerLane;
            uint64 own = 0;
#pragma unroll
            for (int i = 0; i < kBinsPerLane; ++i) own += bins.weight(bin - i);
            uint64 sum = own;  // of this lane and those before it
#pragma unroll
            for (int step = 1; step < kWarpSize; step *= 2) {
                const uint64 before = __shfl_up_sync(kWholeWarp, sum, step);
                if (threadIdx.x >= step) sum += before;
            }
            sum += above;
            if (sum >= target && sum - own < target) {
                sum -= own;
                while (sum + bins.weight(bin) < target) sum += bins.weight(bin--);
                selected = Selected{prefix | static_cast<uint32>(bin) << shift, sum};
            }
        }
        __syncthreads();
        prefix = selected.key;
        above = selected.above;
    }
    return Selected{prefix, above};
}

// What a draw's noise belongs to.
struct Noise {
    PhiloxKey key;
    uint32 sample, position;
};

// Calls use(token, word of noise) for this thread's share of the tokens that kept(token) says may be drawn.
template <typename Kept, typename Use>
__device__ __forceinline__ void for_each_kept(int vocab, const Noise& noise, Kept kept, Use use) {
    for (int group = threadIdx.x; group * 4 < vocab; group += kSampleThreads) {
        bool keep[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) keep[j] = group * 4 + j < vocab && kept(group * 4 + j);
        if (!(keep[0] || keep[1] || keep[2] || keep[3])) continue;
        const uint4 words =
            philox(make_uint4(group, noise.position, noise.sample, kPurposeToken), noise.key);
        const uint32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (keep[j]) use(group * 4 + j, word[j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kSampleThreads, 1) apply_constraints(
    float* scores, int* counts, const float* logits, int vocab, const uint32* allowed_mask,
    const int* bias_rows, const int* bias_ids, const float* bias_values, int num_biases,
    const float* repetition_penalty, const float* presence_penalty, const float* frequency_penalty,
    const int* prompt_ids, const int* prompt_offsets, const int* output_ids,
    const int* output_offsets) {
    const int row = blockIdx.x;
    const int64 start = static_cast<int64>(row) * vocab;
    scores += start;
    logits += start;
    const float repetition = repetition_penalty ? repetition_penalty[row] : 1.0f;
    const float presence = presence_penalty ? presence_penalty[row] : 0.0f;
    const float frequency = frequency_penalty ? frequency_penalty[row] : 0.0f;
    const bool penalized = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;

    const uint32* mask = allowed_mask ? allowed_mask + static_cast<int64>(row) * ((vocab + 31) / 32) : nullptr;
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        const bool allowed = mask == nullptr || mask[i / 32] >> (i % 32) & 1;
        // What is not a number, or infinite, stays to be seen in the maxima: the model is broken.
        const bool finite = logits[i] < CUENGINE_INFINITY;
        scores[i] = allowed || !finite ? logits[i] : -CUENGINE_INFINITY;
        if (penalized) counts[start + i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_biases; i += kSampleThreads) {
        if (bias_rows[i] == row) atomicAdd(scores + bias_ids[i], bias_values[i]);
    }
    if (!penalized) return;
    counts += start;
    if (prompt_ids != nullptr) {
        for (int i = prompt_offsets[row] + threadIdx.x; i < prompt_offsets[row + 1]; i += kSampleThreads) {
            atomicOr(counts + prompt_ids[i], kSeenInPrompt);
        }
    }
    if (output_ids != nullptr) {
        for (int i = output_offsets[row] + threadIdx.x; i < output_offsets[row + 1]; i += kSampleThreads) {
            atomicAdd(counts + output_ids[i], 1);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        const int count = counts[i];
        if (count == 0) continue;
        float score = scores[i];
        if (repetition != 1.0f) score = score > 0.0f ? score / repetition : score * repetition;
        const int in_output = count & ~kSeenInPrompt;
        // Rounded where NumPy rounds: no fused multiply and add.
        if (in_output > 0) score -= __fadd_rn(__fmul_rn(frequency, in_output), presence);
        scores[i] = score;
    }
}

extern "C" __global__ void __launch_bounds__(kSampleThreads, 1) sample_tokens(
    int* token_ids, float* maxima, const float* scores, int vocab, const int* target_ids,
    const float* temperatures, const int* top_k, const float* top_p, const float* least_scaled,
    const uint64* seeds, const uint32* sample_indices, const uint32* positions) {
    const int row = blockIdx.x;
    scores += static_cast<int64>(row) * vocab;
    uint64 own_best = 0;
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        own_best = max(own_best, ranked(scores[i], i));
    }
    const uint64 best = block_max(own_best);
    const float highest = score_of(best);
    if (threadIdx.x == 0) maxima[row] = highest;
    const int target = target_ids[row];
    const float temperature = temperatures[row];
    if (target >= 0 || temperature == 0.0f || !isfinite(highest)) {
        if (threadIdx.x == 0) token_ids[row] = target >= 0 ? target : id_of(best);
        return;
    }

    // The largest is taken off first, so that no temperature, however low, can overflow. True division, as NumPy.
    auto scaled_score = [&](float score) { return __fdiv_rn(score - highest, temperature); };
    auto scaled = [&](int i) { return scaled_score(scores[i]); };
    uint32 least = ordered(least_scaled[row]);
    const int k = top_k[row];
    if (k > 0 && k < vocab) {
        // The k-th largest of the threads' largest: nothing below it is the k-th largest of all.
        uint32 bound = 0;
        if (k <= kSampleThreads) {
            const uint32 own = own_best ? ordered(scaled_score(score_of(own_best))) : 0;
            bound = select_key(kSampleThreads, k, [&](int) { return Item{own, 1}; }).key;
        }
        const Selected kth = select_key(vocab, k, [&](int i) {
            const uint32 key = ordered(scaled(i));
            return Item{key, key >= bound};
        });
        least = max(least, kth.key);
    }
    int last_tie = vocab;  // of tokens whose value is just `least`, those with larger ids are left out
    if (top_p[row] < 1.0f) {
        uint64 least_weight = 1;
        auto item = [&](int i) {
            const float value = scaled(i);
            const uint32 key = ordered(value);
            if (key < least) return Item{key, 0};
            const uint64 weight = static_cast<uint64>(static_cast<double>(expf(value)) * kProbabilityUnit);
            return Item{key, weight >= least_weight ? weight : 0};
        };
        uint64 sum = 0;
        for (int i = threadIdx.x; i < vocab; i += kSampleThreads) sum += item(i).weight;
        const uint64 total = block_sum(sum);
        const double wanted = ceil(static_cast<double>(top_p[row]) * static_cast<double>(total));
        const uint64 nucleus = max(1ull, static_cast<uint64>(wanted));
        // All that weigh less than this are, together, less than what may be left out.
        least_weight = max(1ull, (total - nucleus) / vocab);
        const Selected edge = select_key(vocab, nucleus, item);
        least = edge.key;
        // Ties at the edge go by id: the same selection again, lowest ids first.
        const Selected last = select_key(vocab, nucleus - edge.above, [&](int i) {
            const Item found = item(i);
            return Item{~static_cast<uint32>(i), found.key == edge.key ? found.weight : 0};
        });
        last_tie = static_cast<int>(~last.key);
    } else {
        least = max(least, ordered(kLeastGap));
    }

    const Noise noise{{static_cast<uint32>(seeds[row]), static_cast<uint32>(seeds[row] >> 32)},
                      sample_indices[row], positions[row]};
    auto kept = [&](int i) {
        const uint32 bits = ordered(scaled(i));
        return bits > least || (bits == least && i <= last_tie);
    };
    // First with noise in float32; then those that it cannot tell from the best, in float64 as philox.py.
    uint64 own_drawn = 0;
    for_each_kept(vocab, noise, kept, [&](int i, uint32 word) {
        own_drawn = max(own_drawn, ranked(scaled(i) + gumbel_float(word), i));
    });
    const float near = score_of(block_max(own_drawn)) - kNoiseTolerance;
    Draw found{-CUENGINE_INFINITY, 0x7fffffff};
    auto better = [](Draw a, Draw b) {
        return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b;
    };
    // Most threads have seen nothing near the best.
    if (own_drawn != 0 && score_of(own_drawn) >= near) {
        for_each_kept(vocab, noise, kept, [&](int i, uint32 word) {
            if (scaled(i) + gumbel_float(word) < near) return;
            found = better(found, Draw{scaled(i) + gumbel(word), i});
        });
    }
    const Draw drawn = block_reduce(found, better);
    if (threadIdx.x == 0) token_ids[row] = drawn.id;
}

extern "C" __global__ void __launch_bounds__(kSampleThreads, 1) report_logprobs(
    float* logprobs, int* ranks, int* top_ids, float* top_logprobs, const float* logits, int vocab,
    const int* token_ids, const int* num_logprobs, int width) {
    const int row = blockIdx.x;
    const int wanted = min(num_logprobs[row], vocab);
    for (int k = max(wanted, 0) + static_cast<int>(threadIdx.x); k < width; k += kSampleThreads) {
        top_ids[row * width + k] = -1;
        top_logprobs[row * width + k] = __int_as_float(0x7fc00000);
    }
    if (wanted < 0) {
        if (threadIdx.x == 0) {
            logprobs[row] = __int_as_float(0x7fc00000);
            ranks[row] = 0;
        }
        return;
    }
    logits += static_cast<int64>(row) * vocab;
    const float chosen = logits[token_ids[row]];
    uint64 best = 0, larger = 0;
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        best = max(best, ranked(logits[i], i));
        larger += logits[i] > chosen;
    }
    best = block_max(best);
    larger = block_sum(larger);
    const float highest = score_of(best);
    uint64 sum = 0;
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        sum += static_cast<uint64>(static_cast<double>(expf(logits[i] - highest)) * kProbabilityUnit);
    }
    const double normalizer = highest + log(static_cast<double>(block_sum(sum)) / kProbabilityUnit);
    if (threadIdx.x == 0) {
        logprobs[row] = static_cast<float>(chosen - normalizer);
        ranks[row] = 1 + static_cast<int>(larger);
    }
    // The most likely tokens one by one, each the best of those behind the one before: few are asked for.
    for (int k = 0; k < wanted; ++k) {
        if (threadIdx.x == 0) {
            top_ids[row * width + k] = id_of(best);
            top_logprobs[row * width + k] = static_cast<float>(score_of(best) - normalizer);
        }
        uint64 next = 0;
        for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
            const uint64 rank = ranked(logits[i], i);
            if (rank < best) next = max(next, rank);
        }
        best = block_max(next);
    }
}
