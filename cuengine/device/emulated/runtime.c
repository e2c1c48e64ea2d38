/* The machine that kernels run on: memory with checks, threads, warps, blocks.

   A warp runs one instruction at a time for all its lanes that are at that place. A register is an array of 32
   lanes in the warp's `file`, a predicate a word with a bit per lane. Where lanes part, those furthest behind run
   first, so that all meet again as soon as they can. What needs several lanes (shuffles, tensor cores, ...) waits
   until they are there, and barriers until all threads are.

   Here is all that knows of memory, other lanes and the flow of control; a function per arithmetic instruction
   comes from instructions.py. State is static: one launch at a time. The structs up to Fault are mirrored in
   runtime.py, Instruction in program.py. In gdb: `break fail`; `p *i` shows the instruction (`i->line` is that of
   the PTX), `p *lanes_u32(w, i->o[1])@32` a register. */
#include <setjmp.h>
#include <stdlib.h>

#include "warp.h"

typedef struct {
    uint64_t base, size;
    uint8_t *shadow; /* one byte per byte: 0 fine, 1 no access, 2 undefined until written */
} Allocation;

typedef struct {
    uint32_t grid[3], block[3];
    uint32_t static_bytes, dynamic_bytes;      /* of shared memory */
    uint32_t local_bytes, file_bytes;          /* of a thread's memory; of a warp's registers */
    uint32_t order, seed;                      /* of blocks and warps: 0 forward, 1 reverse, 2 shuffled */
    const Allocation *allocations;             /* sorted by base */
    uint64_t num_allocations;
    const Instruction *code;                   /* its last one is an exit */
    const uint8_t *constants, *params;
} Launch;

typedef struct {
    int32_t code, pc;
    uint32_t block[3], thread, other;
    uint64_t address, size;
} Fault;

enum { OUTSIDE = 1, NO_ACCESS, UNWRITTEN, MISALIGNED, SHARED_OUTSIDE, SHARED_UNWRITTEN, SHARED_IN_FLIGHT,
       RACE_WRITE, RACE_READ, BARRIER_DIVERGED, WARP_DIVERGED, BAD_LANE, TRAPPED, LOCAL_OUTSIDE, OUT_OF_MEMORY };
enum { READ, WRITE, ATOMIC };

/* Two bytes of shared memory, the finest that is told apart: single bytes are not looked at for races. Stamps grow: what is older than block_stamp was another block's, what is older than
   barrier_stamp lies behind a barrier, and a warp takes a new one at each __syncwarp. */
typedef struct {
    uint32_t write_stamp, read_stamp;
    uint16_t writer, reader;                   /* threads, or one of the two below */
    uint8_t reading_warp, in_flight;
} Half;
#define SEVERAL 0xffff                         /* readers; all of reading_warp, or of more than one: */
#define SEVERAL_WARPS 0xff
#define BY_SEVERAL 0xffff                      /* writers: atomics, or bytes of the two */

static const Launch *L;
static Fault *fault_out;
static jmp_buf fault_jump;
static uint32_t ctaid[3], num_threads, num_warps, shared_bytes;
static uint32_t last_stamp, block_stamp, barrier_stamp;
static uint8_t *shared_memory;
static Half *halves;
static Warp *warps;
static const Allocation *recent;

static __attribute__((noreturn, cold, noinline)) void fail(
    int code, const Warp *w, const Instruction *i, int lane, uint64_t address, uint64_t size, uint32_t other) {
    *fault_out = (Fault){code, i ? (int32_t)(i - L->code) : 0, {ctaid[0], ctaid[1], ctaid[2]},
                         w ? w->index * 32 + (uint32_t)lane : 0, other, address, size};
    longjmp(fault_jump, 1);
}

/* ---- global memory ---- */

static const Allocation *find_allocation(uint64_t address) {
    uint64_t low = 0, high = L->num_allocations;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (L->allocations[middle].base <= address) low = middle + 1;
        else high = middle;
    }
    return low ? &L->allocations[low - 1] : 0;
}
static inline int lies_in(const Allocation *a, uint64_t address, uint32_t size) {
    return a && address - a->base < a->size && a->size - (address - a->base) >= size;
}

/* Whether a byte is not 0. */
static inline int marked(const uint8_t *shadow, uint32_t size) {
    uint64_t a = 0, b = 0;
    if (size == 16) memcpy(&a, shadow, 8), memcpy(&b, shadow + 8, 8);
    else if (size == 8) memcpy(&a, shadow, 8);
    else if (size == 4) memcpy(&a, shadow, 4);
    else if (size == 2) memcpy(&a, shadow, 2);
    else for (uint32_t n = 0; n < size; n++) a |= shadow[n];
    return (a | b) != 0;
}
static __attribute__((noinline)) void heed(uint8_t *shadow, const Warp *w, const Instruction *i, int lane,
                                           uint64_t address, uint32_t size, int how) {
    for (uint32_t n = 0; n < size; n++) {
        if (!shadow[n]) continue;
        if (shadow[n] == 1) fail(NO_ACCESS, w, i, lane, address + n, size, 0);
        if (how != WRITE) fail(UNWRITTEN, w, i, lane, address + n, size, 0);
        shadow[n] = 0;
    }
}
static inline uint8_t *global_at(const Warp *w, const Instruction *i, int lane, uint64_t address, uint32_t size,
                                 int how) {
    if (__builtin_expect(!lies_in(recent, address, size), 0)) {
        const Allocation *a = find_allocation(address);
        if (!lies_in(a, address, size)) fail(OUTSIDE, w, i, lane, address, size, 0);
        recent = a;
    }
    uint8_t *shadow = recent->shadow + (address - recent->base);
    if (__builtin_expect(marked(shadow, size), 0)) heed(shadow, w, i, lane, address, size, how);
    return (uint8_t *)address;
}

/* ---- shared memory ---- */

static inline void shared_check(const Warp *w, const Instruction *i, int lane, uint32_t offset, uint32_t size,
                                int how) {
    if (offset > shared_bytes || size > shared_bytes - offset) fail(SHARED_OUTSIDE, w, i, lane, offset, size, 0);
    uint16_t me = (uint16_t)(w->index * 32 + (uint32_t)lane);
    for (Half *h = halves + offset / 2; h < halves + (offset + size + 1) / 2; h++) {
        int written = h->write_stamp >= block_stamp;
        if (written && h->in_flight) fail(SHARED_IN_FLIGHT, w, i, lane, offset, size, h->writer);
        if (how != WRITE && !written) fail(SHARED_UNWRITTEN, w, i, lane, offset, size, 0);
        /* A race: another thread, no barrier since, and either another warp or no __syncwarp since. */
        if (h->write_stamp >= barrier_stamp && h->writer != me &&
            (h->writer / 32 != w->index || h->write_stamp == w->stamp) &&
            !(how == ATOMIC && h->writer == BY_SEVERAL) && size > 1)
            fail(RACE_WRITE, w, i, lane, offset, size, h->writer);
        if (how != READ) {
            if (h->read_stamp >= barrier_stamp && h->reader != me &&
                (h->reading_warp != w->index || h->read_stamp == w->stamp) && size > 1)
                fail(RACE_READ, w, i, lane, offset, size, h->reader == SEVERAL ? h->reading_warp * 32u : h->reader);
            int shared_half = size == 1 && h->write_stamp >= barrier_stamp && h->writer != me;
            h->write_stamp = w->stamp;
            h->writer = how == ATOMIC || shared_half ? BY_SEVERAL : me;
            h->in_flight = 0;
        } else if (h->read_stamp < barrier_stamp || (h->reading_warp == w->index && h->read_stamp != w->stamp)) {
            h->read_stamp = w->stamp;
            h->reader = me;
            h->reading_warp = (uint8_t)w->index;
        } else if (h->reader != me) {
            h->reader = SEVERAL;
            if (h->reading_warp != w->index) h->reading_warp = SEVERAL_WARPS;
        }
    }
}

static inline uint8_t *shared_at(const Warp *w, const Instruction *i, int lane, uint64_t address, uint32_t size,
                                 int how) {
    if (address > 0xffffffffu) fail(SHARED_OUTSIDE, w, i, lane, address, size, 0);
    shared_check(w, i, lane, (uint32_t)address, size, how);
    return shared_memory + address;
}

static inline uint8_t *local_at(const Warp *w, const Instruction *i, int lane, uint64_t address, uint32_t size,
                                int how) {
    (void)how;
    if (address > L->local_bytes || size > L->local_bytes - address)
        fail(LOCAL_OUTSIDE, w, i, lane, address, size, 0);
    return w->local + (size_t)lane * L->local_bytes + address;
}
static inline uint64_t local_base(const Warp *w, int lane) {
    return (uint64_t)w->local + (uint64_t)lane * L->local_bytes;
}

static inline uint8_t *generic_at(const Warp *w, const Instruction *i, int lane, uint64_t address, uint32_t size,
                                  int how) {
    if (address - (uint64_t)shared_memory < shared_bytes)
        return shared_at(w, i, lane, address - (uint64_t)shared_memory, size, how);
    if (address - local_base(w, lane) < L->local_bytes)
        return local_at(w, i, lane, address - local_base(w, lane), size, how);
    return global_at(w, i, lane, address, size, how);
}

enum { GLOBAL, SHARED, LOCAL, GENERIC };
static inline uint8_t *memory_at(int space, const Warp *w, const Instruction *i, int lane, uint64_t address,
                                 uint32_t size, int how) {
    if (__builtin_expect(address & (size - 1), 0)) fail(MISALIGNED, w, i, lane, address, size, 0);
    return space == GLOBAL   ? global_at(w, i, lane, address, size, how)
           : space == SHARED ? shared_at(w, i, lane, address, size, how)
           : space == LOCAL  ? local_at(w, i, lane, address, size, how)
                             : generic_at(w, i, lane, address, size, how);
}

/* size: the space. */
static __attribute__((noinline)) uint8_t *atomic_at(const Warp *w, const Instruction *i, int lane, uint64_t address,
                                                    uint32_t size) {
    return memory_at((int)i->size, w, i, lane, address, size, ATOMIC);
}

/* The lanes' addresses: a register of 4 or 8 bytes a lane, and a displacement. */
static inline void get_addresses(const Warp *w, uint32_t o, int wide, int64_t displacement, uint64_t *a) {
    const uint32_t *narrow_ = place(w, o);
    const uint64_t *wide_ = place(w, o);
    if (wide) LANES(32) a[l] = wide_[l] + (uint64_t)displacement;
    else LANES(32) a[l] = (uint32_t)(narrow_[l] + (uint32_t)displacement);
}

/* ld, st. o: the values, then the address at o[8]; kind: bit 0, the address has 8 bytes; bit 1, sign extension. */
static inline __attribute__((always_inline)) void load_from(
    int space, uint32_t size, uint32_t width, uint32_t count, Warp *w, const Instruction *i, uint32_t mask) {
    uint64_t a[32];
    uint8_t *d[4];
    get_addresses(w, i->o[8], i->kind & 1, i->immediate, a);
    for (uint32_t n = 0; n < count; n++) d[n] = place(w, i->o[n]);
    EACH(mask) {
        const uint8_t *p = memory_at(space, w, i, (int)l, a[l], size * count, READ);
        for (uint32_t n = 0; n < count; n++, p += size) {
            if (size == width) {
                memcpy(d[n] + l * width, p, size);
                continue;
            }
            uint64_t x = 0;
            memcpy(&x, p, size);
            if (i->kind & 2) x = (uint64_t)((int64_t)(x << (64 - 8 * size)) >> (64 - 8 * size));
            memcpy(d[n] + l * width, &x, width);
        }
    }
}
static inline __attribute__((always_inline)) void store_to(
    int space, uint32_t size, uint32_t width, uint32_t count, Warp *w, const Instruction *i, uint32_t mask) {
    uint64_t a[32];
    const uint8_t *s[4];
    get_addresses(w, i->o[8], i->kind & 1, i->immediate, a);
    for (uint32_t n = 0; n < count; n++) s[n] = place(w, i->o[n]);
    EACH(mask) {
        uint8_t *p = memory_at(space, w, i, (int)l, a[l], size * count, WRITE);
        for (uint32_t n = 0; n < count; n++) memcpy(p + n * size, s[n] + l * width, size);
    }
}
/* The usual shapes as code of their own, the others by their numbers. */
#define MEMORY(space, SPACE)                                                                                         \
    void ld_##space(Warp *w, const Instruction *i, uint32_t mask) {                                           \
        if (i->size == 4 && i->width == 4 && i->count == 1) load_from(SPACE, 4, 4, 1, w, i, mask);                   \
        else if (i->size == 4 && i->width == 4 && i->count == 4) load_from(SPACE, 4, 4, 4, w, i, mask);              \
        else if (i->size == 8 && i->width == 8 && i->count == 1) load_from(SPACE, 8, 8, 1, w, i, mask);              \
        else load_from(SPACE, i->size, i->width, i->count, w, i, mask);                                              \
    }                                                                                                                \
    void st_##space(Warp *w, const Instruction *i, uint32_t mask) {                                           \
        if (i->size == 4 && i->width == 4 && i->count == 1) store_to(SPACE, 4, 4, 1, w, i, mask);                    \
        else if (i->size == 4 && i->width == 4 && i->count == 4) store_to(SPACE, 4, 4, 4, w, i, mask);               \
        else store_to(SPACE, i->size, i->width, i->count, w, i, mask);                                               \
    }
MEMORY(global, GLOBAL)
MEMORY(shared, SHARED)
MEMORY(local, LOCAL)
MEMORY(generic, GENERIC)

/* immediate: offset in the parameters. */
void ld_param(Warp *w, const Instruction *i, uint32_t mask) {
    for (uint32_t n = 0; n < i->count; n++) {
        uint64_t x = 0;
        memcpy(&x, L->params + i->immediate + n * i->size, i->size);
        if (i->kind & 2) x = (uint64_t)((int64_t)(x << (64 - 8 * i->size)) >> (64 - 8 * i->size));
        uint8_t *d = place(w, i->o[n]);
        EACH(mask) memcpy(d + l * i->width, &x, i->width);
    }
}

/* cvta of shared and local memory. immediate: 1 from the window to generic, -1 back. */
void cvta_shared(Warp *w, const Instruction *i, uint32_t mask) {
    uint64_t *d = place(w, i->o[0]), *a = place(w, i->o[1]);
    EACH(mask) d[l] = a[l] + (uint64_t)i->immediate * (uint64_t)shared_memory;
}
void cvta_local(Warp *w, const Instruction *i, uint32_t mask) {
    uint64_t *d = place(w, i->o[0]), *a = place(w, i->o[1]);
    EACH(mask) d[l] = a[l] + (uint64_t)i->immediate * local_base(w, (int)l);
}
/* kind: GLOBAL, SHARED or LOCAL. */
void isspacep(Warp *w, const Instruction *i, uint32_t mask) {
    const uint64_t *a = place(w, i->o[1]);
    uint32_t bits = 0;
    EACH(mask) {
        uint32_t space = a[l] - (uint64_t)shared_memory < shared_bytes         ? SHARED
                         : a[l] - local_base(w, (int)l) < L->local_bytes ? LOCAL
                                                                         : GLOBAL;
        bits |= (uint32_t)(space == i->kind) << l;
    }
    put_predicate(w, i->o[0], mask, bits);
}

/* ---- cp.async: what a lane copies lands when it waits for it ---- */

/* o: target, source, bytes to take. size: bytes to fill, the rest with zeros; kind: the target's address has 8. */
void cp_async(Warp *w, const Instruction *i, uint32_t mask) {
    uint64_t to[32];
    get_addresses(w, i->o[0], (int)i->kind, i->immediate, to);
    const uint64_t *from = place(w, i->o[1]);
    const uint32_t *bytes = place(w, i->o[2]);
    EACH(mask) {
        memory_at(SHARED, w, i, (int)l, to[l], i->size, WRITE);
        uint64_t source = from[l] + (uint64_t)(int64_t)(int32_t)i->count;
        if (source & (i->size - 1)) fail(MISALIGNED, w, i, (int)l, source, i->size, 0);
        if (w->num_copies == w->room) {
            uint32_t room = w->room ? 2 * w->room : 256;
            Copy *more = realloc(w->copies, room * sizeof(Copy));
            if (!more) fail(OUT_OF_MEMORY, w, i, (int)l, 0, 0, 0);
            w->copies = more;
            w->room = room;
        }
        Copy *c = &w->copies[w->num_copies++];
        *c = (Copy){l, (uint32_t)to[l], i->size, w->group[l], i, {0}};
        uint32_t taken = bytes[l] < i->size ? bytes[l] : i->size;
        if (taken) memcpy(c->data, global_at(w, i, (int)l, source, taken, READ), taken);
        for (uint32_t n = 0; n < i->size / 2; n++) halves[to[l] / 2 + n].in_flight = 1;
    }
}
void cp_async_commit_group(Warp *w, const Instruction *i, uint32_t mask) {
    (void)i;
    EACH(mask) w->group[l]++;
}
/* immediate: the groups that may stay on their way. */
void cp_async_wait_group(Warp *w, const Instruction *i, uint32_t mask) {
    uint32_t left = 0;
    for (uint32_t n = 0; n < w->num_copies; n++) {
        Copy *c = &w->copies[n];
        if (!(mask >> c->lane & 1) || c->group + (uint64_t)i->immediate >= w->group[c->lane]) {
            w->copies[left++] = *c;
            continue;
        }
        for (uint32_t j = 0; j < c->size / 2; j++) halves[c->destination / 2 + j].in_flight = 0;
        shared_check(w, c->i, (int)c->lane, c->destination, c->size, WRITE);
        memcpy(shared_memory + c->destination, c->data, c->size);
    }
    w->num_copies = left;
}
void cp_async_wait_all(Warp *w, const Instruction *i, uint32_t mask) {
    cp_async_commit_group(w, i, mask);
    cp_async_wait_group(w, i, mask);
}

/* ---- control ---- */

void nop(Warp *w, const Instruction *i, uint32_t mask) { (void)w, (void)i, (void)mask; }
void trap(Warp *w, const Instruction *i, uint32_t mask) { fail(TRAPPED, w, i, __builtin_ctz(mask), 0, 0, 0); }

static void leave_at(Warp *w, uint32_t lanes, int32_t pc) {
    EACH(lanes) w->lane_pc[l] = pc;
}
void bra(Warp *w, const Instruction *i, uint32_t mask) {
    if (mask == w->active) {
        w->pc = (int32_t)i->immediate;
        return;
    }
    leave_at(w, mask, (int32_t)i->immediate);
    leave_at(w, w->active & ~mask, w->pc);
    w->active = 0;
}
/* o: index, then a place whose lanes are the targets; count of them. */
void brx_idx(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *index = place(w, i->o[0]), *targets = place(w, i->o[1]);
    leave_at(w, w->active & ~mask, w->pc);
    EACH(mask) {
        if (index[l] >= i->count) fail(TRAPPED, w, i, (int)l, 0, 0, 0);
        w->lane_pc[l] = (int32_t)targets[index[l]];
    }
    w->active = 0;
}
void exit_(Warp *w, const Instruction *i, uint32_t mask) {
    (void)i;
    w->ready &= ~mask;
    w->active &= ~mask;
}
void activemask(Warp *w, const Instruction *i, uint32_t mask) {
    uint32_t *d = place(w, i->o[0]);
    EACH(mask) d[l] = w->active;
}

/* ---- barriers. kind: see below; o: result, id, count, value ---- */

enum { BAR_SYNC, BAR_POPC, BAR_AND, BAR_OR };

void bar(Warp *w, const Instruction *i, uint32_t mask) {
    uint32_t lane = (uint32_t)__builtin_ctz(mask);
    uint32_t id = lanes_u32(w, i->o[1])[lane], count = lanes_u32(w, i->o[2])[lane];
    EACH(mask) if (lanes_u32(w, i->o[1])[l] != id) fail(BARRIER_DIVERGED, w, i, (int)l, 0, 0, w->index * 32 + lane);
    /* Lanes of one warp must come to one and the same barrier. */
    if (w->at_barrier && (w->barrier != i || w->barrier_id != id))
        fail(BARRIER_DIVERGED, w, i, (int)lane, 0, 0, w->index * 32 + (uint32_t)__builtin_ctz(w->at_barrier));
    if (!w->at_barrier) w->barrier_value = 0;
    w->barrier = i;
    w->barrier_id = id;
    w->barrier_count = count;
    w->barrier_value |= (*predicate(w, i->o[3]) ^ (uint32_t)i->immediate) & mask;
    leave_at(w, mask, w->pc);
    w->at_barrier |= mask;
    w->ready &= ~mask;
    w->active &= ~mask;
}

static int open_barriers(void) {
    int opened = 0;
    for (uint32_t n = 0; n < num_warps; n++) {
        if (!warps[n].at_barrier) continue;
        uint32_t id = warps[n].barrier_id, there = 0, true_there = 0;
        uint32_t wanted = warps[n].barrier_count ? warps[n].barrier_count : num_threads;
        for (uint32_t m = 0; m < num_warps; m++)
            if (warps[m].at_barrier && warps[m].barrier_id == id) {
                there += (uint32_t)__builtin_popcount(warps[m].at_barrier);
                true_there += (uint32_t)__builtin_popcount(warps[m].barrier_value);
            }
        if (there != wanted) continue;
        for (uint32_t m = 0; m < num_warps; m++) {
            Warp *w = &warps[m];
            if (!w->at_barrier || w->barrier_id != id) continue;
            uint32_t kind = w->barrier->kind, o = w->barrier->o[0], lanes = w->at_barrier;
            if (kind == BAR_POPC) EACH(lanes) lanes_u32(w, o)[l] = true_there;
            if (kind == BAR_AND) put_predicate(w, o, lanes, true_there == there ? EVERY : 0);
            if (kind == BAR_OR) put_predicate(w, o, lanes, true_there ? EVERY : 0);
            w->ready |= lanes;
            w->at_barrier = 0;
        }
        opened = 1;
    }
    if (opened) {
        barrier_stamp = ++last_stamp;
        for (uint32_t n = 0; n < num_warps; n++) warps[n].stamp = ++last_stamp;
    }
    return opened;
}

/* ---- what lanes do together ---- */

/* The lanes that i needs, if those in `group`, which are there, are the last of them; else 0, and these wait. */
static uint32_t meet(Warp *w, const Instruction *i, uint32_t group, uint32_t needed) {
    uint32_t here = group, lane = (uint32_t)__builtin_ctz(group);
    needed &= w->exists;
    if (!(needed & group)) fail(BAD_LANE, w, i, (int)lane, needed, 0, lane);
    if ((here & needed) != needed) {
        EACH(w->waiting) if (w->lane_pc[l] == w->pc - 1 && w->needed[l] == needed) here |= 1u << l;
        uint32_t gone = needed & ~here & ~(w->ready | w->waiting);
        if (gone) fail(WARP_DIVERGED, w, i, (int)lane, needed, 0, w->index * 32 + (uint32_t)__builtin_ctz(gone));
    }
    if ((here & needed) == needed) {
        w->waiting &= ~needed;
        w->ready |= needed;
        w->active |= needed;
        return needed;
    }
    leave_at(w, group, w->pc - 1);
    EACH(group) w->needed[l] = needed;
    w->waiting |= group;
    w->ready &= ~group;
    w->active &= ~group;
    return 0;
}

/* Takes lanes with one member mask out of *todo; those of the mask if they are all there now, else 0. */
static uint32_t next_group(Warp *w, const Instruction *i, const uint32_t *masks, uint32_t *todo) {
    uint32_t needed = masks[__builtin_ctz(*todo)], group = 0;
    EACH(*todo) group |= (uint32_t)(masks[l] == needed) << l;
    if (group & ~needed)
        fail(BAD_LANE, w, i, __builtin_ctz(group & ~needed), needed, 0, (uint32_t)__builtin_ctz(group & ~needed));
    *todo &= ~group;
    return meet(w, i, group, needed);
}
#define TOGETHER(masks)                                                                              \
    for (uint32_t todo_ = mask, members; todo_ && (members = next_group(w, i, masks, &todo_), 1);)   \
        if (members)

void bar_warp_sync(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *masks = place(w, i->o[0]);
    TOGETHER(masks) w->stamp = ++last_stamp;
}

/* o: result, value, lane or distance, clamp and segment, members; then the predicate that it was in range. */
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };
void shfl(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *value = place(w, i->o[1]), *bs = place(w, i->o[2]), *cs = place(w, i->o[3]);
    const uint32_t *masks = place(w, i->o[4]);
    uint32_t *d = place(w, i->o[0]);
    TOGETHER(masks) {
        uint32_t result[32], from[32], in_range = 0;
        uint8_t valid[32];
        LANES(32) {
            uint32_t lane = (uint32_t)l, b = bs[l] & 31, clamp = cs[l] & 31, segment = cs[l] >> 8 & 31;
            uint32_t low = lane & segment, high = low | (clamp & ~segment);
            int32_t at = i->kind == SHFL_UP     ? (int32_t)(lane - b)
                         : i->kind == SHFL_DOWN ? (int32_t)(lane + b)
                         : i->kind == SHFL_BFLY ? (int32_t)(lane ^ b)
                                                : (int32_t)(low | (b & ~segment));
            valid[l] = i->kind == SHFL_UP ? at >= (int32_t)high : at <= (int32_t)high;
            from[l] = valid[l] ? (uint32_t)at : lane;
        }
        EACH(members) {
            if (!(members >> from[l] & 1)) fail(BAD_LANE, w, i, (int)l, members, 0, from[l]);
            result[l] = value[from[l]];
        }
        in_range = bits_of(valid);
        EACH(members) d[l] = result[l];
        put_predicate(w, i->o[5], members, in_range);
    }
}

/* o: result, predicate, members. immediate: what the predicate is XORed with. */
enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };
void vote(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *masks = place(w, i->o[2]);
    TOGETHER(masks) {
        uint32_t yes = (*predicate(w, i->o[1]) ^ (uint32_t)i->immediate) & members;
        if (i->kind == VOTE_BALLOT) {
            uint32_t *d = place(w, i->o[0]);
            EACH(members) d[l] = yes;
        } else {
            int truth = i->kind == VOTE_ALL ? yes == members : i->kind == VOTE_ANY ? yes != 0 : !yes || yes == members;
            put_predicate(w, i->o[0], members, truth ? EVERY : 0);
        }
    }
}

/* o: result, value, members, predicate; size: bytes of the value; kind: 0 any, 1 all. */
void match(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *masks = place(w, i->o[2]), *narrow_ = place(w, i->o[1]);
    const uint64_t *wide_ = place(w, i->o[1]);
    uint32_t *d = place(w, i->o[0]);
    TOGETHER(masks) {
        uint64_t values[32];
        uint32_t result[32];
        EACH(members) values[l] = i->size == 8 ? wide_[l] : narrow_[l];
        EACH(members) {
            uint32_t same = 0;
            for (uint32_t j = 0; j < 32; j++)
                if (members >> j & 1 && values[j] == values[l]) same |= 1u << j;
            result[l] = i->kind && same != members ? 0 : same;
        }
        EACH(members) d[l] = result[l];
        if (i->kind) put_predicate(w, i->o[3], members, result[__builtin_ctz(members)] ? EVERY : 0);
    }
}

/* o: result, value, members. */
enum { REDUX_ADD, REDUX_AND, REDUX_OR, REDUX_XOR, REDUX_MIN_U, REDUX_MAX_U, REDUX_MIN_S, REDUX_MAX_S };
void redux(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *value = place(w, i->o[1]), *masks = place(w, i->o[2]);
    uint32_t *d = place(w, i->o[0]);
    TOGETHER(masks) {
        uint32_t r = value[__builtin_ctz(members)];
        EACH(members & (members - 1)) {
            uint32_t x = value[l];
            switch (i->kind) {
            case REDUX_ADD: r += x; break;
            case REDUX_AND: r &= x; break;
            case REDUX_OR: r |= x; break;
            case REDUX_XOR: r ^= x; break;
            case REDUX_MIN_U: r = x < r ? x : r; break;
            case REDUX_MAX_U: r = x > r ? x : r; break;
            case REDUX_MIN_S: r = (int32_t)x < (int32_t)r ? x : r; break;
            default: r = (int32_t)x > (int32_t)r ? x : r; break;
            }
        }
        EACH(members) d[l] = r;
    }
}

/* o: result or _, predicate, members: the lowest of them is elected. */
void elect(Warp *w, const Instruction *i, uint32_t mask) {
    const uint32_t *masks = place(w, i->o[2]);
    uint32_t *d = place(w, i->o[0]);
    TOGETHER(masks) {
        uint32_t first = (uint32_t)__builtin_ctz(members);
        EACH(members) d[l] = first;
        put_predicate(w, i->o[1], members, 1u << first);
    }
}

/* The lanes' words of an 8 x 8 matrix of 16-bit elements are its rows, one behind the other. */
static void transpose(uint16_t *to, const uint16_t *from) {
    for (int row = 0; row < 8; row++)
        for (int column = 0; column < 8; column++) to[8 * row + column] = from[8 * column + row];
}

/* ldmatrix, stmatrix. o: matrices, then the address at o[8]; kind: bit 0, it has 8 bytes; bit 1: transposed. */
void ldmatrix(Warp *w, const Instruction *i, uint32_t mask) {
    if (!meet(w, i, mask, EVERY)) return;
    uint64_t a[32];
    uint16_t tile[4][64];
    get_addresses(w, i->o[8], i->kind & 1, i->immediate, a);
    for (uint32_t l = 0; l < 8 * i->count; l++)
        memcpy(&tile[l / 8][l % 8 * 8], memory_at(SHARED, w, i, (int)l, a[l], 16, READ), 16);
    for (uint32_t m = 0; m < i->count; m++) {
        if (i->kind & 2) transpose(place(w, i->o[m]), tile[m]);
        else memcpy(place(w, i->o[m]), tile[m], 128);
    }
}
void stmatrix(Warp *w, const Instruction *i, uint32_t mask) {
    if (!meet(w, i, mask, EVERY)) return;
    uint64_t a[32];
    get_addresses(w, i->o[8], i->kind & 1, i->immediate, a);
    for (uint32_t m = 0; m < i->count; m++) {
        uint16_t tile[64];
        if (i->kind & 2) transpose(tile, place(w, i->o[m]));
        else memcpy(tile, place(w, i->o[m]), 128);
        for (uint32_t l = 8 * m; l < 8 * m + 8; l++)
            memcpy(memory_at(SHARED, w, i, (int)l, a[l], 16, WRITE), &tile[l % 8 * 8], 16);
    }
}
void movmatrix(Warp *w, const Instruction *i, uint32_t mask) {
    if (!meet(w, i, mask, EVERY)) return;
    uint16_t tile[64];
    memcpy(tile, place(w, i->o[1]), 128);
    transpose(place(w, i->o[0]), tile);
}

/* mma m16n8: D = A B + C, D and C float32. width: the depth k; kind: the format of A and B.
   o: D, A, B, C. PTX ISA, 9.7.14.5: lane 4 g + t has row g of A and column g of B, elements 2 t and 2 t + 1 of 16
   bits or element t of 32, so that a register is 8 rows of 16 bytes, of A or of B transposed. */
enum { MMA_BF16, MMA_F16, MMA_TF32 };
typedef float Row __attribute__((vector_size(32))); /* of 8 */

static inline __attribute__((always_inline)) void mma_fragment(float *rows, const Warp *w, uint32_t o, int kind) {
    const uint16_t *halves_ = place(w, o);
    const uint32_t *words = place(w, o);
    for (int row = 0; row < 8; row++, rows += 16) {
        if (kind == MMA_TF32) for (int n = 0; n < 4; n++) rows[n] = f32_of(words[4 * row + n] & 0xffffe000u);
        else if (kind == MMA_BF16) for (int n = 0; n < 8; n++) rows[n] = bf16_of(halves_[8 * row + n]);
        else for (int n = 0; n < 8; n++) rows[n] = f16_of(halves_[8 * row + n]);
    }
}
static inline __attribute__((always_inline)) void multiply(const Warp *w, const Instruction *i, int kind, int depth) {
    float a[16][16], transposed_b[8][16];
    Row b[16], c[16];
    const int across = kind == MMA_TF32 ? 4 : 8, parts = depth / across;
    uint32_t o = 4;
    for (int part = 0; part < parts; part++)
        for (int half = 0; half < 2; half++) mma_fragment(&a[8 * half][across * part], w, i->o[o++], kind);
    for (int part = 0; part < parts; part++) mma_fragment(&transposed_b[0][across * part], w, i->o[o++], kind);
    for (int k = 0; k < depth; k++)
        for (int n = 0; n < 8; n++) b[k][n] = transposed_b[n][k];
    for (int half = 0; half < 2; half++) {
        const float *even = place(w, i->o[o + 2 * (uint32_t)half]), *odd = place(w, i->o[o + 2 * (uint32_t)half + 1]);
        for (int l = 0; l < 32; l++) {
            c[l / 4 + 8 * half][l % 4 * 2] = even[l];
            c[l / 4 + 8 * half][l % 4 * 2 + 1] = odd[l];
        }
    }
    for (int row = 0; row < 16; row += 4) { /* four sums at a time, as each waits for itself */
        Row c0 = c[row], c1 = c[row + 1], c2 = c[row + 2], c3 = c[row + 3];
        for (int k = 0; k < depth; k++) {
            c0 += a[row][k] * b[k];
            c1 += a[row + 1][k] * b[k];
            c2 += a[row + 2][k] * b[k];
            c3 += a[row + 3][k] * b[k];
        }
        c[row] = c0, c[row + 1] = c1, c[row + 2] = c2, c[row + 3] = c3;
    }
    for (int half = 0; half < 2; half++) {
        float *even = place(w, i->o[2 * half]), *odd = place(w, i->o[2 * half + 1]);
        for (int l = 0; l < 32; l++) {
            even[l] = c[l / 4 + 8 * half][l % 4 * 2];
            odd[l] = c[l / 4 + 8 * half][l % 4 * 2 + 1];
        }
    }
}
void mma(Warp *w, const Instruction *i, uint32_t mask) {
    if (!meet(w, i, mask, EVERY)) return;
    if (i->kind == MMA_BF16 && i->width == 16) multiply(w, i, MMA_BF16, 16);
    else if (i->kind == MMA_F16 && i->width == 16) multiply(w, i, MMA_F16, 16);
    else multiply(w, i, (int)i->kind, (int)i->width);
}

/* ---- running ---- */

/* The lanes furthest behind become the active ones. */
static int choose(Warp *w) {
    int32_t least = INT32_MAX, next = INT32_MAX;
    uint32_t lanes = 0;
    EACH(w->ready) {
        int32_t pc = w->lane_pc[l];
        if (pc < least) next = least, least = pc, lanes = 0;
        else if (pc > least && pc < next) next = pc;
        if (pc == least) lanes |= 1u << l;
    }
    w->active = lanes;
    w->pc = least;
    w->merge_at = next;
    return lanes != 0;
}

static void run_warp(Warp *w) {
    while (choose(w)) {
        while (w->active && w->pc < w->merge_at) {
            const Instruction *i = &L->code[w->pc++];
            uint32_t mask = w->active & (*predicate(w, i->guard) ^ i->negated);
            if (mask) i->run(w, i, mask);
        }
        leave_at(w, w->active, w->pc);
    }
    if (w->waiting) {
        uint32_t lane = (uint32_t)__builtin_ctz(w->waiting);
        uint32_t missing = w->needed[lane] & ~(1u << lane);
        EACH(w->waiting) if (w->lane_pc[l] == w->lane_pc[lane]) missing &= ~(1u << l);
        fail(WARP_DIVERGED, w, &L->code[w->lane_pc[lane]], (int)lane, w->needed[lane], 0,
             w->index * 32 + (missing ? (uint32_t)__builtin_ctz(missing) : lane));
    }
}

/* Position n of `count` in the launch's order; `seed` differs from turn to turn. */
static uint32_t ordered(uint32_t n, uint32_t count, uint32_t seed) {
    if (L->order == 0) return n;
    if (L->order == 1) return count - 1 - n;
    uint32_t step = seed % count | 1;
    for (;;) { /* a step that shares no factor with count reaches all */
        uint32_t a = step, b = count;
        while (b) {
            uint32_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) break;
        step += 2;
    }
    return (uint32_t)(((uint64_t)n * step + seed / 7) % count);
}

static void run_block(uint32_t *seed) {
    block_stamp = barrier_stamp = ++last_stamp;
    for (uint32_t n = 0; n < num_warps; n++) {
        Warp *w = &warps[n];
        w->ready = w->exists;
        w->active = w->waiting = w->at_barrier = w->num_copies = w->carry = 0;
        w->stamp = ++last_stamp;
        memset(w->lane_pc, 0, sizeof w->lane_pc);
        memset(w->group, 0, sizeof w->group);
        for (int axis = 0; axis < 3; axis++) {
            uint32_t *place_ = lanes_u32(w, (uint32_t)(CTAID + axis) * 128);
            LANES(32) place_[l] = ctaid[axis];
        }
    }
    do {
        *seed = *seed * 1664525u + 1013904223u;
        for (uint32_t n = 0; n < num_warps; n++) run_warp(&warps[ordered(n, num_warps, *seed >> 8)]);
    } while (open_barriers());
    for (uint32_t n = 0; n < num_warps; n++) {
        Warp *w = &warps[n];
        if (!w->at_barrier) continue;
        uint32_t other = 0;
        while (other < num_threads && warps[other / 32].at_barrier >> (other % 32) & 1) other++;
        fail(BARRIER_DIVERGED, w, w->barrier, __builtin_ctz(w->at_barrier), 0, 0, other);
    }
}

/* Memory that launches reuse: grown when one needs more, never given back. */
static int grow(void **memory, size_t *have, size_t want) {
    if (want <= *have) return 1;
    free(*memory);
    *have = 0;
    *memory = aligned_alloc(1024, (want + 1023) / 1024 * 1024);
    if (!*memory) return 0;
    memset(*memory, 0, want);
    *have = want;
    return 1;
}

static int set_up(void) {
    static size_t have_shared, have_halves, have_files, have_local;
    static void *files, *local;
    static uint32_t have_warps;
    size_t local_bytes = (size_t)L->local_bytes * 32, file_bytes = L->file_bytes;
    if (!grow((void **)&shared_memory, &have_shared, shared_bytes + 16) ||
        !grow((void **)&halves, &have_halves, (shared_bytes / 2 + 16) * sizeof(Half)) ||
        !grow(&files, &have_files, num_warps * file_bytes) || !grow(&local, &have_local, num_warps * local_bytes + 16))
        return 0;
    if (num_warps > have_warps) {
        Warp *more = aligned_alloc(64, num_warps * sizeof(Warp));
        if (!more) return 0;
        memset(more, 0, num_warps * sizeof(Warp));
        if (have_warps) memcpy(more, warps, have_warps * sizeof(Warp)); /* for their `copies` */
        free(warps);
        warps = more;
        have_warps = num_warps;
    }
    if (last_stamp > 1u << 31) {
        memset(halves, 0, have_halves);
        last_stamp = 0;
    }
    for (uint32_t n = 0; n < num_warps; n++) {
        Warp *w = &warps[n];
        uint32_t here = num_threads - 32 * n < 32 ? num_threads - 32 * n : 32;
        w->index = n;
        w->exists = here == 32 ? EVERY : (1u << here) - 1;
        w->bases[0] = (uint8_t *)files + n * file_bytes;
        w->bases[1] = (uint8_t *)L->constants;
        w->local = (uint8_t *)local + n * local_bytes;
        uint32_t(*special)[32] = place(w, 0);
        for (uint32_t l = 0; l < 32; l++) {
            uint32_t t = 32 * n + l;
            special[TID][l] = t % L->block[0];
            special[TID + 1][l] = t / L->block[0] % L->block[1];
            special[TID + 2][l] = t / (L->block[0] * L->block[1]);
            for (int axis = 0; axis < 3; axis++) {
                special[NTID + axis][l] = L->block[axis];
                special[NCTAID + axis][l] = L->grid[axis];
            }
            special[LANEID][l] = l;
            special[WARPID][l] = n;
            special[NWARPID][l] = num_warps;
            special[LANEMASK_EQ][l] = 1u << l;
            special[LANEMASK_LT][l] = (1u << l) - 1;
            special[LANEMASK_LE][l] = (2u << l) - 1;
            special[LANEMASK_GT][l] = ~((2u << l) - 1);
            special[LANEMASK_GE][l] = ~((1u << l) - 1);
            special[DYNAMIC_BYTES][l] = L->dynamic_bytes;
            special[TOTAL_BYTES][l] = shared_bytes;
        }
    }
    return 1;
}

/* 0, or 1 with what went wrong in *fault. */
int launch(const Launch *what, Fault *fault) {
    L = what;
    fault_out = fault;
    recent = 0;
    num_threads = L->block[0] * L->block[1] * L->block[2];
    num_warps = (num_threads + 31) / 32;
    shared_bytes = L->static_bytes + L->dynamic_bytes;
    if (!set_up()) {
        fault->code = OUT_OF_MEMORY;
        return 1;
    }
    if (setjmp(fault_jump)) {
        fesetround(FE_TONEAREST);
        return 1;
    }
    uint32_t seed = L->seed, num_blocks = L->grid[0] * L->grid[1] * L->grid[2];
    for (uint32_t n = 0; n < num_blocks; n++) {
        uint32_t block = ordered(n, num_blocks, L->seed * 2654435761u >> 8);
        ctaid[0] = block % L->grid[0];
        ctaid[1] = block / L->grid[0] % L->grid[1];
        ctaid[2] = block / (L->grid[0] * L->grid[1]);
        run_block(&seed);
    }
    return 0;
}
