// The PTX instructions that C++ has no words for, each behind a small function: asynchronous copies to shared
// memory, matrix loads from it, tensor-core products (sm_80 and later), and 2^x as the hardware has it.
#pragma once

#include "common.cuh"

// 2^x in one instruction, to 2 units in the last place; what exp2f makes of it takes care of denormals, too.
__device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Start a copy of 16 bytes from global to shared memory, past L1; zeros instead where !valid, and then the
// source is not read (it must be an address all the same).
__device__ __forceinline__ void copy_async(uint32 target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// What this thread copied since the last call becomes one group, to be waited for.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Wait until at most kPending of this thread's newest groups are still on their way. Other threads see the
// data after a barrier only.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8 * i to 8 * i + 7 give the rows of matrix i. Lane l gets the
// elements 2 * (l % 4) and the next of row l / 4 of each.
__device__ __forceinline__ void load_matrices(uint32 (&registers)[4], uint32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(row_address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32 (&registers)[4], uint32 row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(row_address)
                 : "memory");
}

// sum [16, 8] += a [16, 16] * b [16, 8], float32 sums. In lane l, with row r = l / 4 and column c = 2 * (l % 4):
//   sum: (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1)
//   a:   pairs at (r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8)
//   b:   pairs down column r at rows c and c + 8
template <typename T>
__device__ __forceinline__ void multiply_add(
    float (&sum)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);

template <>
__device__ __forceinline__ void multiply_add<bf16>(
    float (&sum)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<fp16>(
    float (&sum)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to T, side by side in one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32 pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32 pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32*>(&pair);
}
template <>
__device__ __forceinline__ uint32 pack_pair<fp16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32*>(&pair);
}
