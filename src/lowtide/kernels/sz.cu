// The codec sz on NVIDIA GPUs: the formats of lowtide.coding.blocks and lowtide.coding.rans, the arithmetic of
// lowtide.coding.grid. One pass over the raw tensor each way; a warp codes a chunk; sizes stay on the device.
//
// A lane loads four neighbours at a time (a group), so that one dither hash serves a load. Chunks are placed by a
// decoupled look-back over the blocks of the grid: the bytes do not depend on the order in which blocks run. Nothing is
// written past `capacity` words, and `status` (in pinned memory of the host) receives the number of words needed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

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
  u64* work;             // the ticket, then a word for each block of the grid
  long long* status;
  u32* spill;            // rans: slots of 4096 16-bit words for what does not fit a stage
  u64 count;
  u64 capacity;
  u32 chunks, low, high, epoch;
  u32 rows, stage;       // of a chunk; 16-bit words that a warp can stage
  int size, first, fill, slots;
  u32 divide, modulo, times, divide2, modulo2, times2;
};

struct Half { u16 bits; };
struct Bfloat { u16 bits; };

// ---- dtypes ------------------------------------------------------------------------------------------------------

template <typename T> struct Type;
template <> struct Type<float> { static constexpr int reach = 2046, escape = 2; };
template <> struct Type<Half> { static constexpr int reach = 7, escape = 1; };
template <> struct Type<Bfloat> { static constexpr int reach = 8, escape = 1; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bfloat x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(Half x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return simt_half_to_float(x.bits);
#endif
}

__device__ __forceinline__ void narrow(float x, float* y) { *y = x; }
__device__ __forceinline__ void narrow(float x, Bfloat* y) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y->bits) : "f"(x));
#else
  u32 b = __float_as_uint(x);
  y->bits = (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
#endif
}
__device__ __forceinline__ void narrow(float x, Half* y) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x));
#else
  y->bits = simt_float_to_half_rn(x);
#endif
}

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

__device__ __forceinline__ bool aligned(const void* x, int bytes) { return ((u64)x & (bytes - 1)) == 0; }

// Group g. A chunk is WHOLE if it lies inside the tensor and at an address that vectors can be loaded from.
template <bool WHOLE, typename T> __device__ __forceinline__ void load(Group<T>& group, const Args& a, u64 g) {
  if (WHOLE) {
    group.load(a.x, g);
    return;
  }
  float y[4];
  for (int k = 0; k < 4; ++k) y[k] = 4 * g + k < a.count ? widen(((const T*)a.x)[4 * g + k]) : 0.0f;
  group.set(y);
}

template <bool WHOLE, typename T> __device__ __forceinline__ void store(const Group<T>& group, const Args& a, u64 g) {
  if (WHOLE) {
    group.store(a.x, g);
    return;
  }
  for (int k = 0; k < 4; ++k)
    if (4 * g + k < a.count) narrow(group.at(k), (T*)a.x + 4 * g + k);
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

// ---- the grid ----------------------------------------------------------------------------------------------------

// As in lowtide.coding.dither; `high` is given as high ^ high >> 15, so that one operation adds both that it goes into.
__device__ __forceinline__ u32 mixed_hash(u32 word, u32 low, u32 high) {
  word += low;
  word ^= word >> 16;
  word *= 0x7feb352du;
  word ^= word >> 15 ^ high;
  return word * 0x846ca68bu;
}
__device__ __forceinline__ u32 hash(u32 word, u32 low, u32 high) {
  u32 mixed = mixed_hash(word, low, high);
  return mixed ^ mixed >> 16;
}
__device__ __forceinline__ u32 inverted_hash(u32 word, u32 low, u32 high) {
  u32 mixed = mixed_hash(word, low, high);
#ifdef __CUDA_ARCH__
  u32 y;  // NVRTC takes two operations for this one
  asm("lop3.b32 %0, %1, %2, 0, 0xc3;" : "=r"(y) : "r"(mixed), "r"(mixed >> 16));
  return y;
#else
  return ~(mixed ^ mixed >> 16);
#endif
}

// How elements find their step. ENTRY 0: one for all. 1: runs of a length that is a multiple of four. 2: the innermost
// axis, its size a multiple of four. 3: runs of four or more, or the innermost axis of four or more. 4: anything.
enum { TENSOR, RUNS, INNER, MIXED, ANY };

// Codes are counted from a centre where a channel has a step of its own. Centres leave `room` of the reach.
template <int ENTRY> struct Centred { static constexpr bool value = ENTRY != TENSOR; };
template <typename T, int ENTRY> struct Room {
  static constexpr int value = Type<T>::reach - (!Centred<ENTRY>::value ? 0 : sizeof(T) == 4 ? 256 : 4);
};

__device__ __forceinline__ u32 entry_of(const Args& a, u64 element) {
  u32 i = (u32)element;  // tensors have fewer than 2**32
  return i / a.divide % a.modulo * a.times + i / a.divide2 % a.modulo2 * a.times2;
}

// Walks the groups of one lane, a row (32 groups) at a time.
template <int ENTRY> struct Walk {
  u32 entry, rest, over, left;
  u64 group;
  __device__ __forceinline__ void begin(const Args& a, u64 g) {
    group = g;
    if (ENTRY == TENSOR || ENTRY == ANY) return;
    u32 i = (u32)(4 * g);
    entry = i / a.divide % a.modulo;
    rest = i % a.divide;
    over = 128 / a.divide % a.modulo;
    left = 128 % a.divide;
  }
  // What wraps around below zero is larger than what does not: the smaller of both is the one wanted.
  __device__ __forceinline__ void next(const Args& a) {
    group += 32;
    if (ENTRY == TENSOR || ENTRY == ANY) return;
    entry += over;
    if (ENTRY != INNER) {
      rest += left;
      entry += rest >= a.divide;
      rest = min(rest, rest - a.divide);
    }
    entry = min(entry, entry - a.modulo);
  }
  __device__ __forceinline__ void back(const Args& a) {
    group -= 32;
    if (ENTRY == TENSOR || ENTRY == ANY) return;
    entry -= over;
    if (ENTRY != INNER) {
      entry -= rest < left;
      rest -= left;
      rest = min(rest, rest + a.divide);
    }
    entry = min(entry, entry + a.modulo);
  }
  __device__ __forceinline__ u32 of(const Args& a, int k) const {
    if (ENTRY == TENSOR) return 0;
    if (ENTRY == RUNS) return entry;
    if (ENTRY == INNER) return entry + k;
    if (ENTRY == ANY) return entry_of(a, 4 * group + k);
    u32 e = entry + (a.divide == 1 ? k : rest + k >= a.divide);
    return e >= a.modulo ? e - a.modulo : e;
  }
  __device__ __forceinline__ void read(const Args& a, const float* table, float* y) const {
    if (ENTRY == TENSOR || ENTRY == RUNS) {
      y[0] = y[1] = y[2] = y[3] = __ldg(table + of(a, 0));
    } else if (ENTRY == INNER) {
      float4 v = __ldg((const float4*)(table + entry));
      y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
    } else {
      for (int k = 0; k < 4; ++k) {
        bool there = ENTRY != ANY || 4 * group + k < a.count;
        y[k] = there ? __ldg(table + of(a, k)) : 1.0f;
      }
    }
  }
  // `from` - 256 * centre
  __device__ __forceinline__ void read_origins(const Args& a, float from, float* y) const {
    y[0] = y[1] = y[2] = y[3] = from;
    if (!Centred<ENTRY>::value || !a.centre) return;
    if (ENTRY == RUNS) {
      y[0] = y[1] = y[2] = y[3] = fmaf(__uint_as_float((u32)__ldg(a.centre + entry) << 16), -256.0f, from);
    } else if (ENTRY == INNER) {
      uint2 v = __ldg((const uint2*)(a.centre + entry));
      y[0] = fmaf(__uint_as_float(v.x << 16), -256.0f, from);
      y[1] = fmaf(__uint_as_float(v.x & 0xffff0000u), -256.0f, from);
      y[2] = fmaf(__uint_as_float(v.y << 16), -256.0f, from);
      y[3] = fmaf(__uint_as_float(v.y & 0xffff0000u), -256.0f, from);
    } else {
      for (int k = 0; k < 4; ++k) y[k] = fmaf(__uint_as_float((u32)__ldg(a.centre + of(a, k)) << 16), -256.0f, from);
    }
  }
  __device__ __forceinline__ void read_units(const Args& a, float* y) const {  // step / 256
    if (ENTRY == TENSOR || ENTRY == RUNS) {
      y[0] = y[1] = y[2] = y[3] = __uint_as_float((u32)__ldg(a.step + of(a, 0)) << 16) * 0.00390625f;
    } else if (ENTRY == INNER) {
      uint2 v = __ldg((const uint2*)(a.step + entry));
      y[0] = __uint_as_float(v.x << 16) * 0.00390625f, y[1] = __uint_as_float(v.x & 0xffff0000u) * 0.00390625f;
      y[2] = __uint_as_float(v.y << 16) * 0.00390625f, y[3] = __uint_as_float(v.y & 0xffff0000u) * 0.00390625f;
    } else {
      for (int k = 0; k < 4; ++k) {
        bool there = ENTRY != ANY || 4 * group + k < a.count;
        y[k] = there ? __uint_as_float((u32)__ldg(a.step + of(a, k)) << 16) * 0.00390625f : 1.0f;
      }
    }
  }
};

template <bool DITHER> __device__ __forceinline__ u32 shift_of(u32 word, int k) {
  return DITHER ? permute(word, 0, 0x4440 + k) : 128u;
}

// Adding 1.5 * 2**23 leaves rint(x * inverse) in the low bits of the sum. What is out of range, inf and NaN come out
// further than 2046 steps from zero.
constexpr int ROUNDING = 0x4b400000;
__device__ __forceinline__ int units_of(float x, float inverse) {
  return (int)__float_as_uint(fmaf(x, inverse, 12582912.0f));
}
__device__ __forceinline__ int code_of(float x, float inverse, u32 shift) {
  return (units_of(x, inverse) - ROUNDING + (int)shift) >> 8;
}

template <bool DITHER> __device__ __forceinline__ float value_of(int q, u32 shift, float unit) {
  float m = (float)(256 * q - (int)shift);
  return fmaf(m, unit, unit * (DITHER ? 127.5f : 128.0f));
}

// Whether code q keeps the promise made for its entry; only asked where that is not clear beforehand.
template <typename T, bool DITHER>
__device__ __forceinline__ bool keeps(const u16* step, const float* bound, float x, int q, u32 shift) {
  if (q < -2046 || q > 2046) return false;
  if (q >= -Type<T>::reach && q <= Type<T>::reach) return true;
  T rounded;
  narrow(value_of<DITHER>(q, shift, __uint_as_float((u32)*step << 16) * 0.00390625f), &rounded);
  // Both have at most 11 bits and lie within a fraction of each other: the difference is exact.
  float error = widen(rounded) - x;
  return (error < 0 ? -error : error) <= *bound;
}

template <int ENTRY> __device__ __forceinline__ int centre_of(const Args& a, u32 entry) {
  return Centred<ENTRY>::value && a.centre ? (int)__uint_as_float((u32)a.centre[entry] << 16) : 0;
}

template <typename T> __device__ __forceinline__ u32 raw_words(u64 count) {
  return (u32)((count * sizeof(T) + 3) / 4);
}

// A chunk as it is, from element `start` on.
template <typename T> __device__ void write_raw(const Args& a, u64 start, u32 base, u32 words, int lane) {
  for (u32 w = lane; w < words; w += 32) {
    if (sizeof(T) == 4) {
      a.words[base + w] = ((const u32*)a.x)[start + w];
    } else {
      const u16* x = (const u16*)a.x + start + 2 * w;
      u32 second = start + 2 * w + 1 < a.count ? x[1] : 0;
      a.words[base + w] = x[0] | second << 16;
    }
  }
}

template <typename T, bool MASK> __device__ void put_exact(const Args& a, u64 i, u32 bits) {
  if (MASK) {
    u32 magnitude = sizeof(T) == 4 ? bits << 1 : bits << 17;
    narrow(magnitude ? 1.0f : 0.0f, (T*)a.x + i);
  } else if (sizeof(T) == 4) {
    ((u32*)a.x)[i] = bits;
  } else {
    ((u16*)a.x)[i] = (u16)bits;
  }
}

template <typename T, bool MASK> __device__ void read_raw(const Args& a, u64 start, u32 base, u32 valid, int lane) {
  for (u32 i = lane; i < valid; i += 32) {
    u32 bits = sizeof(T) == 4 ? a.words[base + i] : ((const u16*)(a.words + base))[i];
    put_exact<T, MASK>(a, start + i, bits);
  }
}

template <typename T, bool MASK>
__device__ void read_escapes(const Args& a, u64 start, const u32* list, u32 escapes, int lane) {
  for (u32 i = lane; i < escapes; i += 32) {
    u32 word = list[i * Type<T>::escape];
    u64 at = start + (sizeof(T) == 4 ? word : word >> 16);
    put_exact<T, MASK>(a, at, sizeof(T) == 4 ? list[2 * i + 1] : word & 0xffff);
  }
}

// ---- where chunks go ---------------------------------------------------------------------------------------------

// The block's number in the order of starting.
__device__ __forceinline__ u32 take_ticket(const Args& a) {
  __shared__ u32 ticket;
  if (threadIdx.x == 0) ticket = (u32)atomicAdd(a.work, 1ull);
  __syncthreads();
  return ticket;
}

// The first word of each warp's chunk, given its length. A block publishes its total, then adds up what the blocks
// before it published until it meets one that knows its own place. `work` words: epoch, 1 total or 2 place, words.
// There is time for other work between the two steps, while the blocks before catch up.
struct Places {
  u32 lengths[32], total, base;
};
__device__ void publish(const Args& a, Places& places, u32 ticket, u32 words, int warp, int lane) {
  if (lane == 0) places.lengths[warp] = words;
  __syncthreads();
  if (warp) return;
  int warps = blockDim.x / 32;
  u32 mine = lane < warps ? places.lengths[lane] : 0, sum = mine;
  for (int o = 1; o < 32; o <<= 1) {
    u32 below = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += below;
  }
  __syncwarp();
  if (lane < warps) places.lengths[lane] = sum - mine;
  if (lane < 31) return;
  places.total = sum;
  *(volatile u64*)(a.work + 1 + ticket) = (u64)a.epoch << 34 | (ticket ? 1ull : 2ull) << 32 | sum;
}
__device__ u32 place_of(const Args& a, Places& places, u32 ticket, int warp, int lane) {
  if (warp == 0) {
    __syncwarp();  // lane 31 has left the total
    volatile u64* state = a.work + 1;
    u64 tag = (u64)a.epoch << 34;
    u32 before = 0;
    for (long long at = (long long)ticket - 1; at >= 0; at -= 32) {
      u64 word = tag | 2ull << 32;
      if (at - lane >= 0) {
        do { word = state[at - lane]; } while (word >> 34 != a.epoch || (word >> 32 & 3) == 0);
      }
      u32 known = __ballot_sync(~0u, (word >> 32 & 3) == 2);
      int until = known ? __ffs(known) - 1 : 31;
      u32 part = lane <= until ? (u32)word : 0;
      for (int o = 16; o; o >>= 1) part += __shfl_xor_sync(~0u, part, o);
      before += part;
      if (known) break;
    }
    if (lane == 0) {
      u64 after = (u64)(before + places.total);
      if (ticket) state[ticket] = tag | 2ull << 32 | after;
      places.base = before;
      if (ticket == gridDim.x - 1) {  // every block has its ticket by now, and the slots it wanted
        *(volatile u64*)a.work = 0;
        if (a.status) *(volatile long long*)a.status = (long long)after;
      }
    }
  }
  __syncthreads();
  return places.base + places.lengths[warp];
}

// ---- rans --------------------------------------------------------------------------------------------------------

constexpr int CODES = 512, EXACTS = 64;  // escapes that a warp can stage
constexpr u32 SPILL = 4096;              // 16-bit words of a slot that takes what a stage cannot hold

// Slots before each symbol, for 256 threads.
__device__ __forceinline__ u32 slots_before(u32 freq) {
  __shared__ u32 sums[8];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  u32 sum = freq;
  for (int o = 1; o < 32; o <<= 1) {
    u32 below = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w];
  __syncthreads();
  return sum - freq;
}

// One value once more, with care: its code, and whether the code keeps its promise.
template <typename T, bool DITHER>
__device__ __noinline__ int2 careful(float x, float inverse, const u16* step, const float* bound, u32 shift) {
  int q = code_of(x, inverse, shift);
  return make_int2(q, keeps<T, DITHER>(step, bound, x, q, shift));
}
template <typename T, int ENTRY, bool DITHER>
__device__ __forceinline__ int2 careful(const Args& a, u64 i, float x, u32 entry) {
  u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), a.low, a.high) : 0, (int)(i & 3));
  int2 found = careful<T, DITHER>(x, a.inverse[entry], a.step + entry, a.bound + entry, shift);
  found.x -= centre_of<ENTRY>(a, entry);
  return make_int2(found.x, found.y && found.x >= -2046 && found.x <= 2046);
}

// The sign bits of a group, or-ed together; a byte of ones for each value that is not zero, where all signs are clear.
template <typename T> __device__ __forceinline__ u32 signs_of(const Group<T>& group) {
  return (group.v.x | group.v.y) & 0x80008000u;
}
template <> __device__ __forceinline__ u32 signs_of(const Group<float>& group) {
  u32 bits = __float_as_uint(group.v.x) | __float_as_uint(group.v.y) | __float_as_uint(group.v.z);
  return (bits | __float_as_uint(group.v.w)) & 0x80000000u;
}
template <typename T> __device__ __forceinline__ u32 nonzero_bytes(const Group<T>& group) {
  return permute(group.v.x + 0x7fff7fffu, group.v.y + 0x7fff7fffu, 0xfdb9);
}
template <> __device__ __forceinline__ u32 nonzero_bytes(const Group<float>& group) {
  u32 first = permute(__float_as_uint(group.v.x) + 0x7fffffffu, __float_as_uint(group.v.y) + 0x7fffffffu, 0x00fb);
  u32 last = permute(__float_as_uint(group.v.z) + 0x7fffffffu, __float_as_uint(group.v.w) + 0x7fffffffu, 0x00fb);
  return permute(first, last, 0x5410);
}

// Values become digits by a multiply-add: the digit is byte 1 of the sum's bits plus the dither. `low` <= bits < `high`
// holds where the digit is sure to be right: inside the alphabet and within the reach. ZERO: 0, zero has no code of its
// own; 1, it has; 2, it has, and the alphabet begins with the code 0, so that values without a sign are not below it.
struct Digits {
  float origin;
  u32 low, high;
};
template <typename T, int ENTRY, int ZERO, bool DITHER> __device__ __forceinline__ Digits digits_for(const Args& a) {
  int first = a.first - (ZERO ? 1 : 0);  // the code of digit 0, if it had one
  constexpr int room = Room<T, ENTRY>::value;
  int least = max(a.first, -room), most = min(first + a.size - 1, room);
  Digits digits;
  digits.origin = 12582912.0f + (float)(-256 * first + (DITHER ? 0 : 128));
  digits.low = (u32)(ROUNDING + 256 * (least - first));
  digits.high = max((u32)(ROUNDING + 256 * (most - first + 1)), digits.low);
  return digits;
}
template <bool DITHER> __device__ __forceinline__ u32 sum_of(float origin, float x, float inverse, u32 word, int k) {
  u32 bits = __float_as_uint(fmaf(x, inverse, origin));
  return DITHER ? dot4(word, 1u << (8 * k), bits) : bits;
}

// The digits of a group, a byte each, and the least and the largest of its sums.
template <typename T, int ZERO, bool DITHER>
__device__ __forceinline__ u32 digits_of(
    const Digits& digits, const Group<T>& group, const float* inverse, const float* origin, u32 word, u32& least,
    u32& most) {
  u32 sum[4], checked[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x = group.at(k);
    sum[k] = checked[k] = sum_of<DITHER>(origin[k], x, inverse[k], word, k);
    if (ZERO == 1) {
      bool zero = x == 0.0f;
      checked[k] = zero ? digits.low : checked[k];
      sum[k] = zero ? 0 : sum[k];
    }
  }
  most = max(max(max(checked[0], checked[1]), checked[2]), checked[3]);
  if (ZERO != 2) least = min(min(min(checked[0], checked[1]), checked[2]), checked[3]);
  u32 packed = permute(permute(sum[0], sum[1], 0x51), permute(sum[2], sum[3], 0x51), 0x5410);
  return ZERO == 2 ? packed & nonzero_bytes(group) : packed;
}

// Which values of group g have no digit that is sure. The group is read again: nothing of it has to be kept for this.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ u32 doubtful(const Args& a, const Digits& digits, u32 g) {
  Group<T> group;
  load<WHOLE>(group, a, g);
  float inverse[4], origin[4];
  Walk<ENTRY> walk;
  walk.begin(a, g);
  walk.read(a, a.inverse, inverse);
  walk.read_origins(a, digits.origin, origin);
  u32 word = DITHER ? hash(g, a.low, a.high) : 0, found = 0;
  bool all = ZERO == 2 && signs_of(group);  // then zeros are not known either
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 sum = sum_of<DITHER>(origin[k], group.at(k), inverse[k], word, k);
    bool sure = (sum >= digits.low && sum < digits.high) || (ZERO && group.at(k) == 0.0f);
    if (all || !sure) found |= 1u << k;
  }
  return found;
}

// How a symbol is encoded: the reciprocal of its share; unused << 31 | share << 19 | shift; 4096 - share; a bias. For a
// state below 2**31 the quotient by the share is the high half of the product with the reciprocal, shifted, exactly.
constexpr u32 UNUSED = 1u << 31;
__device__ __forceinline__ uint4 encoding_of(u32 freq, u32 before) {
  if (freq < 2) return make_uint4(~0u, 1u << 19, 4095, before + 4095);
  u32 shift = 32 - __clz(freq - 1);
  u32 reciprocal = (u32)(((1ull << (shift + 31)) + freq - 1) / freq);
  return make_uint4(reciprocal, freq << 19 | (shift - 1), 4096 - freq, before);
}

// The lanes with states of `limit` or more append their low halves to the stream, in the order of the lanes. `cursor`
// is the address of the stream's end.
__device__ __forceinline__ void emit(u32& s, u32& cursor, u32 limit, u32 below, u8* memory) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{ .reg .pred p; .reg .u32 all, before, at;"
      "  setp.ge.u32 p, %0, %2;"
      "  vote.sync.ballot.b32 all, p, 0xffffffff;"
      "  and.b32 before, all, %3;"
      "  popc.b32 before, before;"
      "  mad.lo.u32 at, before, 2, %1;"
      "  @p st.shared.u16 [at], %0;"
      "  @p shr.u32 %0, %0, 16;"
      "  popc.b32 all, all;"
      "  mad.lo.u32 %1, all, 2, %1; }"
      : "+r"(s), "+r"(cursor) : "r"(limit), "r"(below) : "memory");
#else
  u32 all = __ballot_sync(~0u, s >= limit);
  if (s >= limit) {
    *(u16*)(memory + cursor + 2 * __popc(all & below)) = (u16)s;
    s >>= 16;
  }
  cursor += 2 * __popc(all);
#endif
}
__device__ __forceinline__ u32 address_of(const void* shared) {
#ifdef __CUDA_ARCH__
  return (u32)__cvta_generic_to_shared(shared);
#else
  return 0;
#endif
}
// A number to keep in a register, where the compiler would rather make it again in every round.
__device__ __forceinline__ u32 kept(u32 x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// What a warp has staged of its chunk: the stream's end, how much of it went to a slot before, and escapes.
struct Staged {
  u16* stream;
  u32 *codes, *exacts;
  const u32* slot;
  u32 length, spilled, coded, lost, state;
  bool raw;
};

// The values `todo` of each lane, one at a time, with care: their digits, and escapes for those that have none (or for
// all, if a symbol without a share has them: LATE). Returns those that are escapes.
template <typename T, int ROWS, int ENTRY, int ZERO, bool DITHER, bool WHOLE, bool LATE>
__device__ __forceinline__ u32 mend(const Args& a, u64 start, u32 g, u32 todo, u32* packed, Staged& out, int lane) {
  const u32 below = (1u << lane) - 1;
  const int first = a.first - (ZERO ? 1 : 0);
  u32 escaped = 0;
  while (__any_sync(~0u, todo != 0)) {
    int n = todo ? __ffs(todo) - 1 : 0;
    u64 i = 4 * ((u64)g + n / 4 * 32) + n % 4;
    bool there = todo && (WHOLE || i < a.count), is_code = false, is_exact = false;
    T value = {};
    int q = 0, digit = a.fill;
    if (there) {
      value = ((const T*)a.x)[i];
      float x = widen(value);
      int2 found = careful<T, ENTRY, DITHER>(a, i, x, ENTRY == TENSOR ? 0 : entry_of(a, i));
      bool zero = ZERO && x == 0.0f, inside = zero || (found.x >= a.first && found.x < first + a.size);
      q = zero ? 4096 : found.x;
      is_exact = !zero && !found.y;
      is_code = !is_exact && (LATE || !inside);
      if (zero)
        digit = 0;
      else if (!is_exact && inside)
        digit = q - first;
    }
    if (!LATE && todo) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (r == n / 4) packed[r] = (packed[r] & ~(255u << (8 * (n % 4)))) | (u32)digit << (8 * (n % 4));
    }
    u32 by_code = __ballot_sync(~0u, is_code), by_value = __ballot_sync(~0u, is_exact);
    u32 position = (u32)(i - start), at = is_code ? out.coded : out.lost;
    at += __popc((is_code ? by_code : by_value) & below);
    if (is_code && at < CODES) out.codes[at] = position << 16 | (u32)(q & 0xffff);
    if (is_exact && at < EXACTS) {
      if (sizeof(T) == 4) {
        out.exacts[2 * at] = position;
        out.exacts[2 * at + 1] = *(const u32*)&value;
      } else {
        out.exacts[at] = position << 16 | *(const u16*)&value;
      }
    }
    out.coded += __popc(by_code), out.lost += __popc(by_value);
    if (is_code || is_exact) escaped |= 1u << n;
    todo &= todo - 1;
  }
  return escaped;
}

// Moves the staged stream to a slot, but for a last odd word. False if there is no slot, or no room in it.
__device__ __forceinline__ bool spill(const Args& a, Staged& out, int lane) {
  if (!out.slot) {
    u32 number = 0;
    if (lane == 0) number = (u32)(atomicAdd(a.work, 1ull << 32) >> 32);
    number = __shfl_sync(~0u, number, 0);
    if (number >= (u32)a.slots) return false;
    out.slot = a.spill + (u64)number * (SPILL / 2);
  }
  u32 even = out.length / 2 * 2;
  if (out.spilled + even > SPILL) return false;
  __syncwarp();
  u32* to = (u32*)out.slot + out.spilled / 2;
  for (u32 w = lane; w < even / 2; w += 32) to[w] = ((const u32*)out.stream)[w];
  u16 last = out.stream[even < out.length ? even : 0];
  __syncwarp();
  if (lane == 0) out.stream[0] = last;
  __syncwarp();
  out.spilled += even, out.length -= even;
  return true;
}

// Byte offsets of the symbols' entries: digit n of the rows counts 16 * size ** (n % V).
template <int V, int ROWS>
__device__ __forceinline__ void symbols_of(const u32* packed, const u32* powers, u32* offsets) {
#pragma unroll
  for (int t = 0; t < 4 * ROWS / V; ++t) offsets[t] = 0;
#pragma unroll
  for (int n = 0; n < 4 * ROWS; n += 2) {
    int t = n / V, next = (n + 1) / V;
    u32 word = packed[n / 4], first = powers[n % V], second = powers[(n + 1) % V] << 16;
    if (t == next) {
      offsets[t] = dot2(first | second, word, n % 4 != 0, offsets[t]);
    } else {
      offsets[t] = dot2(first, word, n % 4 != 0, offsets[t]);
      offsets[next] = dot2(second, word, n % 4 != 0, offsets[next]);
    }
  }
}

// ROWS rows make a round: whole symbols for every V.
template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ void encode_chunk(const Args& a, u64 start, const uint4* table, Staged& out, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  const u32 below = (1u << lane) - 1, begin = address_of(out.stream);
  const u32 full = begin + 2 * a.stage - 64 * S;
  const Digits digits = digits_for<T, ENTRY, ZERO, DITHER>(a);
  u32 powers[V];
  powers[0] = 16;
#pragma unroll
  for (int k = 1; k < V; ++k) powers[k] = powers[k - 1] * a.size;
  u32 s = 1u << 15, cursor = begin;
  int round = a.rows / ROWS - 1;
  u32 g = (u32)(start / 4) + lane + round * ROWS * 32;
  Walk<ENTRY> walk;
  walk.begin(a, g + (ROWS - 1) * 32);
  float inverse[4], origin[4];
  if (ENTRY == TENSOR) walk.read(a, a.inverse, inverse);
  walk.read_origins(a, digits.origin, origin);
  Group<T> group[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) load<WHOLE>(group[r], a, (u64)g + r * 32);
  for (; round >= 0; --round) {
    if (cursor > full) {
      out.length = (cursor - begin) / 2;
      if (!spill(a, out, lane)) {
        out.raw = true;
        return;
      }
      cursor = begin + 2 * out.length;
    }
    u32 packed[ROWS], most[ROWS], least[ROWS];
#pragma unroll
    for (int r = ROWS - 1; r >= 0; --r) {
      if (ENTRY != TENSOR) walk.read(a, a.inverse, inverse);
      if (Centred<ENTRY>::value) walk.read_origins(a, digits.origin, origin);
      u32 word = DITHER ? hash(g + r * 32, a.low, a.high) : 0;
      packed[r] = digits_of<T, ZERO, DITHER>(digits, group[r], inverse, origin, word, least[r], most[r]);
      if (ZERO == 2) most[r] |= signs_of(group[r]);  // far beyond `high`: 16-bit types reach few digits
      if (ENTRY != TENSOR) walk.back(a);
    }
    if (round) {  // there is time until they are needed
#pragma unroll
      for (int r = 0; r < ROWS; ++r) load<WHOLE>(group[r], a, (u64)g + r * 32 - ROWS * 32);
    }
    u32 escaped = 0;
    bool bad = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) bad |= most[r] >= digits.high || (ZERO != 2 && least[r] < digits.low);
    if (__any_sync(~0u, bad)) {
      u32 rows = 0, todo = 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (most[r] >= digits.high || (ZERO != 2 && least[r] < digits.low)) rows |= 1u << r;
      for (; rows; rows &= rows - 1) {
        int r = __ffs(rows) - 1;
        todo |= doubtful<T, ENTRY, ZERO, DITHER, WHOLE>(a, digits, g + r * 32) << (4 * r);
      }
      escaped = mend<T, ROWS, ENTRY, ZERO, DITHER, WHOLE, false>(a, start, g, todo, packed, out, lane);
    }
    u32 offsets[S], unused = 0;
    symbols_of<V, ROWS>(packed, powers, offsets);
    uint4 e[S];
#pragma unroll
    for (int t = 0; t < S; ++t) {
      e[t] = *(const uint4*)((const u8*)table + offsets[t]);
      unused |= e[t].y;
    }
#pragma unroll
    for (int t = S - 1; t >= 0; --t) {
      emit(s, cursor, e[t].y & 0x7ff80000u, below, (u8*)out.stream);
      s += __funnelshift_r(__umulhi(s, e[t].x), 0, e[t].y) * e[t].z + e[t].w;
    }
    if (__any_sync(~0u, (int)unused < 0)) {  // symbols without a share: the table has `fill` in their places
      u32 todo = 0;
#pragma unroll
      for (int t = 0; t < S; ++t)
        if (e[t].y & UNUSED) todo |= ((1u << V) - 1) << (t * V);
      mend<T, ROWS, ENTRY, ZERO, DITHER, WHOLE, true>(a, start, g, todo & ~escaped, packed, out, lane);
    }
    g -= ROWS * 32;
  }
  out.length = (cursor - begin) / 2;
  out.state = s;
}

// The chunk's words at their place: the states, the stream, the escapes.
template <typename T>
__device__ __forceinline__ void write_staged(const Args& a, const Staged& staged, u32 base, int lane) {
  u32* out = a.words + base;
  out[lane] = staged.state;
  out += 32;
  if (staged.length & 1 && lane == 0) staged.stream[staged.length] = 0;
  __syncwarp();
  for (u32 w = lane; w < staged.spilled / 2; w += 32) out[w] = staged.slot[w];
  out += staged.spilled / 2;
  u32 pairs = (staged.length + 1) / 2;
  for (u32 w = lane; w < pairs; w += 32) out[w] = ((const u32*)staged.stream)[w];
  out += pairs;
  for (u32 w = lane; w < staged.coded; w += 32) out[w] = staged.codes[w];
  out += staged.coded;
  for (u32 w = lane; w < staged.lost * Type<T>::escape; w += 32) out[w] = staged.exacts[w];
}

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER>
__global__ void __launch_bounds__(256, 4) rans_encode(const Args a) {
  __shared__ uint4 table[256];
  __shared__ Places places;
  extern __shared__ u32 dynamic[];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  {
    int symbols = 1, fill_symbol = 0;
    for (int k = 0; k < V; ++k) symbols *= a.size, fill_symbol = fill_symbol * a.size + a.fill;
    u32 freq = (int)threadIdx.x < symbols ? a.freqs[threadIdx.x] : 0;
    table[threadIdx.x] = encoding_of(freq, slots_before(freq));
    __syncthreads();
    if (freq == 0) {
      uint4 fill = table[fill_symbol];
      fill.y |= UNUSED;
      table[threadIdx.x] = fill;
    }
  }
  u32 ticket = take_ticket(a);  // synchronises the block
  u32* own = dynamic + warp * (a.stage / 2 + CODES + EXACTS * Type<T>::escape);
  Staged staged = {(u16*)own, own + a.stage / 2, own + a.stage / 2 + CODES, 0, 0, 0, 0, 0, 0, false};
  u32 chunk = ticket * 8 + warp;
  u64 start = (u64)chunk * a.rows * 128;
  u32 valid = chunk < a.chunks ? (u32)min(a.count - start, (u64)a.rows * 128) : 0;
  u32 words = 0;
  if (valid) {
    if (valid == a.rows * 128 && aligned(a.x, sizeof(T) * 4))
      encode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, true>(a, start, table, staged, lane);
    else
      encode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, false>(a, start, table, staged, lane);
    words = 32 + (staged.spilled + staged.length + 1) / 2 + staged.coded + staged.lost * Type<T>::escape;
    u32 as_raw = raw_words<T>(valid);
    staged.raw |= staged.coded > CODES || staged.lost > EXACTS || words >= as_raw;
    if (staged.raw) words = as_raw;
  }
  publish(a, places, ticket, words, warp, lane);
  u32 base = place_of(a, places, ticket, warp, lane);
  if (!valid) return;
  if (lane == 0) {
    a.heads[3 * chunk] = (int)base;
    a.heads[3 * chunk + 1] = staged.raw ? -1 : (int)(staged.spilled + staged.length);
    a.heads[3 * chunk + 2] = staged.raw ? 0 : (int)(staged.coded | staged.lost << 16);
  }
  if ((u64)base + words > a.capacity) return;
  if (staged.raw)
    write_raw<T>(a, start, base, words, lane);
  else
    write_staged<T>(a, staged, base, lane);
}

// The stream of a chunk, read from its end: a window of 512 words in shared memory, the next 256 on their way.
struct Window {
  const u32* from;
  u32* ring;
  u32 next[4];
  int fill, pairs;

  __device__ __forceinline__ void fetch(int first, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int at = first / 2 + j * 32 + lane;
      next[j] = first >= 0 && at < pairs ? __ldg(from + at) : 0;
    }
  }
  __device__ __forceinline__ void put(int first, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) ring[(first / 2 & 255) + j * 32 + lane] = next[j];
  }
  __device__ __forceinline__ void begin(const u32* stream, u32* memory, int length, int lane) {
    from = stream, ring = memory, pairs = (length + 1) / 2;
    fill = length ? (length - 1) / 256 * 256 : 0;
    fetch(fill, lane);
    __syncwarp();  // the last chunk's window has been read
    put(fill, lane);
    __syncwarp();
    fetch(fill - 256, lane);
  }
  __device__ __forceinline__ void slide(int lane) {
    fill -= 256;
    put(fill, lane);
    __syncwarp();
    fetch(fill - 256, lane);
  }
};

// The lanes with states below 2**15 take a word each from the end of the stream, the last lane's first. `left` is twice
// the words left; `upward` has the bits of this lane and those after it; the ring is aligned to its 1024 bytes.
__device__ __forceinline__ void refill(u32& s, u32& left, u32 upward, u32 address, const u32* ring) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{ .reg .pred p; .reg .u32 all, after, at;"
      "  setp.lt.u32 p, %0, 32768;"
      "  vote.sync.ballot.b32 all, p, 0xffffffff;"
      "  and.b32 after, all, %2;"
      "  popc.b32 after, after;"
      "  mad.lo.u32 at, after, -2, %1;"
      "  lop3.b32 at, at, 1023, %3, 0xea;"
      "  ld.shared.u16 at, [at];"
      "  @p prmt.b32 %0, at, %0, 0x5410;"
      "  popc.b32 all, all;"
      "  mad.lo.u32 %1, all, -2, %1; }"
      : "+r"(s), "+r"(left) : "r"(upward), "r"(address) : "memory");
#else
  u32 all = __ballot_sync(~0u, s < 32768);
  if (s < 32768) s = s << 16 | ((const u16*)ring)[(left / 2 - __popc(all & upward)) & 511];
  left -= 2 * __popc(all);
#endif
}

// Entry s % 4096 of the table of slots.
__device__ __forceinline__ uint2 slot_of(u32 s, u32 address, const uint2* slots) {
#ifdef __CUDA_ARCH__
  uint2 e;
  asm volatile("{ .reg .u32 at; and.b32 at, %2, 4095; mad.lo.u32 at, at, 8, %3; ld.shared.v2.u32 {%0, %1}, [at]; }"
               : "=r"(e.x), "=r"(e.y) : "r"(s), "r"(address));
  return e;
#else
  return slots[s & 4095];
#endif
}

// A symbol as it is decoded: a byte for each digit and, where there is room, 0x4b in byte 3. If zero has a code, the
// digits that do not mean zero are marked by a top bit, which is that of byte 1 for a single digit: it needs all eight.
template <int V, int ZERO> __device__ __forceinline__ u32 unpacked(int symbol, int size) {
  u32 packed = V < 4 ? 0x4b000000u : 0;
  if (V == 1) return packed | (u32)symbol | (ZERO && symbol ? 0x8000u : 0);
  for (int k = 0; k < V; ++k, symbol /= size)
    packed |= (u32)(symbol % size + (ZERO && symbol % size ? 128 : 0)) << (8 * k);
  return packed;
}

// The float of bytes 0x4b, 0x4b, the digit of value n, 255 - dither: FLOATS + 256 * digit + 255 - dither.
constexpr float FLOATS = 13303808.0f;
template <int V> __device__ __forceinline__ float float_of(const u32* packed, u32 word, int n) {
  u32 from = packed[n / V], selector = (n % V) << 4 | (4 + n % 4);
  if (V < 4) return __uint_as_float(permute(from, word, 0x3300 | selector));
  return __uint_as_float(dot2(0x01000001u, permute(from, word, selector), false, 0x4b4b0000u));
}

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool MASK, bool WHOLE>
__device__ __forceinline__ void decode_chunk(
    const Args& a, u64 start, u32 base, int length, const uint2* slots, u32* ring, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  const u32 upward = kept(~0u << lane), address = kept(address_of(ring)), table = kept(address_of(slots));
  const int bias = (ZERO ? 1 : 0) - a.first;
  const float origin = FLOATS + (float)(256 * bias + (DITHER ? 255 : 128) + (ZERO && V > 1 ? 32768 : 0));
  const int rounds = a.rows / ROWS;
  u32 s = a.words[base + lane], left = 2 * length;
  Window window;
  window.begin(a.words + base + 32, ring, length, lane);
  u32 g = (u32)(start / 4) + lane;
  Walk<ENTRY> walk;
  walk.begin(a, g);
  float unit[4], origins[4];
  if (ENTRY == TENSOR && !MASK) walk.read_units(a, unit);
  if (!MASK) walk.read_origins(a, origin, origins);
  for (int round = 0; round < rounds; ++round) {
    if (window.fill && (int)left < 2 * window.fill + 64 * S) window.slide(lane);
    u32 packed[S];
#pragma unroll
    for (int t = 0; t < S; ++t) {
      uint2 e = slot_of(s, table, slots);
      packed[t] = e.y;
      s = (e.x >> 16) * (s >> 12) + (e.x & 0xffff);
      refill(s, left, upward, address, ring);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float y[4];
      if (ENTRY != TENSOR && !MASK) walk.read_units(a, unit);
      if (Centred<ENTRY>::value && !MASK) walk.read_origins(a, origin, origins);
      u32 word = DITHER && !MASK ? inverted_hash(g + r * 32, a.low, a.high) : 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float m = float_of<V>(packed, word, 4 * r + k) - origins[k];
        y[k] = MASK ? 1.0f : fmaf(m, unit[k], unit[k] * (DITHER ? 127.5f : 128.0f));
      }
      Group<T> group;
      group.set(y);
      if (ZERO) {
        u32 marks[4];
        int bytes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) marks[k] = packed[(4 * r + k) / V], bytes[k] = V == 1 ? 1 : (4 * r + k) % V;
        clear_zeros(group, marks, bytes);
      }
      store<WHOLE>(group, a, (u64)g + r * 32);
      if (ENTRY != TENSOR) walk.next(a);
    }
    g += ROWS * 32;
  }
}

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool MASK>
__global__ void __launch_bounds__(256, 5) rans_decode(const Args a) {
  __shared__ __align__(1024) u32 rings[8][256];
  __shared__ uint2 slots[4096];  // share << 16 | slot - slots before, and the symbol's digits
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  {
    u32 *firsts = rings[0], *digits = rings[1];  // before they are rings
    int symbols = 1;
    for (int k = 0; k < V; ++k) symbols *= a.size;
    u32 freq = (int)threadIdx.x < symbols ? a.freqs[threadIdx.x] : 0;
    firsts[threadIdx.x] = slots_before(freq) | freq << 16;
    digits[threadIdx.x] = unpacked<V, ZERO>(threadIdx.x, a.size);
    __syncthreads();
    for (int symbol = warp; symbol < symbols; symbol += 8) {
      u32 share = firsts[symbol] >> 16, from = firsts[symbol] & 0xffff;
      for (u32 j = lane; j < share; j += 32) slots[from + j] = make_uint2(share << 16 | j, digits[symbol]);
    }
    __syncthreads();
  }
  for (u32 chunk = blockIdx.x * 8 + warp; chunk < a.chunks; chunk += gridDim.x * 8) {
    u64 start = (u64)chunk * a.rows * 128;
    u32 valid = (u32)min(a.count - start, (u64)a.rows * 128);
    u32 base = (u32)a.heads[3 * chunk];
    int length = a.heads[3 * chunk + 1];
    u32 escapes = (u32)a.heads[3 * chunk + 2];
    if (length < 0) {
      read_raw<T, MASK>(a, start, base, valid, lane);
      continue;
    }
    if (valid == a.rows * 128 && aligned(a.x, sizeof(T) * 4))
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, MASK, true>(a, start, base, length, slots, rings[warp], lane);
    else
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, MASK, false>(a, start, base, length, slots, rings[warp], lane);
    if (escapes) {
      __syncwarp();
      const u32* list = a.words + base + 32 + (length + 1) / 2;
      u32 coded = escapes & 0xffff;
      for (u32 w = lane; w < coded; w += 32) {
        u64 i = start + (list[w] >> 16);
        int q = (int)(list[w] << 16) >> 16;
        float y = 1.0f;
        if (!MASK) {
          u32 entry = ENTRY == TENSOR ? 0 : entry_of(a, i);
          float unit = __uint_as_float((u32)a.step[entry] << 16) * 0.00390625f;
          u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), a.low, a.high) : 0, (int)(i & 3));
          y = value_of<DITHER>(q + centre_of<ENTRY>(a, entry), shift, unit);
        }
        if (ZERO && q == 4096) y = 0.0f;
        narrow(y, (T*)a.x + i);
      }
      read_escapes<T, MASK>(a, start, list + coded, escapes >> 16, lane);
    }
  }
}

// ---- blocks ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 class_of(u32 bits) {  // of a block's codes, or-ed together
  u32 length = 32 - __clz(bits);
  return length <= 5 ? length : length <= 7 ? 6 : 7;
}
__device__ __forceinline__ u32 width_of(u32 klass) { return klass < 6 ? klass : klass == 6 ? 7 : 11; }

__device__ __forceinline__ u32 scan(u32 value, int lane) {  // inclusive
  for (int o = 1; o < 32; o <<= 1) {
    u32 below = __shfl_up_sync(~0u, value, o);
    if (lane >= o) value += below;
  }
  return value;
}

// Bit `plane` of the eight nibbles of four words, and back.
constexpr u32 NIBBLES = 0x11111111u;
__device__ __forceinline__ u32 plane_of(const u32* nibbles, int plane) {
  return (nibbles[0] >> plane & NIBBLES) | (nibbles[1] >> plane & NIBBLES) << 1 | (nibbles[2] >> plane & NIBBLES) << 2 |
         (nibbles[3] >> plane & NIBBLES) << 3;
}
__device__ __forceinline__ void add_plane(u32* nibbles, u32 word, int plane) {
#pragma unroll
  for (int w = 0; w < 4; ++w) nibbles[w] |= (word >> w & NIBBLES) << plane;
}

// The planes of bits `from` .. `from` + 3 of 32 codes, of which a lane has `width`.
template <int FROM> __device__ __forceinline__ void write_planes(const int* code, u32 width, u32* out) {
  u32 nibbles[4] = {0, 0, 0, 0};
#pragma unroll
  for (int n = 0; n < 32; ++n) nibbles[n / 8] |= ((u32)code[n] >> FROM & 15) << (4 * (n % 8));
#pragma unroll
  for (int p = 0; p < 4; ++p)
    if (FROM + p < width) out[FROM + p] = plane_of(nibbles, p);
}

// Bytes of ones for values that are not zero, whatever their signs.
template <typename T> __device__ __forceinline__ u32 nonzero_magnitudes(Group<T> group) {
  group.v.x &= 0x7fff7fffu, group.v.y &= 0x7fff7fffu;
  return nonzero_bytes(group);
}
template <> __device__ __forceinline__ u32 nonzero_magnitudes(Group<float> group) {
  float y[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) y[k] = __uint_as_float(__float_as_uint(group.at(k)) & 0x7fffffffu);
  group.set(y);
  return nonzero_bytes(group);
}

// Four bytes below 16 as four nibbles.
__device__ __forceinline__ u32 nibbles_of(u32 bytes) {
  return dot2(0x10000100u, bytes, true, dot2(0x00100001u, bytes, false, 0));
}

// What a lane knows of its block: eight codes of four bits a word, its signs, and all its codes or-ed together.
struct Block {
  u32 nibbles[4], signs, all;
};

// The block of a lane in a whole chunk, if all codes of the chunk are sure and have up to four bits. A byte for each
// code, 128 more than it if there are signs; else, with a code for zero, one more.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool SIGNED>
__device__ __forceinline__ bool quantise_narrow(
    const Args& a, u64 start, const Group<T>* group, Block& block, int lane) {
  constexpr int middle = SIGNED ? 128 : ZERO ? 1 : 0, reach = Room<T, ENTRY>::value < 14 ? Room<T, ENTRY>::value : 14;
  constexpr int least_digit = middle - (SIGNED ? reach : 0), most_digit = middle + reach;
  const Digits digits = {12582912.0f + (float)(256 * middle + (DITHER ? 0 : 128)),
                         (u32)(ROUNDING + 256 * least_digit), (u32)(ROUNDING + 256 * (most_digit + 1))};
  u32 most = 0, least = ~0u, halves[8], lows[8];
  block.signs = block.all = 0;
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
  float inverse[4], origin[4];
  if (ENTRY == TENSOR) walk.read(a, a.inverse, inverse);
  walk.read_origins(a, digits.origin, origin);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (ENTRY != TENSOR) walk.read(a, a.inverse, inverse);
    if (Centred<ENTRY>::value) walk.read_origins(a, digits.origin, origin);
    u32 word = DITHER ? hash((u32)walk.group, a.low, a.high) : 0, low = ~0u, high = 0;
    u32 bytes = digits_of<T, SIGNED ? 0 : ZERO ? 2 : 0, DITHER>(digits, group[j], inverse, origin, word, low, high);
    most = max(most, high);
    if (SIGNED) {
      least = min(least, low);
      u32 positive = permute(bytes, 0, 0xba98), there = ZERO ? nonzero_magnitudes(group[j]) : ~0u;
      u32 negative = ~positive & 0x01010101u;
      bytes = ((bytes ^ positive ^ 0x7f7f7f7fu) + negative + (ZERO ? 0x01010101u : 0)) & there;
      lows[j] = nibbles_of(negative & there);
    }
    halves[j] = nibbles_of(bytes);
    block.all |= bytes;
    walk.next(a);
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    block.nibbles[w] = permute(halves[2 * w], halves[2 * w + 1], 0x5410);
    if (SIGNED) block.signs |= permute(lows[2 * w], lows[2 * w + 1], 0x5410) << w;
  }
  block.all |= block.all >> 16;
  block.all = (block.all | block.all >> 8) & 255;
  return __all_sync(~0u, most < digits.high && (!SIGNED || least >= digits.low));
}
template <typename T, int ENTRY, int ZERO, bool DITHER>
__device__ __forceinline__ bool quantise_narrow(const Args& a, u64 start, Block& block, int lane) {
  Group<T> group[8];
  u32 signs = Centred<ENTRY>::value;  // codes below a centre are negative, whatever their values
#pragma unroll
  for (int j = 0; j < 8; ++j) group[j].load(a.x, start / 4 + lane + j * 32);
#pragma unroll
  for (int j = 0; j < 8; ++j) signs |= signs_of(group[j]);
  if (__any_sync(~0u, signs != 0)) return quantise_narrow<T, ENTRY, ZERO, DITHER, true>(a, start, group, block, lane);
  return quantise_narrow<T, ENTRY, ZERO, DITHER, false>(a, start, group, block, lane);
}

// The codes of a lane's block, its signs, and which values are lost.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ void quantise_block(const Args& a, u64 start, int* code, u32& signs, u32& lost, int lane) {
  u64 g = start / 4 + lane;
  Group<T> group[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) load<WHOLE>(group[j], a, g + j * 32);
  Walk<ENTRY> walk;
  walk.begin(a, g);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float inverse[4];
    walk.read(a, a.inverse, inverse);
    u32 word = DITHER ? hash((u32)g + j * 32, a.low, a.high) : 0;
    int worst = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k;
      float x = group[j].at(k);
      int q = code_of(x, inverse[k], shift_of<DITHER>(word, k)) - centre_of<ENTRY>(a, walk.of(a, k));
      u32 negative = (u32)(q >> 31) & 1u << (4 * (n % 8) + n / 8);
      int magnitude = q < 0 ? -q : q;
      worst = max(worst, magnitude);
      if (ZERO) {
        bool zero = x == 0.0f;
        magnitude = zero ? 0 : magnitude + 1;
        negative = zero ? 0 : negative;
      }
      code[n] = magnitude;
      signs |= negative;
    }
    if (worst > Room<T, ENTRY>::value || !WHOLE) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int n = 4 * j + k;
        u64 i = 4 * (g + j * 32) + k;
        float x = group[j].at(k);
        bool there = WHOLE || i < a.count;
        bool kept = there && ((ZERO && x == 0.0f) || careful<T, ENTRY, DITHER>(a, i, x, walk.of(a, k)).y);
        if (kept) continue;
        code[n] = 0;
        signs &= ~(1u << (4 * (n % 8) + n / 8));
        if (there) lost |= 1u << n;
      }
    }
    if (ENTRY != TENSOR) walk.next(a);
  }
}

template <typename T, int ENTRY, int ZERO, bool DITHER>
__global__ void __launch_bounds__(256, 4) blocks_encode(const Args a) {
  __shared__ Places places;
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  u32 ticket = take_ticket(a);
  u32 chunk = ticket * 8 + warp;
  u64 start = (u64)chunk * 1024;
  u32 valid = chunk < a.chunks ? (u32)min(a.count - start, 1024ull) : 0;
  Block block = {{0, 0, 0, 0}, 0, 0};
  int code[32];  // magnitudes
  u32 lost = 0, words = 0, inside = 0, planes = 0, klass = 0;
  bool raw = false, narrow = false;
  if (valid) {
    bool whole = valid == 1024 && aligned(a.x, sizeof(T) * 4);
    narrow = whole && quantise_narrow<T, ENTRY, ZERO, DITHER>(a, start, block, lane);
    if (!narrow) {
      block.signs = block.all = 0;
      if (whole)
        quantise_block<T, ENTRY, ZERO, DITHER, true>(a, start, code, block.signs, lost, lane);
      else
        quantise_block<T, ENTRY, ZERO, DITHER, false>(a, start, code, block.signs, lost, lane);
#pragma unroll
      for (int n = 0; n < 32; ++n) block.all |= (u32)code[n];
    }
    klass = class_of(block.all);
    planes = width_of(klass) + (block.signs ? 1 : 0);
    u32 upto = scan(planes, lane);
    inside = upto - planes;
    words = __shfl_sync(~0u, upto, 31);
    if (__any_sync(~0u, lost != 0)) words += __shfl_sync(~0u, scan(__popc(lost), lane), 31) * Type<T>::escape;
    u32 as_raw = raw_words<T>(valid);
    raw = words >= as_raw;
    if (raw) words = as_raw;
  }
  publish(a, places, ticket, words, warp, lane);
  u32 plane[4] = {plane_of(block.nibbles, 0), plane_of(block.nibbles, 1), plane_of(block.nibbles, 2),
                  plane_of(block.nibbles, 3)};
  u32 base = place_of(a, places, ticket, warp, lane);
  if (!valid) return;
  u32 nibble = raw ? (lane == 0 ? 8 : 0) : klass + (block.signs ? 8 : 0);
  u32 upper = __shfl_down_sync(~0u, nibble, 1);
  if (!(lane & 1)) a.headers[(u64)chunk * 16 + lane / 2] = (u8)(nibble | upper << 4);
  if (lane == 0) {
    a.heads[chunk] = (int)base;
    if (chunk == a.chunks - 1) a.heads[chunk + 1] = (int)(base + words);
  }
  if ((u64)base + words > a.capacity) return;
  if (raw) {
    write_raw<T>(a, start, base, words, lane);
    return;
  }
  u32* out = a.words + base + inside;
  u32 width = width_of(klass);
  if (narrow) {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      if (p < width) out[p] = plane[p];
  } else {
    write_planes<0>(code, width, out);
    write_planes<4>(code, width, out);
    if (__any_sync(~0u, width > 7)) write_planes<8>(code, width, out);
  }
  if (block.signs) out[width] = block.signs;
  if (__any_sync(~0u, lost != 0)) {  // in order of position: group after group, lane after lane
    u32 at = base + __shfl_sync(~0u, inside + planes, 31);
    for (int j = 0; j < 8; ++j) {
      u32 mine = lost >> (4 * j) & 15;
      u32 upto = scan(__popc(mine), lane);
      u32* list = a.words + at + (upto - __popc(mine)) * Type<T>::escape;
      for (int k = 0; k < 4; ++k) {
        if (!(mine >> k & 1)) continue;
        u32 position = j * 128 + lane * 4 + k;
        if (sizeof(T) == 4) {
          list[0] = position;
          list[1] = ((const u32*)a.x)[start + position];
        } else {
          list[0] = position << 16 | ((const u16*)a.x)[start + position];
        }
        list += Type<T>::escape;
      }
      at += __shfl_sync(~0u, upto, 31) * Type<T>::escape;
    }
  }
}

// The values of a whole chunk whose codes have up to four bits, from a byte for each: even ones, then odd ones.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool MASK, bool SIGNED>
__device__ __forceinline__ void put_narrow(const Args& a, u64 start, const u32* low, u32 signs, int lane) {
  const float origin = 12582912.0f + (DITHER ? 255.0f : 128.0f) + (ZERO && !SIGNED ? 256.0f : 0.0f);
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
  float unit[4], origins[4];
  if (ENTRY == TENSOR && !MASK) walk.read_units(a, unit);
  if (!MASK) walk.read_origins(a, origin, origins);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 bytes[2] = {low[j / 2] & 0x0f0f0f0fu, low[j / 2] >> 4 & 0x0f0f0f0fu};
    float y[4];
    if (ENTRY != TENSOR && !MASK) walk.read_units(a, unit);
    if (Centred<ENTRY>::value && !MASK) walk.read_origins(a, origin, origins);
    u32 word = DITHER && !MASK ? inverted_hash((u32)walk.group, a.low, a.high) : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k, b = n % 8 / 2;
      u32 weight = 256u << (16 * (b & 1));
      u32 sum = DITHER ? dot4(word, 1u << (8 * k), ROUNDING) : ROUNDING;
      if (SIGNED) {
        u32 size = dot2(weight, bytes[k & 1], b > 1, ZERO ? -256 : 0);
        sum = signs & 1u << (4 * (n % 8) + n / 8) ? sum - size : sum + size;
      } else {
        sum = dot2(weight, bytes[k & 1], b > 1, sum);
      }
      y[k] = MASK ? 1.0f : fmaf(__uint_as_float(sum) - origins[k], unit[k], unit[k] * (DITHER ? 127.5f : 128.0f));
    }
    Group<T> group;
    group.set(y);
    if (ZERO) {
      u32 first = bytes[0] + 0x7f7f7f7fu, second = bytes[1] + 0x7f7f7f7fu;
      u32 marks[4] = {first, second, first, second};
      int b = j % 2 * 2, at[4] = {b, b, b + 1, b + 1};
      clear_zeros(group, marks, at);
    }
    store<true>(group, a, walk.group);
    walk.next(a);
  }
}

// The same for any chunk.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool MASK>
__device__ __forceinline__ void put_wide(
    const Args& a, u64 start, const u32* low, const u32* in, u32 width, u32 signs, bool whole, int lane) {
  u32 high[4] = {0, 0, 0, 0}, top[4] = {0, 0, 0, 0};
#pragma unroll
  for (int p = 4; p < 11; ++p)
    if (p < width) add_plane(p < 8 ? high : top, in[p], p & 3);
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float y[4], unit[4], origins[4];
    if (!MASK) walk.read_units(a, unit), walk.read_origins(a, 12582912.0f, origins);
    u32 word = DITHER ? hash((u32)walk.group, a.low, a.high) : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k, at = 4 * (n % 8);
      u32 code = (low[n / 8] >> at & 15) | (high[n / 8] >> at & 15) << 4 | (top[n / 8] >> at & 15) << 8;
      if (MASK) {
        y[k] = code ? 1.0f : 0.0f;
      } else {
        int q = (int)code - (ZERO ? 1 : 0);
        q = signs >> (at + n / 8) & 1 ? -q : q;
        float m = __uint_as_float((u32)(ROUNDING + 256 * q - (int)shift_of<DITHER>(word, k))) - origins[k];
        y[k] = fmaf(m, unit[k], unit[k] * (DITHER ? 127.5f : 128.0f));
        if (ZERO) y[k] = code ? y[k] : 0.0f;
      }
    }
    Group<T> group;
    group.set(y);
    if (whole)
      store<true>(group, a, walk.group);
    else
      store<false>(group, a, walk.group);
    walk.next(a);
  }
}

template <typename T, int ENTRY, int ZERO, bool DITHER, bool MASK>
__global__ void __launch_bounds__(256) blocks_decode(const Args a) {
  int lane = threadIdx.x & 31;
  const bool even = aligned(a.x, sizeof(T) * 4);
  for (u32 chunk = blockIdx.x * 8 + threadIdx.x / 32; chunk < a.chunks; chunk += gridDim.x * 8) {
    u64 start = (u64)chunk * 1024;
    u32 valid = (u32)min(a.count - start, 1024ull);
    u32 base = (u32)a.heads[chunk], after = (u32)a.heads[chunk + 1];
    u32 nibble = a.headers[(u64)chunk * 16 + lane / 2] >> (4 * (lane & 1)) & 15;
    if (__shfl_sync(~0u, nibble, 0) == 8) {
      read_raw<T, MASK>(a, start, base, valid, lane);
      continue;
    }
    u32 width = width_of(nibble & 7), planes = width + (nibble >> 3);
    u32 upto = scan(planes, lane);
    const u32* in = a.words + base + upto - planes;
    u32 total = __shfl_sync(~0u, upto, 31);
    u32 low[4] = {0, 0, 0, 0};
#pragma unroll
    for (int p = 0; p < 4; ++p)
      if (p < width) add_plane(low, in[p], p);
    u32 signs = nibble >> 3 ? in[width] : 0;
    bool whole = even && valid == 1024;
    if (!whole || __any_sync(~0u, width > 4))
      put_wide<T, ENTRY, ZERO, DITHER, MASK>(a, start, low, in, width, signs, whole, lane);
    else if (!MASK && __any_sync(~0u, signs != 0))
      put_narrow<T, ENTRY, ZERO, DITHER, MASK, true>(a, start, low, signs, lane);
    else
      put_narrow<T, ENTRY, ZERO, DITHER, MASK, false>(a, start, low, signs, lane);
    u32 escapes = (after - base - total) / Type<T>::escape;
    if (escapes) {
      __syncwarp();
      read_escapes<T, MASK>(a, start, a.words + base + total, escapes, lane);
    }
  }
}
