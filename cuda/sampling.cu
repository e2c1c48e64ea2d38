// From logits to tokens, one block of threads per row, with the rules of cuengine/device/sampler.py and without a sort.
//
//   apply_constraints   scores = logits as float32, with allowed tokens, bias and penalties applied
//   sample_tokens       a token for each row of scores: greedy, or temperature, min-p, top-k, top-p and a Gumbel draw
//   report_logprobs     log-probability and rank of the token, and the most likely tokens, from the raw logits
//
//   logits      T [num_rows, vocab]          scores    float32 [num_rows, vocab]
//   counts      int32 [num_rows, vocab]      working space where there are penalties, else null
//   token_ids   int32 [num_rows]             a target that was given is reported, not drawn
//   the rest is as SamplingBatch and SamplerOutput have it; optional arrays are null
//
// Grid: num_rows; 1024 threads, each with every 1024th group of four tokens (the four words of one Philox
// counter). A greedy row is read once. top-k and top-p find the smallest value they keep by radix select: four
// passes over the row with a histogram of 256 bins in shared memory, of counts or of probabilities. These are
// summed as integers (2^-40), so that the order of the threads changes nothing. Bound by how fast one
// multiprocessor reads L2: 4 * vocab bytes a pass.
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

struct Best {
    double score;
    int id;
};

// The better of the two: the higher score, of equals the lower id; NaN wins, so that it is seen.
__device__ __forceinline__ Best better(Best a, Best b) {
    if (isnan(a.score) || isnan(b.score)) return isnan(a.score) ? a : b;
    return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b;
}

// The block's best, given to all threads.
__device__ Best block_best(Best best) {
    __shared__ Best words[kSampleWarps];
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) {
        const Best other{__shfl_xor_sync(kWholeWarp, best.score, step),
                         __shfl_xor_sync(kWholeWarp, best.id, step)};
        best = better(best, other);
    }
    __syncthreads();
    if (threadIdx.x % kWarpSize == 0) words[threadIdx.x / kWarpSize] = best;
    __syncthreads();
    best = words[0];
    for (int i = 1; i < kSampleWarps; ++i) best = better(best, words[i]);
    return best;
}

__device__ uint64 block_total(uint64 x) {
    __shared__ uint64 sum;
    __syncthreads();
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, x);
    __syncthreads();
    return sum;
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

// Radix select over items 0 to count - 1, from the highest byte of the key down. 0 < target <= all weights.
template <typename GetItem>
__device__ Selected select_key(int count, uint64 target, GetItem get) {
    __shared__ uint64 bins[kBins];
    __shared__ Selected shared;
    uint32 prefix = 0;
    uint64 above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < kBins; bin += kSampleThreads) bins[bin] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += kSampleThreads) {
            const Item item = get(i);
            // Of the bytes above this one, all must be those already chosen.
            const bool candidate = shift == 24 || item.key >> (shift + 8) == prefix >> (shift + 8);
            if (item.weight != 0 && candidate) atomicAdd(&bins[item.key >> shift & 0xff], item.weight);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = kBins - 1;
            uint64 sum = above;
            while (bin > 0 && sum + bins[bin] < target) sum += bins[bin--];
            shared = Selected{prefix | static_cast<uint32>(bin) << shift, sum};
        }
        __syncthreads();
        prefix = shared.key;
        above = shared.above;
    }
    return Selected{prefix, above};
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) apply_constraints(
    float* scores, int* counts, const T* logits, int vocab, const uint32* allowed_mask,
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
        scores[i] = allowed ? to_float(logits[i]) : -CUENGINE_INFINITY;
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

extern "C" __global__ void __launch_bounds__(kSampleThreads) sample_tokens(
    int* token_ids, float* maxima, const float* scores, int vocab, const int* target_ids,
    const float* temperatures, const int* top_k, const float* top_p, const float* least_scaled,
    const uint64* seeds, const uint32* sample_indices, const uint32* positions) {
    const int row = blockIdx.x;
    scores += static_cast<int64>(row) * vocab;
    Best best{-CUENGINE_INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        best = better(best, Best{scores[i], i});
    }
    best = block_best(best);
    const float highest = static_cast<float>(best.score);
    if (threadIdx.x == 0) maxima[row] = highest;
    const int target = target_ids[row];
    const float temperature = temperatures[row];
    if (target >= 0 || temperature == 0.0f || !isfinite(highest)) {
        const bool drawable = highest > -CUENGINE_INFINITY && best.id < vocab;
        if (threadIdx.x == 0) token_ids[row] = target >= 0 ? target : drawable ? best.id : 0;
        return;
    }

    // The largest is taken off first, so that no temperature, however low, can overflow. True division, as NumPy.
    auto scaled = [&](int i) { return __fdiv_rn(scores[i] - highest, temperature); };
    uint32 least = ordered(least_scaled[row]);
    if (top_k[row] > 0 && top_k[row] < vocab) {
        const Selected kth = select_key(vocab, top_k[row], [&](int i) {
            return Item{ordered(scaled(i)), 1};
        });
        least = max(least, kth.key);
    }
    int last_tie = vocab;  // of tokens whose value is just `least`, those with larger ids are left out
    if (top_p[row] < 1.0f) {
        auto weight = [&](float value) {
            return static_cast<uint64>(static_cast<double>(expf(value)) * kProbabilityUnit);
        };
        auto item = [&](int i) {
            const float value = scaled(i);
            const uint32 key = ordered(value);
            return Item{key, key >= least ? weight(value) : 0};
        };
        uint64 sum = 0;
        for (int i = threadIdx.x; i < vocab; i += kSampleThreads) sum += item(i).weight;
        const double wanted = ceil(static_cast<double>(top_p[row]) * static_cast<double>(block_total(sum)));
        const uint64 nucleus = max(1ull, static_cast<uint64>(wanted));
        const Selected edge = select_key(vocab, nucleus, item);
        least = edge.key;
        auto tie = [&](int i) {
            const Item found = item(i);
            return found.key == edge.key ? found.weight : 0;
        };
        // Ties at the edge go by id: the same selection again, lowest ids first.
        const Selected last = select_key(vocab, nucleus - edge.above, [&](int i) {
            return Item{~static_cast<uint32>(i), tie(i)};
        });
        last_tie = static_cast<int>(~last.key);
    } else {
        least = max(least, ordered(kLeastGap));
    }

    const PhiloxKey key{static_cast<uint32>(seeds[row]), static_cast<uint32>(seeds[row] >> 32)};
    const uint32 sample = sample_indices[row], position = positions[row];
    auto kept = [&](int i, float value) {
        const uint32 bits = ordered(value);
        return bits > least || (bits == least && i <= last_tie);
    };
    // First with noise in float32; then those that it cannot tell from the best, in float64 as philox.py.
    Best draw{-CUENGINE_INFINITY, 0x7fffffff};
    for (int pass = 0; pass < 2; ++pass) {
        const double near = draw.score - kNoiseTolerance;
        const bool exact = pass == 1;
        Best found{-CUENGINE_INFINITY, 0x7fffffff};
        for (int group = threadIdx.x; group * 4 < vocab; group += kSampleThreads) {
            bool any = false;
            for (int i = group * 4; i < min(vocab, group * 4 + 4); ++i) any |= kept(i, scaled(i));
            if (!any) continue;
            const uint4 words = philox(
                make_uint4(group, position, sample, kPurposeToken), key);
            const uint32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = group * 4 + j;
                if (i >= vocab) continue;
                const float value = scaled(i);
                if (!kept(i, value)) continue;
                double score = value + gumbel_float(word[j]);
                if (exact && score >= near) score = value + gumbel(word[j]);
                if (!exact || score >= near) found = better(found, Best{score, i});
            }
        }
        draw = block_best(found);
    }
    if (threadIdx.x == 0) token_ids[row] = draw.id;
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads) report_logprobs(
    float* logprobs, int* ranks, int* top_ids, float* top_logprobs, const T* logits, int vocab,
    const int* token_ids, const int* num_logprobs, int width) {
    const int row = blockIdx.x;
    const int wanted = num_logprobs[row];
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
    const float chosen = to_float(logits[token_ids[row]]);
    Best best{-CUENGINE_INFINITY, 0x7fffffff};
    uint64 larger = 0;
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        const float value = to_float(logits[i]);
        best = better(best, Best{value, i});
        larger += value > chosen;
    }
    best = block_best(best);
    larger = block_total(larger);
    const float highest = static_cast<float>(best.score);
    uint64 sum = 0;
    for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
        sum += static_cast<uint64>(static_cast<double>(expf(to_float(logits[i]) - highest)) * kProbabilityUnit);
    }
    const double normalizer = highest + log(static_cast<double>(block_total(sum)) / kProbabilityUnit);
    if (threadIdx.x == 0) {
        logprobs[row] = static_cast<float>(chosen - normalizer);
        ranks[row] = 1 + static_cast<int>(larger);
    }
    // The most likely tokens one by one, each the best of those behind the one before: few are asked for.
    for (int k = 0; k < min(wanted, vocab); ++k) {
        if (threadIdx.x == 0) {
            top_ids[row * width + k] = best.id;
            top_logprobs[row * width + k] = static_cast<float>(best.score - normalizer);
        }
        Best next{-CUENGINE_INFINITY, 0x7fffffff};
        for (int i = threadIdx.x; i < vocab; i += kSampleThreads) {
            const float value = to_float(logits[i]);
            if (value < best.score || (value == best.score && i > best.id)) {
                next = better(next, Best{value, i});
            }
        }
        best = block_best(next);
    }
}
