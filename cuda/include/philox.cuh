// Philox4x32-10 (Salmon et al., SC 2011) and Gumbel noise, word for word those of cuengine/device/philox.py.
#pragma once

#include "common.cuh"

constexpr uint32 kPurposeToken = 0;

struct PhiloxKey {
    uint32 low, high;
};

__device__ __forceinline__ uint4 philox(uint4 counter, PhiloxKey key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32 high_0 = __umulhi(0xD2511F53u, counter.x), low_0 = 0xD2511F53u * counter.x;
        const uint32 high_1 = __umulhi(0xCD9E8D57u, counter.z), low_1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high_1 ^ counter.y ^ key.low, low_1, high_0 ^ counter.w ^ key.high, low_0);
        key.low += 0x9E3779B9u;
        key.high += 0xBB67AE85u;
    }
    return counter;
}

// -log(-log(u)), u = (word + 0.5) / 2^32.
__device__ __forceinline__ double gumbel(uint32 word) {
    const double u = (word + 0.5) * 2.3283064365386963e-10;
    return -log(-log(u));
}

// The same in float32, to within 1e-5. Near 1 float32 has no room for u, but has for 1 - u.
__device__ __forceinline__ float gumbel_float(uint32 word) {
    const float unit = 2.3283064365386963e-10f;
    const float exponential = word >> 31 ? -log1pf(-(static_cast<float>(~word) + 0.5f) * unit)
                                         : -logf((static_cast<float>(word) + 0.5f) * unit);
    return -logf(exponential);
}
