/* What a translated kernel runs on: memory with checks, warps and blocks, arithmetic that C lacks.

   translate.py puts a kernel's C behind this file: one function `run_thread` that runs a thread to
   its next barrier or warp-collective instruction. `launch` below schedules threads round it. One
   launch at a time: the state is static. The structs up to Fault are mirrored in runtime.py. */
#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t base, size;
    uint8_t *shadow; /* one byte per byte: 0 fine, 1 no access, 2 undefined until written */
} Allocation;

typedef struct {
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, dynamic_offset; /* all of it; where the launch's own part begins */
    uint32_t order, seed;                  /* of warps: 0 forward, 1 reverse, 2 shuffled */
    const Allocation *allocations;
    uint64_t num_allocations;
    const uint8_t *params;
} Launch;

typedef struct {
    int32_t code, pc;
    uint32_t block[3], thread, other;
    uint64_t address, size;
} Fault;

enum { OUTSIDE = 1, NO_ACCESS, UNDEFINED, MISALIGNED, SHARED_OUTSIDE, SHARED_UNWRITTEN,
       SHARED_IN_FLIGHT, RACE_WRITE, RACE_READ, BARRIER_DIVERGED, WARP_DIVERGED, BAD_LANE,
       TRAPPED, LOCAL_OUTSIDE, OUT_OF_MEMORY };
enum { READY, AT_BARRIER, AT_COLLECTIVE, EXITED };
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX, VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT,
       MATCH_ANY, MATCH_ALL, REDUX_ADD, REDUX_MIN_U, REDUX_MAX_U, REDUX_MIN_S, REDUX_MAX_S,
       REDUX_AND, REDUX_OR, REDUX_XOR, SYNC_WARP, LDMATRIX, LDMATRIX_TRANS,
       MMA_BF16_K16, MMA_F16_K16, MMA_BF16_K8, MMA_F16_K8, MMA_TF32_K8,
       BAR_SYNC };

typedef struct {
    uint32_t destination, size, group;
    int pc;
    uint8_t data[16];
} Copy;

typedef struct {
    int state, resume, pc, kind;
    uint32_t index, tid[3], mask, in[12], out[8];
    uint64_t in64;
    uint32_t group, num_copies, room;
    Copy *copies;
    uint8_t *local;
    uint64_t saved[SAVED_WORDS];
} Thread;

typedef struct {
    uint32_t write_epoch, read_epoch;
    int16_t writer, reader; /* warps; reader -1: several; writer -2: atomics */
    uint8_t state;          /* 0 never written, 1 written, 2 in flight */
} Half;                     /* of a shared word: two bytes */

static const Launch *L;
static Fault *fault_out;
static jmp_buf fault_jump;
static uint32_t ctaid[3], epoch, num_threads;
static uint8_t *shared_memory;
static Half *halves;
static Thread *threads;
static const Allocation *recent;

static void run_thread(Thread *t);

static __attribute__((noreturn, cold)) void fail(int code, const Thread *t, int pc,
                                                 uint64_t address, uint64_t size, uint32_t other) {
    fault_out->code = code;
    fault_out->pc = pc;
    memcpy(fault_out->block, ctaid, sizeof ctaid);
    fault_out->thread = t ? t->index : 0;
    fault_out->other = other;
    fault_out->address = address;
    fault_out->size = size;
    longjmp(fault_jump, 1);
}

/* ---- global memory ---- */

static const Allocation *find_allocation(uint64_t address) {
    uint64_t low = 0, high = L->num_allocations; /* sorted by base */
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (L->allocations[middle].base <= address) low = middle + 1;
        else high = middle;
    }
    return low ? &L->allocations[low - 1] : 0;
}

static inline uint8_t *global_at(const Thread *t, uint64_t address, uint32_t size, int write, int pc) {
    const Allocation *a = recent;
    if (!a || address - a->base >= a->size || a->size - (address - a->base) < size) {
        a = find_allocation(address);
        if (!a || address - a->base >= a->size || a->size - (address - a->base) < size)
            fail(OUTSIDE, t, pc, address, size, write);
        recent = a;
    }
    uint8_t *shadow = a->shadow + (address - a->base);
    for (uint32_t i = 0; i < size; i++)
        if (__builtin_expect(shadow[i], 0)) {
            if (shadow[i] == 1) fail(NO_ACCESS, t, pc, address + i, size, write);
            if (!write) fail(UNDEFINED, t, pc, address + i, size, write);
            shadow[i] = 0;
        }
    return (uint8_t *)address;
}

/* ---- shared memory ---- */

static void shared_check(const Thread *t, uint32_t offset, uint32_t size, int write, int pc) {
    int warp = (int)(t->index / 32);
    if (offset > L->shared_bytes || size > L->shared_bytes - offset)
        fail(SHARED_OUTSIDE, t, pc, offset, size, write);
    for (Half *h = halves + offset / 2; h < halves + (offset + size + 1) / 2; h++) {
        if (h->state == 2) fail(SHARED_IN_FLIGHT, t, pc, offset, size, write);
        int writes_clash = h->write_epoch == epoch && h->writer != warp;
        if (write) { /* 1 write, 2 atomic */
            if (writes_clash && !(write == 2 && h->writer == -2))
                fail(RACE_WRITE, t, pc, offset, size, (uint32_t)h->writer);
            if (h->read_epoch == epoch && h->reader != warp)
                fail(RACE_READ, t, pc, offset, size, (uint32_t)h->reader);
            if (write == 2 && !h->state) fail(SHARED_UNWRITTEN, t, pc, offset, size, 0);
            h->state = 1;
            h->write_epoch = epoch;
            h->writer = write == 2 ? -2 : (int16_t)warp;
        } else {
            if (!h->state) fail(SHARED_UNWRITTEN, t, pc, offset, size, 0);
            if (writes_clash) fail(RACE_WRITE, t, pc, offset, size, (uint32_t)h->writer);
            if (h->read_epoch != epoch) {
                h->read_epoch = epoch;
                h->reader = (int16_t)warp;
            } else if (h->reader != warp) h->reader = -1;
        }
    }
}

static inline uint8_t *shared_at(const Thread *t, uint64_t address, uint32_t size, int write, int pc) {
    if (address > 0xffffffffu) fail(SHARED_OUTSIDE, t, pc, address, size, write);
    shared_check(t, (uint32_t)address, size, write, pc);
    return shared_memory + address;
}

static inline uint8_t *local_at(const Thread *t, uint64_t address, uint32_t size, int write, int pc) {
    if (address > LOCAL_BYTES || size > LOCAL_BYTES - address)
        fail(LOCAL_OUTSIDE, t, pc, address, size, write);
    return t->local + address;
}

static inline uint8_t *generic_at(const Thread *t, uint64_t address, uint32_t size, int write, int pc) {
    if (address - (uint64_t)shared_memory < L->shared_bytes)
        return shared_at(t, address - (uint64_t)shared_memory, size, write, pc);
    if (address - (uint64_t)t->local < LOCAL_BYTES)
        return local_at(t, address - (uint64_t)t->local, size, write, pc);
    return global_at(t, address, size, write, pc);
}

static inline void aligned(const Thread *t, uint64_t address, uint32_t size, int pc) {
    if (__builtin_expect(address & (size - 1), 0)) fail(MISALIGNED, t, pc, address, size, 0);
}

static void copy_async(Thread *t, uint64_t to, uint64_t from, uint32_t size, uint32_t source, int pc) {
    aligned(t, to, size, pc);
    aligned(t, from, size, pc);
    if (to > 0xffffffffu) fail(SHARED_OUTSIDE, t, pc, to, size, 1);
    shared_check(t, (uint32_t)to, size, 1, pc);
    if (t->num_copies == t->room) {
        uint32_t room = t->room ? 2 * t->room : 16;
        Copy *more = realloc(t->copies, room * sizeof(Copy));
        if (!more) fail(OUT_OF_MEMORY, t, pc, 0, 0, 0);
        t->copies = more;
        t->room = room;
    }
    Copy *c = &t->copies[t->num_copies++];
    *c = (Copy){(uint32_t)to, size, t->group, pc, {0}};
    if (source > size) source = size;
    if (source) memcpy(c->data, global_at(t, from, source, 0, pc), source);
    for (uint32_t i = 0; i < size / 2; i++) halves[to / 2 + i].state = 2;
}

/* Lands all copies but those of the last `keep` committed groups. */
static void copy_wait(Thread *t, uint32_t keep) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < t->num_copies; i++) {
        Copy c = t->copies[i];
        if (c.group + keep >= t->group) {
            t->copies[left++] = c;
            continue;
        }
        for (uint32_t j = 0; j < c.size / 2; j++) halves[c.destination / 2 + j].state = 1;
        shared_check(t, c.destination, c.size, 1, c.pc);
        memcpy(shared_memory + c.destination, c.data, c.size);
    }
    t->num_copies = left;
}

/* ---- numbers ---- */

static inline float f32_of(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t bits_f32(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline double f64_of(uint64_t x) { double f; memcpy(&f, &x, 8); return f; }
static inline uint64_t bits_f64(double f) { uint64_t x; memcpy(&x, &f, 8); return x; }
static inline float f16_of(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static inline uint16_t bits_f16(double f) {
    _Float16 h = (_Float16)f;
    uint16_t x;
    memcpy(&x, &h, 2);
    return f != f ? 0x7fff : x;
}
static inline float bf16_of(uint16_t x) { return f32_of((uint32_t)x << 16); }
static inline uint16_t bits_bf16(double f) {
    if (f != f) return 0x7fff;
    float near = (float)f;
    uint32_t x = bits_f32(near);
    /* To odd first, so that rounding twice equals rounding once. */
    if ((double)near != f && !isinf(near)) x = (fabs((double)near) > fabs(f) ? x - 1 : x) | 1;
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
static inline float flush(float f) { return fpclassify(f) == FP_SUBNORMAL ? copysignf(0, f) : f; }
static inline float saturate_f32(float f) { return f > 0 ? (f < 1 ? f : 1) : 0; }
static inline double saturate_f64(double f) { return f > 0 ? (f < 1 ? f : 1) : 0; }

#define DIRECTED(type, suffix, fma_)                                                           \
    static __attribute__((noinline)) type directed_##suffix(int mode, int op, type a, type b, type c) { \
        volatile type x = a, y = b, z = c, r;                                                   \
        fesetround(mode);                                                                       \
        r = op == 0 ? x + y : op == 1 ? x * y : op == 2 ? fma_(x, y, z) : op == 3 ? x / y : (type)sqrt(x); \
        fesetround(FE_TONEAREST);                                                               \
        return r;                                                                               \
    }
DIRECTED(float, f32, fmaf)
DIRECTED(double, f64, fma)
static __attribute__((noinline)) float narrow(int mode, double a) {
    volatile double x = a;
    fesetround(mode);
    volatile float r = (float)x;
    fesetround(FE_TONEAREST);
    return r;
}

/* Float to integer, saturated as PTX has it; NaN gives 0. `f` is rounded already. */
#define TO_INT(name, type, low, high, above)                            \
    static inline type name(double f) {                                 \
        return f != f ? 0 : f <= low ? (type)low : f >= above ? (type)high : (type)f; \
    }
TO_INT(to_s8, int8_t, -128.0, 127, 127.0)
TO_INT(to_u8, uint8_t, 0.0, 255, 255.0)
TO_INT(to_s16, int16_t, -32768.0, 32767, 32767.0)
TO_INT(to_u16, uint16_t, 0.0, 65535, 65535.0)
TO_INT(to_s32, int32_t, -2147483648.0, 2147483647, 2147483647.0)
TO_INT(to_u32, uint32_t, 0.0, 4294967295u, 4294967295.0)
TO_INT(to_s64, int64_t, -9223372036854775808.0, INT64_MAX, 9223372036854775808.0)
TO_INT(to_u64, uint64_t, 0.0, UINT64_MAX, 18446744073709551616.0)

static inline uint32_t shl_32(uint32_t a, uint32_t n) { return n > 31 ? 0 : a << n; }
static inline uint64_t shl_64(uint64_t a, uint32_t n) { return n > 63 ? 0 : a << n; }
static inline uint32_t shr_u32(uint32_t a, uint32_t n) { return n > 31 ? 0 : a >> n; }
static inline uint64_t shr_u64(uint64_t a, uint32_t n) { return n > 63 ? 0 : a >> n; }
static inline int32_t shr_s32(int32_t a, uint32_t n) { return a >> (n > 31 ? 31 : n); }
static inline int64_t shr_s64(int64_t a, uint32_t n) { return a >> (n > 63 ? 63 : n); }
static inline uint64_t bit_insert(uint64_t a, uint64_t b, uint32_t at, uint32_t n, uint32_t width) {
    at &= 255;
    n &= 255;
    if (at >= width || !n) return b;
    if (n > width - at) n = width - at;
    uint64_t mask = (n >= 64 ? ~0ull : (1ull << n) - 1) << at;
    return (b & ~mask) | (a << at & mask);
}
static inline uint64_t bit_extract(uint64_t a, uint32_t at, uint32_t n, uint32_t width, int is_signed) {
    at &= 255;
    n &= 255;
    if (!n) return 0;
    uint32_t top = at + n - 1 < width - 1 ? at + n - 1 : width - 1;
    uint64_t sign = is_signed && (a >> top & 1) ? ~0ull : 0;
    if (at >= width) return sign;
    uint32_t have = n < width - at ? n : width - at;
    uint64_t mask = have >= 64 ? ~0ull : (1ull << have) - 1;
    uint64_t fill = n >= 64 ? ~0ull : (1ull << n) - 1;
    return (a >> at & mask) | (sign & ~mask & (is_signed ? ~0ull : fill));
}
static inline uint32_t find_top(uint64_t a, int width, int shift) {
    if (!a) return 0xffffffffu;
    uint32_t top = 63 - (uint32_t)__builtin_clzll(a);
    return shift ? (uint32_t)width - 1 - top : top;
}
static inline uint64_t reverse_bits(uint64_t a, int width) {
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
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = selector >> (4 * i) & 15, byte = (uint32_t)(both >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << (8 * i);
    }
    return r;
}

/* ---- warps ---- */

static void matrix_move(Thread *w, int kind, int count) {
    int transposed = kind == LDMATRIX_TRANS;
    for (int m = 0; m < count; m++) {
        uint16_t tile[8][8];
        for (int row = 0; row < 8; row++) {
            Thread *t = &w[8 * m + row];
            aligned(t, t->in64, 16, t->pc);
            memcpy(tile[row], shared_at(t, t->in64, 16, 0, t->pc), 16);
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 2; i++) {
                int row = lane / 4, column = lane % 4 * 2 + i;
                uint16_t *at = transposed ? &tile[column][row] : &tile[row][column];
                if (i == 0) w[lane].out[m] = *at;
                else w[lane].out[m] |= (uint32_t)*at << 16;
            }
        }
    }
}

/* D = A B + C; operands lie over lanes as PTX ISA 9.7.14.5 draws them. in: A, then B, then C. */
static void matrix_multiply(Thread *w, int kind) {
    int tf32 = kind == MMA_TF32_K8, bf16 = kind == MMA_BF16_K16 || kind == MMA_BF16_K8;
    int depth = kind == MMA_BF16_K16 || kind == MMA_F16_K16 ? 16 : 8;
    int num_a = depth == 16 || tf32 ? 4 : 2, num_b = num_a / 2;
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane / 4, in_group = lane % 4;
        for (int r = 0; r < num_a + num_b; r++) {
            uint32_t word = w[lane].in[r];
            int from_b = r >= num_a, part = from_b ? r - num_a : r / 2;
            for (int i = 0; i < (tf32 ? 1 : 2); i++) {
                int k = tf32 ? in_group + 4 * part : 2 * in_group + i + 8 * part;
                uint16_t half = (uint16_t)(word >> (16 * i));
                float x = tf32 ? f32_of(word & 0xffffe000u) : bf16 ? bf16_of(half) : f16_of(half);
                if (from_b) b[k][group] = x;
                else a[group + r % 2 * 8][k] = x;
            }
        }
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = f32_of(w[lane].in[num_a + num_b + i]);
            for (int k = 0; k < depth; k++) sum += a[row][k] * b[k][column];
            w[lane].out[i] = bits_f32(sum);
        }
}

static void shuffle(Thread *w, uint32_t mask, int kind) {
    for (uint32_t lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        Thread *t = &w[lane];
        uint32_t b = t->in[1] & 31, clamp = t->in[2] & 31, segment = t->in[2] >> 8 & 31;
        uint32_t high = (lane & segment) | (clamp & ~segment), low = lane & segment;
        int32_t source;
        int valid;
        if (kind == SHFL_UP) source = (int32_t)lane - (int32_t)b, valid = source >= (int32_t)high;
        else if (kind == SHFL_DOWN) source = (int32_t)(lane + b), valid = source <= (int32_t)high;
        else if (kind == SHFL_BFLY) source = (int32_t)(lane ^ b), valid = source <= (int32_t)high;
        else source = (int32_t)(low | (b & ~segment)), valid = source <= (int32_t)high;
        if (!valid) source = (int32_t)lane;
        if (!(mask >> source & 1)) fail(BAD_LANE, t, t->pc, mask, 0, (uint32_t)source);
        t->out[0] = w[source].in[0];
        t->out[1] = (uint32_t)valid;
    }
}

static void collective(Thread *w, uint32_t mask) {
    Thread *first = &w[__builtin_ctz(mask)];
    int kind = first->kind;
    if (kind <= SHFL_IDX) shuffle(w, mask, kind);
    else if (kind >= MMA_BF16_K16 && kind <= MMA_TF32_K8) matrix_multiply(w, kind);
    else if (kind >= LDMATRIX && kind <= LDMATRIX_TRANS) matrix_move(w, kind, (int)first->in[8]);
    else if (kind != SYNC_WARP) {
        uint32_t ballot = 0, sum = 0, least = ~0u, most = 0, all = ~0u, any = 0, odd = 0;
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (uint32_t i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            uint32_t x = w[i].in[0];
            if (x) ballot |= 1u << i;
            sum += x, all &= x, any |= x, odd ^= x;
            least = x < least ? x : least, most = x > most ? x : most;
            low = (int32_t)x < low ? (int32_t)x : low, high = (int32_t)x > high ? (int32_t)x : high;
        }
        for (uint32_t i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            uint32_t same = 0, *out = w[i].out;
            for (uint32_t j = 0; j < 32; j++)
                if (mask >> j & 1 && w[j].in64 == w[i].in64) same |= 1u << j;
            switch (kind) {
            case VOTE_ALL: out[0] = ballot == mask; break;
            case VOTE_ANY: out[0] = ballot != 0; break;
            case VOTE_UNI: out[0] = ballot == mask || !ballot; break;
            case VOTE_BALLOT: out[0] = ballot; break;
            case MATCH_ANY: out[0] = same; break;
            case MATCH_ALL: out[0] = same == mask ? mask : 0, out[1] = same == mask; break;
            case REDUX_ADD: out[0] = sum; break;
            case REDUX_MIN_U: out[0] = least; break;
            case REDUX_MAX_U: out[0] = most; break;
            case REDUX_MIN_S: out[0] = (uint32_t)low; break;
            case REDUX_MAX_S: out[0] = (uint32_t)high; break;
            case REDUX_AND: out[0] = all; break;
            case REDUX_OR: out[0] = any; break;
            default: out[0] = odd; break;
            }
        }
    }
}

/* Runs a warp until each of its threads waits at a barrier or is done. */
static void run_warp(Thread *w, uint32_t size) {
    for (;;) {
        int progress = 0;
        Thread *stuck = 0;
        for (uint32_t i = 0; i < size; i++) {
            Thread *t = &w[L->order == 1 ? size - 1 - i : i];
            if (t->state != READY) continue;
            run_thread(t);
            progress = 1;
        }
        for (uint32_t i = 0; i < size; i++) {
            Thread *t = &w[i];
            if (t->state != AT_COLLECTIVE) continue;
            if (!(t->mask >> i & 1)) fail(BAD_LANE, t, t->pc, t->mask, 0, i);
            uint32_t mask = size == 32 ? t->mask : t->mask & ((1u << size) - 1), here = 0;
            if (t->kind >= LDMATRIX && mask != 0xffffffffu)
                fail(WARP_DIVERGED, t, t->pc, t->mask, 0, size);
            for (uint32_t j = 0; j < size; j++) {
                if (!(mask >> j & 1)) continue;
                if (w[j].state == AT_BARRIER || w[j].state == EXITED)
                    fail(WARP_DIVERGED, t, t->pc, t->mask, 0, w[j].index);
                if (w[j].state == AT_COLLECTIVE && w[j].pc == t->pc && w[j].mask == t->mask)
                    here |= 1u << j;
            }
            if (here != mask) {
                stuck = t;
                continue;
            }
            collective(w, mask);
            for (uint32_t j = 0; j < size; j++)
                if (mask >> j & 1) w[j].state = READY;
            progress = 1;
        }
        if (progress) continue;
        if (stuck) fail(WARP_DIVERGED, stuck, stuck->pc, stuck->mask, 0, stuck->index);
        return;
    }
}

/* in: id, count (0: all), value. A barrier opens when its threads are all there. */
static int open_barriers(void) {
    int opened = 0;
    for (uint32_t id = 0; id < 16; id++) {
        uint32_t there = 0, wanted = 0;
        for (uint32_t i = 0; i < num_threads; i++)
            if (threads[i].state == AT_BARRIER && threads[i].in[0] == id) {
                there++;
                wanted = threads[i].in[1] ? threads[i].in[1] : num_threads;
            }
        if (!there || there != wanted) continue;
        for (uint32_t i = 0; i < num_threads; i++) {
            Thread *t = &threads[i];
            if (t->state != AT_BARRIER || t->in[0] != id) continue;
            t->state = READY;
        }
        opened = 1;
    }
    epoch += (uint32_t)opened;
    return opened;
}

static void run_block(uint32_t *warps, uint32_t num_warps, uint32_t *seed) {
    for (uint32_t i = 0; i < num_warps; i++) warps[i] = L->order == 1 ? num_warps - 1 - i : i;
    memset(shared_memory, 0xa5, L->shared_bytes);
    memset(halves, 0, (L->shared_bytes / 2 + 1) * sizeof(Half));
    epoch = 1;
    for (uint32_t i = 0; i < num_threads; i++) {
        threads[i].state = READY;
        threads[i].resume = 0;
        threads[i].group = threads[i].num_copies = 0;
    }
    for (;;) {
        if (L->order == 2)
            for (uint32_t i = num_warps; i > 1; i--) {
                *seed = *seed * 1664525u + 1013904223u;
                uint32_t j = (*seed >> 8) % i, other = warps[j];
                warps[j] = warps[i - 1];
                warps[i - 1] = other;
            }
        for (uint32_t i = 0; i < num_warps; i++) {
            uint32_t first = 32 * warps[i], rest = num_threads - first;
            run_warp(threads + first, rest < 32 ? rest : 32);
        }
        if (open_barriers()) continue;
        for (uint32_t i = 0; i < num_threads; i++)
            if (threads[i].state == AT_BARRIER) {
                uint32_t other = 0;
                while (other < num_threads && threads[other].state == AT_BARRIER) other++;
                fail(BARRIER_DIVERGED, &threads[i], threads[i].pc, 0, 0, other);
            }
        return;
    }
}

/* 0, or 1 with what went wrong in *fault. */
int launch(const Launch *what, Fault *fault) {
    L = what;
    fault_out = fault;
    recent = 0;
    num_threads = L->block[0] * L->block[1] * L->block[2];
    uint32_t num_warps = (num_threads + 31) / 32, seed = L->seed;
    threads = calloc(num_threads, sizeof(Thread));
    uint8_t *local = calloc(num_threads, LOCAL_BYTES + 16);
    shared_memory = aligned_alloc(1024, (L->shared_bytes / 1024 + 1) * 1024);
    halves = malloc((L->shared_bytes / 2 + 1) * sizeof(Half));
    uint32_t *warps = malloc(num_warps * sizeof(uint32_t));
    volatile int failed = !threads || !local || !shared_memory || !halves || !warps;
    if (failed) fault->code = OUT_OF_MEMORY;
    else if (setjmp(fault_jump)) failed = 1;
    else {
        for (uint32_t i = 0; i < num_threads; i++) {
            Thread *t = &threads[i];
            t->index = i;
            t->tid[0] = i % L->block[0];
            t->tid[1] = i / L->block[0] % L->block[1];
            t->tid[2] = i / (L->block[0] * L->block[1]);
            t->local = local + (size_t)i * (LOCAL_BYTES + 16);
        }
        for (ctaid[2] = 0; ctaid[2] < L->grid[2]; ctaid[2]++)
            for (ctaid[1] = 0; ctaid[1] < L->grid[1]; ctaid[1]++)
                for (ctaid[0] = 0; ctaid[0] < L->grid[0]; ctaid[0]++)
                    run_block(warps, num_warps, &seed);
    }
    for (uint32_t i = 0; threads && i < num_threads; i++) free(threads[i].copies);
    free(threads);
    free(local);
    free(shared_memory);
    free(halves);
    free(warps);
    return failed;
}
