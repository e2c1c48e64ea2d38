/* A warp, its registers and an instruction: what handlers of arithmetic are made of. The rest: runtime.c. */
#include <fenv.h>

#include "numbers.h"

#define EVERY 0xffffffffu
#define MAX_OPERANDS 16

typedef struct Warp Warp;
typedef struct Instruction Instruction;
typedef void Handler(Warp *w, const Instruction *i, uint32_t mask);

struct Instruction {
    Handler *run;
    uint32_t guard, negated;   /* a predicate, and what it is XORed with */
    uint32_t size, width;      /* bytes of an element in memory; of the register that holds it */
    uint32_t count, kind;      /* elements of a vector; a variant, told at each handler */
    uint32_t line, unused;     /* of the PTX */
    int64_t immediate;         /* displacement of an address, target of a branch, ... */
    uint32_t o[MAX_OPERANDS];  /* places of registers: results first */
};

/* What PTX calls special registers: a place of 32 lanes each at the start of a warp's file, in this order, which
   program.py has as well. */
enum { TID, CTAID = 3, NTID = 6, NCTAID = 9, LANEID = 12, WARPID, NWARPID, LANEMASK_EQ, LANEMASK_LT, LANEMASK_LE,
       LANEMASK_GT, LANEMASK_GE, DYNAMIC_BYTES, TOTAL_BYTES, NUM_SPECIALS };

typedef struct {
    uint32_t lane, destination, size, group;
    const Instruction *i;
    uint8_t data[16];
} Copy;

struct Warp {
    uint8_t *bases[2];                         /* registers, constants: chosen by bit 0 of a place */
    uint32_t index, exists;                    /* exists: a bit for each lane that is a thread */
    uint32_t active;                           /* lanes that run now, all at `pc` */
    uint32_t ready, waiting, at_barrier;       /* could run, with the active ones; are held up */
    int32_t pc, merge_at;                      /* where the nearest lane ahead is */
    int32_t lane_pc[32];                       /* of lanes that are not active */
    uint32_t needed[32];                       /* lanes that a waiting lane waits for */
    uint32_t carry;
    uint32_t stamp;                            /* of what it does to shared memory until it next synchronises */
    uint32_t barrier_id, barrier_count, barrier_value;
    const Instruction *barrier;
    uint32_t group[32], num_copies, room;
    Copy *copies;
    uint8_t *local;
    uint8_t scratch[256] __attribute__((aligned(64)));
};

/* ---- registers ---- */

static inline void *place(const Warp *w, uint32_t o) {
    return __builtin_assume_aligned(w->bases[o & 1] + (o & ~1u), 4);
}
static inline uint32_t *lanes_u32(const Warp *w, uint32_t o) { return place(w, o); }
static inline uint64_t *lanes_u64(const Warp *w, uint32_t o) { return place(w, o); }
#define predicate lanes_u32

#define LANES(count) _Pragma("GCC ivdep") for (int l = 0; l < count; l++)

/* Where a handler puts its result: the register, or a scratch place where some lanes keep theirs. */
static inline void *target(Warp *w, uint32_t o, uint32_t mask) { return mask == EVERY ? place(w, o) : w->scratch; }
#define MERGE(type)                                                       \
    {                                                                     \
        type *to = place(w, o);                                           \
        const type *from = (const type *)w->scratch;                      \
        LANES(32) to[l] = mask >> l & 1 ? from[l] : to[l];                \
    }
static __attribute__((noinline, unused)) void merge(Warp *w, uint32_t o, uint32_t mask, uint32_t width) {
    if (width == 4) MERGE(uint32_t)
    else if (width == 8) MERGE(uint64_t)
    else MERGE(uint16_t)
}
static inline void keep(Warp *w, uint32_t o, uint32_t mask, uint32_t width) {
    if (mask != EVERY) merge(w, o, mask, width);
}
static inline void put_predicate(Warp *w, uint32_t o, uint32_t mask, uint32_t value) {
    uint32_t *p = predicate(w, o);
    *p = (*p & ~mask) | (value & mask);
}
/* A bit for each of 32 bytes that are 0 or 1. */
static inline uint32_t bits_of(const uint8_t *truths) {
    uint32_t bits = 0;
    for (int n = 0; n < 4; n++) {
        uint64_t eight;
        memcpy(&eight, truths + 8 * n, 8);
        bits |= (uint32_t)(eight * 0x0102040810204080ull >> 56) << (8 * n);
    }
    return bits;
}
#define EACH(mask)                                         \
    for (uint32_t lanes_ = (mask), l = 0; l < 32; l++) \
        if (lanes_ >> l & 1)

/* setp: o[3] is combined with it as `kind` says; o[4] takes the same of the contrary. */
enum { SETP_AND, SETP_OR, SETP_XOR };
static inline void set_predicates(Warp *w, const Instruction *i, uint32_t mask, uint32_t bits) {
    uint32_t with = *predicate(w, i->o[3]) ^ (uint32_t)i->immediate, contrary = ~bits;
    if (i->kind == SETP_AND) bits &= with, contrary &= with;
    else if (i->kind == SETP_OR) bits |= with, contrary |= with;
    else bits ^= with, contrary ^= with;
    put_predicate(w, i->o[0], mask, bits);
    put_predicate(w, i->o[4], mask, contrary);
}
/* Nothing that is rounded moves out of the two. */
static inline void begin_rounding(int mode) {
    fesetround(mode);
    __asm__ volatile("" ::: "memory");
}
static inline void end_rounding(void) {
    __asm__ volatile("" ::: "memory");
    fesetround(FE_TONEAREST);
}
