// CUDA's model of execution on one core of the CPU, so that a kernel runs, and can be wrong, without a GPU.
//
// Blocks run one after another. The threads of a block are fibres: one runs until it waits, for its block or for the
// lanes of its warp, and then the next one that can go on. Blocks with an even index start with thread 0, the others
// with the last thread, so that a barrier that is missing shows as a wrong result in one of the two.
//
// Stricter than a GPU, to name mistakes instead of living with them:
// - a thread that returns while others wait for it is an error, and so are lanes that meet in different operations;
// - shared memory holds 0xff bytes (NaN, -1) when a block starts, and what was written past its dynamic part is seen;
// - bad addresses, misaligned vectors, indices past an array's end and shifts by too much end the launch (simt.py asks
//   the compiler to trap them);
// - with SIMT_RACES, accesses to memory that nothing orders end it, too: races.cpp says which.
// Not here: y and z of an index, __activemask, spinning without __nanosleep on what another thread of the block writes.

#pragma once

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Not `__shared__`: simt.py rewrites declarations with it, to places in dynamic_shared and static_shared.

// races.cpp has these. What is atomic must not be seen as an ordinary access first.
#ifdef SIMT_RACES
#define SIMT_UNSEEN __attribute__((no_sanitize_thread, noinline))
extern "C" {
extern int simt_running;
void simt_races_begin(unsigned, const void*, size_t, const void*, size_t, const void*, size_t);
void simt_races_end();
void simt_races_block(unsigned);
void simt_races_barrier();
void simt_races_warp(unsigned, unsigned);
void simt_races_atomic(const void*, size_t, const void* from);
}
#else
#define SIMT_UNSEEN
inline int simt_running;
inline void simt_races_begin(unsigned, const void*, size_t, const void*, size_t, const void*, size_t) {}
inline void simt_races_end() {}
inline void simt_races_block(unsigned) {}
inline void simt_races_barrier() {}
inline void simt_races_warp(unsigned, unsigned) {}
inline void simt_races_atomic(const void*, size_t, const void*) {}
#endif

struct uint3 { unsigned x, y, z; };
using dim3 = uint3;
constexpr int warpSize = 32;

namespace simt {

constexpr unsigned MAX_THREADS = 1024, MAX_SHARED = 227 * 1024, MAX_STATIC = 48 * 1024, GUARD = 1024;
constexpr size_t STACK = 128 * 1024, PAGE = 4096;
constexpr unsigned long SPINS = 1ul << 24;  // rounds of yielding without any other progress

// The result of a warp's operation for one lane, from what all lanes of the mask gave and the lane's own operand.
using Resolve = uint64_t (*)(const uint64_t* values, unsigned mask, unsigned lane, unsigned operand);
enum Status { READY, IN_BLOCK, IN_WARP, DONE };

struct Warp {
    unsigned existing;  // the last warp of a block may have fewer than 32 lanes
    uint64_t values[32];
};

struct Fibre {
    ucontext_t start;
    jmp_buf state;
    bool started;
    Status status;
    uint3 thread;
    Warp* warp;
    const char* operation;  // what it waits in
    Resolve resolve;
    unsigned mask, operand;
    uint64_t result;
};

// External linkage, and reached through calls only: no value may be kept in a register while other fibres run.
inline Fibre fibres[MAX_THREADS];
inline Warp warps[MAX_THREADS / 32];
inline Fibre* current;
inline uint3 block, blocks, threads;
inline unsigned waiting_in_block, static_nbytes;
inline unsigned long spins;
inline jmp_buf scheduler;
inline unsigned char* stacks;
inline char message[512];
inline void (*run_kernel)();
alignas(1024) inline unsigned char dynamic_shared[MAX_SHARED + GUARD];
alignas(1024) inline unsigned char static_shared[MAX_STATIC];

__attribute__((noinline)) inline void suspend() {
    if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

[[noreturn]] inline void fail(const char* format, ...) {
    int used = snprintf(message, sizeof message, "block %u, thread %u: ", block.x, current->thread.x);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, sizeof message - used, format, arguments);
    va_end(arguments);
    _longjmp(scheduler, 1);
}

inline void enter() {
    run_kernel();
    current->status = DONE;
    spins = 0;
    _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume() {
    if (_setjmp(scheduler)) return;
    if (current->started) _longjmp(current->state, 1);
    current->started = true;
    setcontext(&current->start);
}

inline void wait_for_block() {
    if (++waiting_in_block < threads.x) {
        current->status = IN_BLOCK;
        current->operation = "__syncthreads";
        return suspend();
    }
    for (unsigned i = 0; i < threads.x; i++) fibres[i].status = READY;
    simt_races_barrier();
    waiting_in_block = 0;
    spins = 0;
}

inline void yield() {
    if (++spins > SPINS) fail("spins: nothing but __nanosleep happened for a long time");
    suspend();
}

inline bool in_warp_with(const Fibre& fibre, unsigned mask) { return fibre.status == IN_WARP && fibre.mask == mask; }

// Waits for the lanes of the mask. The last one to come works out the results of all. `orders`: what lanes have done to
// memory before comes before what any of them does after.
inline uint64_t meet(const char* operation, unsigned mask, uint64_t value, unsigned operand, Resolve resolve,
                     bool orders = false) {
    Fibre* self = current;
    Warp* warp = self->warp;
    unsigned lane = self->thread.x % 32;
    mask &= warp->existing;
    if (!(mask >> lane & 1)) fail("calls %s with mask 0x%08x, which leaves out its lane %u", operation, mask, lane);
    self->operation = operation;
    self->resolve = resolve;
    self->mask = mask;
    self->operand = operand;
    self->status = IN_WARP;
    warp->values[lane] = value;
    Fibre* lanes = self - lane;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        if (in_warp_with(lanes[__builtin_ctz(rest)], mask)) continue;
        suspend();
        return self->result;
    }
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        Fibre& other = lanes[__builtin_ctz(rest)];
        if (other.resolve != resolve)
            fail("meets thread %u of its warp, which is in %s, in %s", other.thread.x, other.operation, operation);
        other.result = resolve(warp->values, mask, other.thread.x % 32, other.operand);
        other.status = READY;
    }
    if (orders) simt_races_warp(self->thread.x - lane, mask);
    spins = 0;
    return self->result;
}

// Whom the others wait for: somebody who has returned, or who waits elsewhere.
inline void report_deadlock() {
    current = fibres;
    while (current->status == DONE) current++;
    const Fibre* other = fibres;
    if (current->status == IN_BLOCK) {
        while (other->status == IN_BLOCK) other++;
    } else {
        other = current - current->thread.x % 32;
        while (!(current->mask >> other->thread.x % 32 & 1) || in_warp_with(*other, current->mask)) other++;
    }
    bool returned = other->status == DONE;
    snprintf(message, sizeof message, "block %u, thread %u: waits in %s for thread %u, which %s%s", block.x,
             current->thread.x, current->operation, other->thread.x, returned ? "has returned" : "waits in ",
             returned ? "" : other->operation);
}

inline void caught(int signal, siginfo_t* info, void*) {
    if (signal == SIGILL || signal == SIGTRAP)
        fail("misaligned access, index past the end of an array, shift by too much, or a null pointer");
    fail("%s at address %p", signal == SIGFPE ? "integer division by zero" : "bad memory access", info->si_addr);
}

#ifdef SIMT_RACES
extern "C" inline __attribute__((used)) void simt_race(const char* what) { fail("%s", what); }
#endif

// A declaration's place in static shared memory, found when a thread first comes by. NUMBER tells declarations apart.
template <class T, unsigned NUMBER, unsigned ALIGNMENT>
T& shared_of() {
    static const unsigned offset = [] {
        constexpr unsigned alignment = ALIGNMENT > alignof(T) ? ALIGNMENT : alignof(T);
        unsigned begin = (static_nbytes + alignment - 1) / alignment * alignment;
        if (begin + sizeof(T) > MAX_STATIC) fail("more than %u bytes of static shared memory", MAX_STATIC);
        static_nbytes = begin + sizeof(T);
        return begin;
    }();
    return *reinterpret_cast<T*>(static_shared + offset);
}

// A stack for each thread, with a page below it that must not be touched.
inline void map_stacks() {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = static_cast<unsigned char*>(mmap(nullptr, threads.x * STACK, PROT_READ | PROT_WRITE, flags, -1, 0));
    for (unsigned i = 0; i < threads.x; i++) {
        mprotect(stacks + i * STACK, PAGE, PROT_NONE);
        getcontext(&fibres[i].start);
    }
}

inline void prepare(unsigned shared) {
    waiting_in_block = 0;
    spins = 0;
    memset(static_shared, 0xff, sizeof static_shared);
    memset(dynamic_shared, 0xff, shared + GUARD);
    simt_races_block(block.x);
    for (unsigned i = 0; i < threads.x; i++) {
        Fibre& fibre = fibres[i];
        fibre.start.uc_stack.ss_sp = stacks + i * STACK + PAGE;
        fibre.start.uc_stack.ss_size = STACK - PAGE;
        makecontext(&fibre.start, enter, 0);
        fibre.started = false;
        fibre.status = READY;
        fibre.thread = {i, 0, 0};
        fibre.warp = &warps[i / 32];
        unsigned left = threads.x - i / 32 * 32;
        fibre.warp->existing = left >= 32 ? ~0u : (1u << left) - 1;
    }
}

inline void run_block(unsigned shared) {
    prepare(shared);
    for (bool runs = true; runs && !*message;) {
        runs = false;
        for (unsigned i = 0; i < threads.x && !*message; i++) {
            current = &fibres[block.x % 2 ? threads.x - 1 - i : i];
            if (current->status != READY) continue;
            runs = true;
            simt_running = current->thread.x;
            resume();
            simt_running = -1;
        }
    }
    if (*message) return;
    for (unsigned i = 0; i < threads.x; i++)
        if (fibres[i].status != DONE) return report_deadlock();
    for (unsigned i = 0; i < GUARD; i++)
        if (dynamic_shared[shared + i] != 0xff) {
            snprintf(message, sizeof message, "block %u: wrote byte %u of dynamic shared memory, of %u", block.x,
                     shared + i, shared);
            return;
        }
}

// An empty string, or what went wrong.
template <class Arguments>
const char* launch(void (*kernel)(Arguments), unsigned grid, unsigned count, unsigned shared, const void* arguments) {
    static void (*the_kernel)(Arguments);
    static const Arguments* the_arguments;
    static unsigned char signal_stack[64 * 1024];
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    *message = 0;
    if (!grid || !count || count > MAX_THREADS || shared > MAX_SHARED) {
        snprintf(message, sizeof message, "no such launch: %u blocks of %u threads, %u bytes of dynamic shared memory",
                 grid, count, shared);
        return message;
    }
    struct alignas(Arguments) Copy { unsigned char bytes[sizeof(Arguments)]; } copy;
    memcpy(&copy, arguments, sizeof copy);
    the_kernel = kernel;
    the_arguments = reinterpret_cast<const Arguments*>(&copy);
    run_kernel = [] { the_kernel(*the_arguments); };
    stack_t stack = {signal_stack, 0, sizeof signal_stack}, stack_before;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {}, before[5];
    action.sa_sigaction = caught;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 5; i++) sigaction(signals[i], &action, &before[i]);
    blocks = {grid, 1, 1};
    threads = {count, 1, 1};
    map_stacks();
    simt_races_begin(count, stacks, threads.x * STACK, static_shared, MAX_STATIC, dynamic_shared, shared);
    for (block = {0, 0, 0}; block.x < grid && !*message; block.x++) run_block(shared);
    simt_races_end();
    munmap(stacks, threads.x * STACK);
    for (int i = 0; i < 5; i++) sigaction(signals[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
    return message;
}

template <class Arguments>
size_t argument_nbytes(void (*)(Arguments)) {
    return sizeof(Arguments);
}

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a lane gives at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

// Lane and segment limits as the instruction shfl.sync has them; a lane outside the mask gives 0xff bytes.
struct Segment {
    unsigned first, last;
    Segment(unsigned lane, unsigned width) : first(lane & (32 - width)), last(first | (width - 1)) {}
};

inline uint64_t take(const uint64_t* values, unsigned mask, unsigned lane, bool valid, unsigned from) {
    if (!valid) return values[lane];
    return mask >> (from & 31) & 1 ? values[from & 31] : ~0ull;
}

template <class T>
T shuffle(const char* name, unsigned mask, T value, unsigned operand, int width, Resolve resolve) {
    return from_bits<T>(meet(name, mask, to_bits(value), (operand & 31) | unsigned(width) << 8, resolve));
}

template <class F>
uint64_t fold(const uint64_t* values, unsigned mask, F combine) {
    uint64_t result = values[__builtin_ctz(mask)];
    for (mask &= mask - 1; mask; mask &= mask - 1) result = combine(result, values[__builtin_ctz(mask)]);
    return result;
}

template <class T>
struct Same { using type = T; };

}  // namespace simt

#define threadIdx (simt::current->thread)
#define blockIdx (simt::block)
#define blockDim (simt::threads)
#define gridDim (simt::blocks)

// Barriers and fences. Memory is consistent as it is: one thread runs at a time.

inline void __syncthreads() { simt::wait_for_block(); }
inline void __syncwarp(unsigned mask = ~0u) {
    simt::meet(
        "__syncwarp", mask, 0, 0, [](const uint64_t*, unsigned, unsigned, unsigned) { return uint64_t(0); }, true);
}
inline void __nanosleep(unsigned) { simt::yield(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// Votes, shuffles and reductions of a warp.

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return simt::meet("__ballot_sync", mask, predicate != 0, 0, [](const uint64_t* v, unsigned m, unsigned, unsigned) {
        uint64_t bits = 0;
        for (unsigned i = 0; i < 32; i++) bits |= uint64_t((m >> i & 1) && v[i]) << i;
        return bits;
    });
}
inline int __any_sync(unsigned mask, int predicate) {
    return simt::meet("__any_sync", mask, predicate != 0, 0, [](const uint64_t* v, unsigned m, unsigned, unsigned) {
        return simt::fold(v, m, [](uint64_t a, uint64_t b) { return a | b; });
    });
}
inline int __all_sync(unsigned mask, int predicate) {
    return simt::meet("__all_sync", mask, predicate != 0, 0, [](const uint64_t* v, unsigned m, unsigned, unsigned) {
        return simt::fold(v, m, [](uint64_t a, uint64_t b) { return a & b; });
    });
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return simt::shuffle("__shfl_sync", mask, value, source, width,
                         [](const uint64_t* v, unsigned m, unsigned lane, unsigned operand) {
                             simt::Segment s(lane, operand >> 8);
                             return simt::take(v, m, lane, true, s.first | (operand & (s.last - s.first)));
                         });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return simt::shuffle("__shfl_up_sync", mask, value, delta, width,
                         [](const uint64_t* v, unsigned m, unsigned lane, unsigned operand) {
                             unsigned by = operand & 31, first = simt::Segment(lane, operand >> 8).first;
                             return simt::take(v, m, lane, lane >= first + by, lane - by);
                         });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return simt::shuffle("__shfl_down_sync", mask, value, delta, width,
                         [](const uint64_t* v, unsigned m, unsigned lane, unsigned operand) {
                             unsigned from = lane + (operand & 31);
                             return simt::take(v, m, lane, from <= simt::Segment(lane, operand >> 8).last, from);
                         });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    return simt::shuffle("__shfl_xor_sync", mask, value, bits, width,
                         [](const uint64_t* v, unsigned m, unsigned lane, unsigned operand) {
                             unsigned from = lane ^ (operand & 31);
                             return simt::take(v, m, lane, from <= simt::Segment(lane, operand >> 8).last, from);
                         });
}

#define SIMT_REDUCE(NAME, TYPE, EXPRESSION)                                                                       \
    inline TYPE NAME(unsigned mask, TYPE value) {                                                                 \
        return simt::from_bits<TYPE>(                                                                             \
            simt::meet(#NAME, mask, simt::to_bits(value), 0, [](const uint64_t* v, unsigned m, unsigned, unsigned) { \
                return simt::fold(v, m, [](uint64_t left, uint64_t right) {                                       \
                    TYPE a = TYPE(left), b = TYPE(right);                                                         \
                    return simt::to_bits(TYPE(EXPRESSION));                                                       \
                });                                                                                               \
            }));                                                                                                  \
    }
SIMT_REDUCE(__reduce_add_sync, unsigned, a + b)
SIMT_REDUCE(__reduce_add_sync, int, a + b)
SIMT_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
SIMT_REDUCE(__reduce_min_sync, int, a < b ? a : b)
SIMT_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
SIMT_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SIMT_REDUCE(__reduce_and_sync, unsigned, a & b)
SIMT_REDUCE(__reduce_or_sync, unsigned, a | b)
SIMT_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef SIMT_REDUCE

// Atomics return what was there before.

#define SIMT_ATOMIC(NAME, EXPRESSION)                                    \
    template <class T>                                                   \
    SIMT_UNSEEN T NAME(T* address, typename simt::Same<T>::type b) {     \
        simt_races_atomic(address, sizeof(T), __builtin_return_address(0));  \
        T a = *address;                                                  \
        *address = EXPRESSION;                                           \
        return a;                                                        \
    }
SIMT_ATOMIC(atomicAdd, a + b)
SIMT_ATOMIC(atomicSub, a - b)
SIMT_ATOMIC(atomicExch, b)
SIMT_ATOMIC(atomicMin, a < b ? a : b)
SIMT_ATOMIC(atomicMax, a > b ? a : b)
SIMT_ATOMIC(atomicAnd, a & b)
SIMT_ATOMIC(atomicOr, a | b)
SIMT_ATOMIC(atomicXor, a ^ b)
#undef SIMT_ATOMIC

template <class T>
SIMT_UNSEEN T atomicCAS(T* address, typename simt::Same<T>::type expected, typename simt::Same<T>::type value) {
    simt_races_atomic(address, sizeof(T), __builtin_return_address(0));
    T old = *address;
    if (old == expected) *address = value;
    return old;
}

template <class T>
T __ldg(const T* address) { return *address; }

// Vectors, aligned as in CUDA.

#define SIMT_VECTORS(TYPE, NAME)                                                                             \
    struct alignas(2 * sizeof(TYPE)) NAME##2 { TYPE x, y; };                                                 \
    struct alignas(4 * sizeof(TYPE) < 16 ? 4 * sizeof(TYPE) : 16) NAME##4 { TYPE x, y, z, w; };              \
    inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                                         \
    inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
SIMT_VECTORS(unsigned char, uchar)
SIMT_VECTORS(unsigned short, ushort)
SIMT_VECTORS(short, short)
SIMT_VECTORS(unsigned, uint)
SIMT_VECTORS(int, int)
SIMT_VECTORS(float, float)
SIMT_VECTORS(unsigned long long, ulonglong)
SIMT_VECTORS(long long, longlong)
#undef SIMT_VECTORS

// Integers.

#define SIMT_MIN_MAX(A, B, RESULT)                                                        \
    inline RESULT min(A a, B b) { return (RESULT)a < (RESULT)b ? (RESULT)a : (RESULT)b; } \
    inline RESULT max(A a, B b) { return (RESULT)a > (RESULT)b ? (RESULT)a : (RESULT)b; }
SIMT_MIN_MAX(int, int, int)
SIMT_MIN_MAX(unsigned, unsigned, unsigned)
SIMT_MIN_MAX(int, unsigned, unsigned)
SIMT_MIN_MAX(unsigned, int, unsigned)
SIMT_MIN_MAX(long, long, long)
SIMT_MIN_MAX(unsigned long, unsigned long, unsigned long)
SIMT_MIN_MAX(long long, long long, long long)
SIMT_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef SIMT_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return uint64_t(x) * y >> 32; }
inline int __mulhi(int x, int y) { return int64_t(x) * y >> 32; }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned __int128>(x) * y >> 64;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) << (shift & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) >> (shift & 31);
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) << (shift < 32 ? shift : 32) >> 32;
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) >> (shift < 32 ? shift : 32);
}

// Floats. Every operation rounds on its own (simt.py forbids fusing); conversions to integers saturate, NaN gives 0.

inline unsigned __float_as_uint(float x) { return simt::from_bits<unsigned>(simt::to_bits(x)); }
inline int __float_as_int(float x) { return simt::from_bits<int>(simt::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return simt::from_bits<float>(x); }
inline float __int_as_float(int x) { return simt::from_bits<float>(unsigned(x)); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); }
inline int __float2int_rz(float x) { return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : int(x); }
inline unsigned __float2uint_rz(float x) { return x >= 0x1p32f ? UINT32_MAX : x > 0 ? unsigned(x) : 0; }
inline int __float2int_rn(float x) { return __float2int_rz(rintf(x)); }
inline int __float2int_rd(float x) { return __float2int_rz(floorf(x)); }
inline int __float2int_ru(float x) { return __float2int_rz(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return __float2uint_rz(rintf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

// Half precision, for a kernel's branch without inline PTX: subnormals are kept, and a NaN keeps its sign.

inline float simt_half_to_float(uint16_t half) {
    unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | (fraction ? 0x400000 | fraction << 13 : 0));
    float magnitude = exponent ? __uint_as_float((exponent + 112) << 23 | fraction << 13) : fraction * 0x1p-24f;
    return copysignf(magnitude, __uint_as_float(sign | 0x3f800000));
}

// To nearest, ties to even; from 65520 on infinite. Any NaN becomes 0x7fff, as cvt.rn.f16.f32 has it.
inline uint16_t simt_float_to_half_rn(float x) {
    unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) return sign | unsigned(rintf(__uint_as_float(magnitude) * 0x1p24f));
    unsigned rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return sign | ((rounded >> 13) - (112 << 10));
}
