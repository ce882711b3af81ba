// The codec sz on NVIDIA GPUs: the formats of lowtide.coding.blocks and lowtide.coding.rans, the arithmetic of
// lowtide.coding.grid. One pass over the raw tensor each way; a warp codes a chunk; sizes stay on the device.
//
// A lane loads four neighbours at a time (a group), so that one dither hash serves a load. Chunks of blocks are placed by
// a decoupled look-back over the blocks of the grid: the bytes do not depend on the order in which blocks run. Those of
// rans lie in the order in which they are ready, so that no warp waits for another: values do not depend on it. Nothing is
// written past `capacity` words, and `status` (in pinned memory of the host) receives the number of words needed.
//
// This file: what the kernels are given, and what they load and store.

// As packed by lowtide/kernels/_sz_cuda.py.
struct Args {
  void* x;               // raw values: read by the encoders, written by the decoders
  const float* inverse;  // 256 / step
  const float* bound;
  const u16* step;       // bfloat16
  const u16* centre;     // bfloat16, in steps; null where all are zero
  const u16* freqs;
  u32* words;
  int* heads;            // rans: three numbers a chunk; blocks: offsets, chunks + 1
  u8* headers;           // blocks
  u64* work;             // rans: two counters; blocks: the ticket, and from word 2 on one for each block of the grid
  long long* status;
  u32* spill;            // rans: slots of 4096 16-bit words for what does not fit a stage
  u64 count;
  u64 capacity;
  u32 chunks, low, high, epoch;
  u32 rows, stage;       // of a chunk; 16-bit words that a warp can stage
  int size, first, fill, slots;
  float origin;          // rans encoders: x * inverse + origin is the sum that a digit is read from, and sums from
  u32 lowest, beyond;    // `lowest` on and before `beyond` give digits that are sure
  u32 pairs[3];          // rans encoders: 16 * size ** k, and in the upper half 16 * size ** (k + 1)
  int room;              // encoders: codes that keep their promise whatever their centre
  u32 divide, modulo, times, divide2, modulo2, times2;
  u32 whole;             // encoders: values come back as whole steps, though dither was added (stochastic rounding)
  const u32* replay;     // read by kernels that are REPLAYED: a number that is another one in each replay of a graph
  const void* other;     // a gradient, for decoders that let it through; of a pair, what ReLU made, for encoders
  const float* table;    // of a pair: sz_fold.cuh
  void* beside;          // what SOURCE_AND_GATED gives beside `x`
  u32* reserve;          // REPLAYED, rans: words that all payloads of a graph share, for chunks that their own room has
  u64* taken;            // no place for; how many of them are taken
  u64 reserved;          // how many there are
};

// What a decoder gives, in `x`: values; where they are not zero; or the gradient there, and zero elsewhere. Of a pair: what
// ReLU made, the norm's input, or that and in `beside` what ReLU lets through of the gradient.
enum { ONLY_VALUES, ONLY_MASK, GATED, MADE, SOURCE, SOURCE_AND_GATED };

// Compiled once more for graphs that are captured and replayed. There a launch has the same arguments every time, so the
// dither is shifted by a number that lies in memory; and nobody looks at an encoder's report before its payload is
// decoded, so the decoder has to notice what did not fit.
#ifndef REPLAYED
#define REPLAYED false
#endif
__device__ __forceinline__ u32 low_of(const Args& a) { return REPLAYED ? a.low + __ldg(a.replay) : a.low; }

// Word `at` of a payload, or of the reserve of a graph: the numbers of its words have the top bit.
constexpr u32 AWAY = 1u << 31;
__device__ __forceinline__ u32* words_at(const Args& a, u32 at) {
  if (REPLAYED && at & AWAY) return a.reserve + (at ^ AWAY);
  return a.words + at;
}
__device__ __forceinline__ bool has_place(const Args& a, u32 at, u32 words) {
  if (REPLAYED && at & AWAY) return (u64)(at ^ AWAY) + words <= a.reserved;
  return (u64)at + words <= a.capacity;
}

template <typename T> struct Type;
template <> struct Type<float> { static constexpr int reach = 2046, escape = 2; };
template <> struct Type<Half> { static constexpr int reach = 7, escape = 1; };
template <> struct Type<Bfloat> { static constexpr int reach = 8, escape = 1; };

// Two 16-bit values in one word, the first in the low half.
__device__ __forceinline__ u32 narrow2(float a, float b, Bfloat) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
#else
  Bfloat p, q;
  narrow(a, &p), narrow(b, &q);
  return p.bits | (u32)q.bits << 16;
#endif
}
__device__ __forceinline__ u32 narrow2(float a, float b, Half) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
#else
  Half p, q;
  narrow(a, &p), narrow(b, &q);
  return p.bits | (u32)q.bits << 16;
#endif
}

// A group of four values as it lies in memory.
template <typename T> struct Group;
template <> struct Group<float> {
  float4 v;
  __device__ __forceinline__ void load(const void* x, u64 g) { v = __ldg((const float4*)x + g); }
  __device__ __forceinline__ float at(int k) const { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
  __device__ __forceinline__ void set(const float* y) { v = make_float4(y[0], y[1], y[2], y[3]); }
  __device__ __forceinline__ void store(void* x, u64 g) const { ((float4*)x)[g] = v; }
};
template <typename T> struct Group {
  uint2 v;
  __device__ __forceinline__ void load(const void* x, u64 g) { v = __ldg((const uint2*)x + g); }
  __device__ __forceinline__ float at(int k) const {
    u32 w = k < 2 ? v.x : v.y;
    T half;
    half.bits = (u16)(k & 1 ? w >> 16 : w & 0xffff);
    return widen(half);
  }
  __device__ __forceinline__ void set(const float* y) {
    v = make_uint2(narrow2(y[0], y[1], T()), narrow2(y[2], y[3], T()));
  }
  __device__ __forceinline__ void store(void* x, u64 g) const { ((uint2*)x)[g] = v; }
};

// Group g. A chunk is WHOLE if it lies inside the tensor and at an address that vectors can be loaded from.
template <bool WHOLE, typename T>
__device__ __forceinline__ void load(Group<T>& group, const Args& a, const void* x, u64 g) {
  if (WHOLE) {
    group.load(x, g);
    return;
  }
  float y[4];
  for (int k = 0; k < 4; ++k) y[k] = 4 * g + k < a.count ? widen(((const T*)x)[4 * g + k]) : 0.0f;
  group.set(y);
}

template <bool WHOLE, typename T>
__device__ __forceinline__ void store(const Group<T>& group, const Args& a, void* to, u64 g) {
  if (WHOLE) {
    group.store(to, g);
    return;
  }
  for (int k = 0; k < 4; ++k)
    if (4 * g + k < a.count) narrow(group.at(k), (T*)to + 4 * g + k);
}
template <bool WHOLE, typename T> __device__ __forceinline__ void store(const Group<T>& group, const Args& a, u64 g) {
  store<WHOLE>(group, a, a.x, g);
}

// Brings the memory around an address near. Only a hint.
__device__ __forceinline__ void prefetch(const void* x) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(x));
#endif
}

// Bytes of two words by number; eight more than its number stands for a byte's sign, eight times.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
#else
  u64 both = a | (u64)b << 32;
  u32 y = 0;
  for (int k = 0; k < 4; ++k) {
    u32 byte = (u32)(both >> (8 * (selector >> (4 * k) & 7))) & 255;
    if (selector >> (4 * k) & 8) byte = byte & 128 ? 255 : 0;
    y |= byte << (8 * k);
  }
  return y;
#endif
}

// Sums of products, and `sum`: of four bytes with four; of two halves with the lower or the upper two bytes.
__device__ __forceinline__ u32 dot4(u32 a, u32 b, u32 sum) {
#ifdef __CUDA_ARCH__
  u32 y;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(sum));
  return y;
#else
  for (int k = 0; k < 4; ++k) sum += (a >> (8 * k) & 255) * (b >> (8 * k) & 255);
  return sum;
#endif
}
__device__ __forceinline__ u32 dot2(u32 halves, u32 bytes, bool upper, u32 sum) {
#ifdef __CUDA_ARCH__
  u32 y;
  if (upper)
    asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(halves), "r"(bytes), "r"(sum));
  else
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(halves), "r"(bytes), "r"(sum));
  return y;
#else
  if (upper) bytes >>= 16;
  return sum + (halves & 0xffff) * (bytes & 255) + (halves >> 16) * (bytes >> 8 & 255);
#endif
}

// Clears the values of a group that have no mark: value k's is the top bit of byte bytes[k] of marks[k].
template <typename T>
__device__ __forceinline__ void clear_zeros(Group<T>& group, const u32* marks, const int* bytes) {
  group.v.x &= permute(marks[0], marks[1], 0x11 * (8 + bytes[0]) | 0x1100 * (12 + bytes[1]));
  group.v.y &= permute(marks[2], marks[3], 0x11 * (8 + bytes[2]) | 0x1100 * (12 + bytes[3]));
}
template <> __device__ __forceinline__ void clear_zeros(Group<float>& group, const u32* marks, const int* bytes) {
  float y[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    y[k] = __uint_as_float(__float_as_uint(group.at(k)) & permute(marks[k], 0, 0x1111 * (8 + bytes[k])));
  group.set(y);
}

// Clears the values of a group that are named.
template <typename T> __device__ __forceinline__ void clear(Group<T>& group, const bool* which) {
  group.v.x &= (which[0] ? 0 : 0xffff) | (which[1] ? 0 : 0xffff0000u);
  group.v.y &= (which[2] ? 0 : 0xffff) | (which[3] ? 0 : 0xffff0000u);
}
template <> __device__ __forceinline__ void clear(Group<float>& group, const bool* which) {
  float y[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) y[k] = which[k] ? 0.0f : group.at(k);
  group.set(y);
}
