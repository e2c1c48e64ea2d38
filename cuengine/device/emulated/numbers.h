/* Arithmetic that PTX has and C lacks, lane by lane. Half types are computed in double and rounded once. */
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float f32_of(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t bits_f32(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline double f64_of(uint64_t x) { double f; memcpy(&f, &x, 8); return f; }
static inline uint64_t bits_f64(double f) { uint64_t x; memcpy(&x, &f, 8); return x; }

/* ---- narrow formats ---- */

enum { NEAREST, NEAREST_AWAY, TO_ZERO, UP, DOWN };

/* `x` in a format of 1 sign bit, `exponent_bits` and `fraction_bits`, rounded once. NaN: all ones but the sign.
   finite: what is too large becomes the largest finite number. */
static __attribute__((noinline)) uint32_t narrow(double x, int exponent_bits, int fraction_bits, int rounding, int finite) {
    uint64_t bits = bits_f64(x);
    uint32_t negative = (uint32_t)(bits >> 63), sign = negative << (exponent_bits + fraction_bits);
    uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
    if (x != x) return infinity | ((1u << fraction_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1, exponent = (int)(bits >> 52 & 2047) - 1023;
    uint64_t fraction = bits & 0xfffffffffffffull;
    uint32_t magnitude;
    if (exponent == 1024) magnitude = finite ? infinity - 1 : infinity;
    else {
        if (exponent == -1023) exponent = -1022; /* a denormal double */
        else fraction |= 1ull << 52;
        int least = 1 - bias, drop = 52 - fraction_bits + (exponent < least ? least - exponent : 0);
        if (drop > 60) drop = 60;
        uint64_t kept = fraction >> drop, rest = fraction & ((1ull << drop) - 1), half = 1ull << (drop - 1);
        int up = rounding == NEAREST        ? rest > half || (rest == half && kept & 1)
                 : rounding == NEAREST_AWAY ? rest >= half
                 : rounding == UP           ? rest && !negative
                 : rounding == DOWN         ? rest && negative
                                            : 0;
        kept += (uint64_t)up;
        if (exponent >= 1 - bias) kept += (uint64_t)(exponent + bias - 1) << fraction_bits;
        int to_infinity = rounding <= NEAREST_AWAY || (rounding == UP && !negative) || (rounding == DOWN && negative);
        magnitude = kept < infinity ? (uint32_t)kept : to_infinity && !finite ? infinity : infinity - 1;
    }
    return sign | magnitude;
}

static inline float f16_of(uint16_t x) {
    /* The exponent is put right by a product, which normalises denormals as well. */
    float f = f32_of((uint32_t)(x & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = bits_f32(f) | ((x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0);
    return f32_of(bits | (uint32_t)(x & 0x8000) << 16);
}
static inline float bf16_of(uint16_t x) { return f32_of((uint32_t)x << 16); }
static inline uint16_t bits_f16(double x) { return (uint16_t)narrow(x, 5, 10, NEAREST, 0); }
static inline uint16_t bits_bf16(double x) { return (uint16_t)narrow(x, 8, 7, NEAREST, 0); }
static inline uint16_t bits_bf16_of_f32(float f) {
    uint32_t x = bits_f32(f);
    return f != f ? 0x7fff : (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
static inline uint16_t bits_f16_of_f32(float f) {
    /* For numbers that stay normal: the bits dropped decide by a carry. The rest goes the long way. */
    uint32_t x = bits_f32(f), a = x & 0x7fffffff;
    if (a >= 0x38800000u && a < 0x477fe000u)
        return (uint16_t)((x >> 16 & 0x8000) | ((a - 0x38000000u + 0xfff + (a >> 13 & 1)) >> 13));
    return (uint16_t)narrow(f, 5, 10, NEAREST, 0);
}

/* a + b with the last bit set where it is not exact: rounding that once more equals rounding once. */
static inline double add_odd(double a, double b) {
    double sum = a + b, part = sum - a, error = (a - (sum - part)) + (b - part);
    if (!(fabs(sum) <= 0x1.fffffffffffffp1023) || error == 0) return sum;
    uint64_t bits = bits_f64(sum);
    return f64_of((error > 0) == (sum > 0) ? bits | 1 : bits - !(bits & 1));
}
static __attribute__((noinline)) double odd_of_u64(uint64_t x) {
    if (x < 1ull << 53) return (double)x;
    int drop = 11 - __builtin_clzll(x);
    return ldexp((double)((x >> drop) | ((x & ((1ull << drop) - 1)) != 0)), drop);
}
static inline double odd_of_s64(int64_t x) { return x < 0 ? -odd_of_u64(-(uint64_t)x) : odd_of_u64((uint64_t)x); }

/* ---- floating point ---- */

static inline float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float div_approximate(float a, float b) {
    if (a != a || !(fabsf(b) > 0x1p126f && fabsf(b) <= 0x1.fffffep127f)) return a / b;
    return isinf(a) ? NAN : copysignf(0, a) * copysignf(1, b);
}

static inline float flush(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0, f) : f; }
static inline double flush_f64(double f) { return fabs(f) < 0x1p-1022 ? copysign(0, f) : f; }
static inline double saturate(double f) { return f > 0 ? (f < 1 ? f : 1) : 0; }
static inline double relu(double f) { return f != f ? f : f > 0 ? f : 0; }
/* min and max: -0 is less than +0; a number goes before NaN, or NaN before a number. */
#define MIN_MAX(suffix, type)                                                                     \
    static inline type min_##suffix(type a, type b) {                                             \
        return a != a ? b : b != b ? a : a < b ? a : b < a ? b                                    \
               : suffix##_of(bits_##suffix(a) | bits_##suffix(b));                                \
    }                                                                                             \
    static inline type max_##suffix(type a, type b) {                                             \
        return a != a ? b : b != b ? a : a > b ? a : b > a ? b                                    \
               : suffix##_of(bits_##suffix(a) & bits_##suffix(b));                                \
    }                                                                                             \
    static inline type min_nan_##suffix(type a, type b) {                                         \
        return a != a || b != b ? (type)NAN : min_##suffix(a, b);                                 \
    }                                                                                             \
    static inline type max_nan_##suffix(type a, type b) {                                         \
        return a != a || b != b ? (type)NAN : max_##suffix(a, b);                                 \
    }
MIN_MAX(f32, float)
MIN_MAX(f64, double)
static inline double xor_sign(double size, double a, double b) {
    return copysign(size, signbit(a) ^ signbit(b) ? -1.0 : 1.0);
}
/* rcp.approx.ftz.f64 and rsqrt have zeros in the lower word. */
static inline double high_word(double x) { return f64_of(bits_f64(x) & 0xffffffff00000000ull); }

/* Float to integer, saturated; NaN gives 0. `f` is a whole number already. */
#define TO_INT(name, type, low, high, above)                                                  \
    static inline type name(double f) {                                                       \
        return f != f ? 0 : f <= low ? (type)low : f >= above ? (type)high : (type)f;         \
    }
TO_INT(to_s8, int8_t, -128.0, 127, 127.0)
TO_INT(to_u8, uint8_t, 0.0, 255, 255.0)
TO_INT(to_s16, int16_t, -32768.0, 32767, 32767.0)
TO_INT(to_u16, uint16_t, 0.0, 65535, 65535.0)
TO_INT(to_s32, int32_t, -2147483648.0, 2147483647, 2147483647.0)
TO_INT(to_u32, uint32_t, 0.0, 4294967295u, 4294967295.0)
TO_INT(to_s64, int64_t, -9223372036854775808.0, INT64_MAX, 9223372036854775808.0)
TO_INT(to_u64, uint64_t, 0.0, UINT64_MAX, 18446744073709551616.0)

/* ---- integers ---- */

typedef __int128 int128_t;
typedef unsigned __int128 uint128_t;

static inline uint64_t shift_left(uint64_t a, uint32_t n, int width) { return n >= (uint32_t)width ? 0 : a << n; }
static inline uint64_t shift_right(uint64_t a, uint32_t n, int width) { return n >= (uint32_t)width ? 0 : a >> n; }
static inline int64_t shift_sign(int64_t a, uint32_t n, int width) {
    return a >> (n >= (uint32_t)width ? width - 1 : (int)n);
}
/* shf: the upper (left) or lower (right) word of b:a shifted. */
static inline uint32_t funnel_left(uint32_t a, uint32_t b, uint32_t n) {
    return (uint32_t)(((uint64_t)b << 32 | a) << n >> 32);
}
static inline uint32_t funnel_right(uint32_t a, uint32_t b, uint32_t n) {
    return (uint32_t)(((uint64_t)b << 32 | a) >> n);
}
static __attribute__((noinline)) uint64_t bit_insert(uint64_t a, uint64_t b, uint32_t at, uint32_t n, uint32_t width) {
    at &= 255;
    n &= 255;
    if (at >= width || !n) return b;
    if (n > width - at) n = width - at;
    uint64_t mask = (n >= 64 ? ~0ull : (1ull << n) - 1) << at;
    return (b & ~mask) | (a << at & mask);
}
static __attribute__((noinline)) uint64_t bit_extract(uint64_t a, uint32_t at, uint32_t n, uint32_t width, int is_signed) {
    at &= 255;
    n &= 255;
    if (!n) return 0;
    uint32_t top = at + n - 1 < width - 1 ? at + n - 1 : width - 1;
    uint64_t sign = is_signed && (a >> top & 1) ? ~0ull : 0;
    if (at >= width) return sign;
    uint32_t have = n < width - at ? n : width - at;
    uint64_t mask = have >= 64 ? ~0ull : (1ull << have) - 1;
    return (a >> at & mask) | (sign & ~mask);
}
static inline uint32_t find_top(uint64_t a, int width, int as_shift) {
    if (!a) return 0xffffffffu;
    uint32_t top = 63 - (uint32_t)__builtin_clzll(a);
    return as_shift ? (uint32_t)width - 1 - top : top;
}
static __attribute__((noinline)) uint64_t reverse_bits(uint64_t a, int width) {
    uint64_t r = 0;
    for (int i = 0; i < width; i++) r |= (a >> i & 1) << (width - 1 - i);
    return r;
}
static inline uint32_t logic3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t r = 0;
    for (uint32_t i = 0; i < 8; i++)
        if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return r;
}
static __attribute__((noinline)) uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = selector >> (4 * i) & 15, byte = (uint32_t)(both >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << (8 * i);
    }
    return r;
}
static inline int32_t clamp_s32(int64_t x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x; }
