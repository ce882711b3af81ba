// The codec sz on NVIDIA GPUs: the formats of lowtide.coding.blocks and lowtide.coding.rans, the arithmetic of
// lowtide.coding.grid. One pass over the raw tensor each way; a warp codes a chunk; sizes stay on the device.
//
// A lane loads four neighbours at a time (a group), so that one dither hash serves a load. Chunks are placed by a
// decoupled look-back over the blocks of the grid: the bytes do not depend on the order in which blocks run. Nothing is
// written past `capacity` words, and `status` (in pinned memory of the host) receives the number of words needed.

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
  float origin;          // rans encoders: x * inverse + origin is the sum that a digit is read from, and sums from
  u32 lowest, beyond;    // `lowest` on and before `beyond` give digits that are sure
  u32 pairs[3];          // rans encoders: 16 * size ** k, and in the upper half 16 * size ** (k + 1)
  int room;              // encoders: codes that keep their promise whatever their centre
  u32 divide, modulo, times, divide2, modulo2, times2;
};

// ---- dtypes ------------------------------------------------------------------------------------------------------

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

// Codes are counted from a centre where a channel has a step of its own.
template <int ENTRY> struct Centred { static constexpr bool value = ENTRY != TENSOR; };

template <int ENTRY> __device__ __forceinline__ u32 entry_of(const Args& a, u64 element) {
  u32 i = (u32)element;  // tensors have fewer than 2**32
  if (ENTRY == TENSOR) return 0;
  if (ENTRY == INNER) return i % a.modulo;
  u32 entry = i / a.divide % a.modulo;
  return ENTRY == ANY ? entry * a.times + i / a.divide2 % a.modulo2 * a.times2 : entry;
}

__device__ __forceinline__ float bfloat(u16 bits) { return __uint_as_float((u32)bits << 16); }
template <int ENTRY> __device__ __forceinline__ float centre_of(const Args& a, u32 entry) {
  return Centred<ENTRY>::value && a.centre ? bfloat(__ldg(a.centre + entry)) : 0.0f;
}

// For INNER a block keeps two numbers a channel in shared memory, ready for use: first all of the one kind, then all of
// the other. Every row of 128 values meets other channels, and reads them again.
template <int ENTRY> __device__ __forceinline__ u32 staged_words(const Args& a) {
  return ENTRY == INNER ? 2 * a.modulo : 0;
}

// Walks the groups of one lane, a row (32 groups) at a time: on, or back with STEP -1. For INNER, `entry` is a place in a
// staged table, in bytes.
template <int ENTRY, int STEP = 1> struct Walk {
  u32 entry, rest, over, left;
  u64 group;
  __device__ __forceinline__ void begin(const Args& a, u64 g) {
    group = g;
    if (ENTRY == TENSOR || ENTRY == ANY) return;
    u32 i = (u32)(4 * g), all = ENTRY == INNER ? a.modulo : a.divide * a.modulo;
    u32 by = STEP > 0 ? 128 % all : all - 128 % all;  // back is on to the same entry
    if (ENTRY == INNER) {
      entry = i % a.modulo * 4, over = by % a.modulo * 4;
      return;
    }
    entry = i / a.divide % a.modulo, rest = i % a.divide;
    over = by / a.divide % a.modulo, left = by % a.divide;
  }
  // What wraps around below zero is larger than what does not: the smaller of both is the one wanted.
  __device__ __forceinline__ void next(const Args& a) {
    group += 32 * STEP;
    if (ENTRY == TENSOR || ENTRY == ANY) return;
    entry += over;
    if (ENTRY != INNER) {
      rest += left;
      entry += rest >= a.divide;
      rest = min(rest, rest - a.divide);
    }
    entry = min(entry, entry - entries(a));
  }
  __device__ __forceinline__ u32 entries(const Args& a) const { return ENTRY == INNER ? 4 * a.modulo : a.modulo; }
  __device__ __forceinline__ u32 of(const Args& a, int k) const {
    if (ENTRY == TENSOR) return 0;
    if (ENTRY == RUNS) return entry;
    if (ENTRY == INNER) return entry / 4 + k;
    if (ENTRY == ANY) return entry_of<ANY>(a, 4 * group + k);
    u32 e = entry + (a.divide == 1 ? k : rest + k >= a.divide);
    return e >= a.modulo ? e - a.modulo : e;
  }
  // The two numbers of each value of a group, by its entry or as they are staged.
  template <typename F>
  __device__ __forceinline__ void read(const Args& a, const float* staged, float* first, float* second, F find) const {
    if (ENTRY == INNER) {
      float4 v = *(const float4*)((const u8*)staged + entry), w = *(const float4*)((const u8*)(staged + a.modulo) + entry);
      first[0] = v.x, first[1] = v.y, first[2] = v.z, first[3] = v.w;
      second[0] = w.x, second[1] = w.y, second[2] = w.z, second[3] = w.w;
    } else if (ENTRY == TENSOR || ENTRY == RUNS) {
      float2 found = find(of(a, 0));
      for (int k = 0; k < 4; ++k) first[k] = found.x, second[k] = found.y;
    } else {
      for (int k = 0; k < 4; ++k) {
        float2 found = find(of(a, k));
        first[k] = found.x, second[k] = found.y;
      }
    }
  }
};

// How values become sums, by entry: the inverse of the step, and the origin, which is `from` without a centre.
template <int ENTRY> struct Scales {
  const Args& a;
  float from;
  __device__ __forceinline__ float2 operator()(u32 entry) const {
    return make_float2(__ldg(a.inverse + entry), fmaf(centre_of<ENTRY>(a, entry), -256.0f, from));
  }
};
// How sums become values: a step is `scale` units.
template <int ENTRY> struct Units {
  const Args& a;
  float from, scale;
  __device__ __forceinline__ float2 operator()(u32 entry) const {
    return make_float2(bfloat(__ldg(a.step + entry)) / scale, fmaf(centre_of<ENTRY>(a, entry), -scale, from));
  }
};

// Fills the staged table; all threads of a block, which must meet before they read it.
template <int ENTRY, typename F> __device__ __forceinline__ void stage(const Args& a, float* staged, F find) {
  if (ENTRY != INNER) return;
  for (u32 entry = threadIdx.x; entry < a.modulo; entry += blockDim.x) {
    float2 found = find(entry);
    staged[entry] = found.x, staged[a.modulo + entry] = found.y;
  }
}

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
  narrow(value_of<DITHER>(q, shift, bfloat(*step) * 0.00390625f), &rounded);
  // Both have at most 11 bits and lie within a fraction of each other: the difference is exact.
  float error = widen(rounded) - x;
  return (error < 0 ? -error : error) <= *bound;
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

// With RESTORED values only plus zero is zero.
template <typename T, bool MASK, bool RESTORED>
__device__ void read_raw(const Args& a, u64 start, u32 base, u32 valid, int lane) {
  for (u32 i = lane; i < valid; i += 32) {
    u32 bits = sizeof(T) == 4 ? a.words[base + i] : ((const u16*)(a.words + base))[i];
    if (MASK && RESTORED) bits = bits != 0;
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

// What a block knows of its chunks' places. Its ticket is its number in the order of starting.
struct Places {
  u32 ticket, lengths[32], total, base;
};
__device__ __forceinline__ void take_ticket(const Args& a, Places& places) {
  if (threadIdx.x == 0) places.ticket = (u32)atomicAdd(a.work, 1ull);
  __syncthreads();
}

// The chunk of a warp, if it has one (`valid` > 0). The ticket can be read again: nothing has to be kept meanwhile.
struct Chunk {
  u32 number, valid;
  u64 start;
};
__device__ __forceinline__ Chunk chunk_of(const Args& a, const Places& places, int warp, u32 size) {
  u32 number = places.ticket * 8 + warp;
  u64 start = (u64)number * size;
  return {number, number < a.chunks ? (u32)min(a.count - start, (u64)size) : 0, start};
}

// The first word of each warp's chunk, given its length. A block publishes its total, then adds up what the blocks
// before it published until it meets one that knows its own place. `work` words: epoch, 1 total or 2 place, words.
// There is time for other work between the two steps, while the blocks before catch up.
__device__ void publish(const Args& a, Places& places, u32 words, int warp, int lane) {
  if (lane == 0) places.lengths[warp] = words;
  __syncthreads();
  if (warp) return;
  u32 ticket = places.ticket;
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
__device__ u32 place_of(const Args& a, Places& places, int warp, int lane) {
  if (warp == 0) {
    __syncwarp();  // lane 31 has left the total
    u32 ticket = places.ticket;
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
  found.x -= (int)centre_of<ENTRY>(a, entry);
  return make_int2(found.x, found.y && found.x >= -2046 && found.x <= 2046);
}

// What element i comes back as, bit for bit: itself where no code carries it. Where zero has a code, another value that
// comes back as zero is minus zero.
template <typename T, int ENTRY, int ZERO, bool DITHER> __device__ __forceinline__ u32 restored(const Args& a, u64 i) {
  T value = ((const T*)a.x)[i];
  float x = widen(value);
  if (ZERO && x == 0.0f) return 0;
  u32 entry = entry_of<ENTRY>(a, i);
  int2 found = careful<T, ENTRY, DITHER>(a, i, x, entry);
  if (found.y) {
    u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), a.low, a.high) : 0, (int)(i & 3));
    int q = found.x + (int)centre_of<ENTRY>(a, entry);
    narrow(value_of<DITHER>(q, shift, bfloat(a.step[entry]) * 0.00390625f), &value);
    if (ZERO && widen(value) == 0.0f) return sizeof(T) == 4 ? 0x80000000u : 0x8000u;
  }
  return sizeof(T) == 4 ? *(const u32*)&value : *(const u16*)&value;
}

// A chunk as it comes back, from element `start` on: whether it is stored so must not change values.
template <typename T, int ENTRY, int ZERO, bool DITHER>
__device__ void write_restored(const Args& a, u64 start, u32 base, u32 words, int lane) {
  constexpr u32 N = 4 / sizeof(T);
  for (u32 w = lane; w < words; w += 32) {
    u32 word = 0;
#pragma unroll 1
    for (u32 k = 0; k < N; ++k) {
      u64 i = start + N * w + k;
      if (i < a.count) word |= restored<T, ENTRY, ZERO, DITHER>(a, i) << (16 * k);
    }
    a.words[base + w] = word;
  }
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

// Values become digits by a multiply-add: the digit is byte 1 of the sum's bits plus the dither. `lowest` <= sum <
// `beyond` holds where the digit is sure to be right: inside the alphabet and within the reach. ZERO: 0, zero has no code
// of its own; 1, it has; 2, it has, and the alphabet begins with the code 0, so that values without a sign are not below.
template <bool DITHER> __device__ __forceinline__ u32 sum_of(float origin, float x, float inverse, u32 word, int k) {
  u32 bits = __float_as_uint(fmaf(x, inverse, origin));
  return DITHER ? dot4(word, 1u << (8 * k), bits) : bits;
}

// The digits of a group, a byte each, and the least and the largest of its sums.
template <typename T, int ZERO, bool DITHER>
__device__ __forceinline__ u32 digits_of(
    u32 lowest, const Group<T>& group, const float* inverse, const float* origin, u32 word, u32& least, u32& most) {
  u32 sum[4], checked[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x = group.at(k);
    sum[k] = checked[k] = sum_of<DITHER>(origin[k], x, inverse[k], word, k);
    if (ZERO == 1) {
      bool zero = x == 0.0f;
      checked[k] = zero ? lowest : checked[k];
      sum[k] = zero ? 0 : sum[k];
    }
  }
  most = max(max(max(checked[0], checked[1]), checked[2]), checked[3]);
  if (ZERO != 2) least = min(min(min(checked[0], checked[1]), checked[2]), checked[3]);
  u32 packed = permute(permute(sum[0], sum[1], 0x51), permute(sum[2], sum[3], 0x51), 0x5410);
  return ZERO == 2 ? packed & nonzero_bytes(group) : packed;
}

// Which values of group g have no digit that is sure, now that their centres are looked at. The group is read again:
// nothing of it has to be kept for this.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ u32 doubtful(const Args& a, u32 g) {
  Group<T> group;
  load<WHOLE>(group, a, g);
  Walk<ENTRY> walk;
  walk.begin(a, g);
  const int first = a.first - (ZERO ? 1 : 0);
  u32 word = DITHER ? hash(g, a.low, a.high) : 0, found = 0;
  bool all = ZERO == 2 && signs_of(group);  // then zeros are not known either
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 entry = walk.of(a, k);
    float2 scale = Scales<ENTRY>{a, a.origin}(entry);
    u32 sum = sum_of<DITHER>(scale.y, group.at(k), scale.x, word, k);
    bool sure = sum >= a.lowest && sum < a.beyond;
    if (Centred<ENTRY>::value) {
      int digit = (int)(sum - ROUNDING) >> 8, q = digit + first + (int)centre_of<ENTRY>(a, entry);
      sure = digit >= a.first - first && digit < a.size && q >= -Type<T>::reach && q <= Type<T>::reach;
    }
    if (all || !(sure || (ZERO && group.at(k) == 0.0f))) found |= 1u << k;
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

// The same for one that all lanes share.
__device__ __forceinline__ u32 held(u32 x) { return __shfl_sync(~0u, x, 0); }

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
      int2 found = careful<T, ENTRY, DITHER>(a, i, x, entry_of<ENTRY>(a, i));
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

// Where in the table, which begins at `address`, the symbols of some rows are: digit n counts 16 * size ** (n % V).
template <int V, int ROWS>
__device__ __forceinline__ void symbols_of(const u32* packed, const u32* pairs, u32 address, u32* places) {
#pragma unroll
  for (int t = 0; t < 4 * ROWS / V; ++t) places[t] = address;
#pragma unroll
  for (int n = 0; n < 4 * ROWS; n += 2) {
    int t = n / V, next = (n + 1) / V;
    places[t] = dot2(V == 1 ? 16 : pairs[n % V], packed[n / 4], n % 4 != 0, places[t]);
    if (next != t) places[next] = dot2(16 << 16, packed[n / 4], n % 4 != 0, places[next]);
  }
}
__device__ __forceinline__ uint4 symbol_at(u32 place, const uint4* table) {
#ifdef __CUDA_ARCH__
  uint4 e;
  asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(e.x), "=r"(e.y), "=r"(e.z), "=r"(e.w) : "r"(place));
  return e;
#else
  return table[place / 16];
#endif
}

// ROWS rows make a round: whole symbols for every V.
template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ void encode_chunk(
    const Args& a, u64 start, const uint4* table, const float* staged, Staged& out, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  const u32 below = (1u << lane) - 1, begin = address_of(out.stream), symbols = kept(address_of(table));
  const u32 full = begin + 2 * a.stage - 64 * S;
  const Scales<ENTRY> scales = {a, a.origin};
  const u32 pairs[3] = {held(a.pairs[0]), held(a.pairs[1]), held(a.pairs[2])}, beyond = held(a.beyond);
  u32 s = 1u << 15, cursor = begin;
  int round = a.rows / ROWS - 1;
  u32 g = (u32)(start / 4) + lane + round * ROWS * 32;
  Walk<ENTRY, -1> walk;
  walk.begin(a, g + (ROWS - 1) * 32);
  float inverse[4], origin[4];
  if (ENTRY == TENSOR) walk.read(a, staged, inverse, origin, scales);
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
      if (ENTRY != TENSOR) walk.read(a, staged, inverse, origin, scales);
      u32 word = DITHER ? hash(g + r * 32, a.low, a.high) : 0;
      packed[r] = digits_of<T, ZERO, DITHER>(a.lowest, group[r], inverse, origin, word, least[r], most[r]);
      if (ZERO == 2) most[r] |= signs_of(group[r]);  // far beyond `high`: 16-bit types reach few digits
      if (ENTRY != TENSOR) walk.next(a);
    }
    if (round) {  // there is time until they are needed
#pragma unroll
      for (int r = 0; r < ROWS; ++r) load<WHOLE>(group[r], a, (u64)g + r * 32 - ROWS * 32);
    }
    u32 escaped = 0, largest = most[0], smallest = ZERO == 2 ? a.lowest : least[0];
#pragma unroll
    for (int r = 1; r < ROWS; ++r) {
      largest = max(largest, most[r]);
      if (ZERO != 2) smallest = min(smallest, least[r]);
    }
    if (__any_sync(~0u, largest >= beyond || smallest < a.lowest)) {
      u32 rows = 0, todo = 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (most[r] >= beyond || (ZERO != 2 && least[r] < a.lowest)) rows |= 1u << r;
      for (; rows; rows &= rows - 1) {
        int r = __ffs(rows) - 1;
        todo |= doubtful<T, ENTRY, ZERO, DITHER, WHOLE>(a, g + r * 32) << (4 * r);
      }
      escaped = mend<T, ROWS, ENTRY, ZERO, DITHER, WHOLE, false>(a, start, g, todo, packed, out, lane);
    }
    u32 places[S], unused = 0;
    symbols_of<V, ROWS>(packed, pairs, symbols, places);
    uint4 e[S];
#pragma unroll
    for (int t = 0; t < S; ++t) {
      e[t] = symbol_at(places[t], table);
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
  extern __shared__ __align__(16) u32 dynamic[];
  float* scales = (float*)dynamic;
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  stage<ENTRY>(a, scales, Scales<ENTRY>{a, a.origin});
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
  take_ticket(a, places);  // synchronises the block
  u32* own = dynamic + staged_words<ENTRY>(a) + warp * (a.stage / 2 + CODES + EXACTS * Type<T>::escape);
  Staged staged = {(u16*)own, own + a.stage / 2, own + a.stage / 2 + CODES, 0, 0, 0, 0, 0, 0, false};
  Chunk chunk = chunk_of(a, places, warp, a.rows * 128);
  u32 words = 0;
  if (chunk.valid) {
    if (chunk.valid == a.rows * 128 && aligned(a.x, sizeof(T) * 4))
      encode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, true>(a, chunk.start, table, scales, staged, lane);
    else
      encode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, false>(a, chunk.start, table, scales, staged, lane);
    words = 32 + (staged.spilled + staged.length + 1) / 2 + staged.coded + staged.lost * Type<T>::escape;
    u32 as_raw = raw_words<T>(chunk_of(a, places, warp, a.rows * 128).valid);
    staged.raw |= staged.coded > CODES || staged.lost > EXACTS || words >= as_raw;
    if (staged.raw) words = as_raw;
  }
  publish(a, places, words, warp, lane);
  u32 base = place_of(a, places, warp, lane);
  chunk = chunk_of(a, places, warp, a.rows * 128);
  if (!chunk.valid) return;
  if (lane == 0) {
    int* head = a.heads + 3 * (u64)chunk.number;
    head[0] = (int)base;
    head[1] = staged.raw ? -1 : (int)(staged.spilled + staged.length);
    head[2] = staged.raw ? 0 : (int)(staged.coded | staged.lost << 16);
  }
  if ((u64)base + words > a.capacity) return;
  if (staged.raw)
    write_restored<T, ENTRY, ZERO, DITHER>(a, chunk.start, base, words, lane);
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

// A digit and 255 - dither become a float by their bytes alone: BASE + SCALE * digit + SCALE / 256 * (255 - dither). Two or
// three digits leave a byte of a symbol for the exponent and take the float's upper bits: then there are halves of a 256th
// of a step, and a difference and a product make a value. Marks of digits that do not mean zero are part of the base.
template <int V, int ZERO> struct Floats {
  static constexpr bool FINE = V == 2 || V == 3;
  static constexpr float SCALE = !FINE ? 256.0f : ZERO ? 131072.0f : 65536.0f;
  static constexpr float BASE = FINE ? (ZERO ? 16777216.0f : 8388608.0f) : 13303808.0f + (ZERO && V > 1 ? 32768.0f : 0.0f);

  static __device__ __forceinline__ float of(const u32* packed, u32 word, int n) {
    u32 from = packed[n / V], digit = n % V, dither = 4 + n % 4;
    if (FINE) return __uint_as_float(permute(from, word, 0x300b | digit << 8 | dither << 4));
    if (V == 1) return __uint_as_float(permute(from, word, 0x3300 | digit << 4 | dither));
    return __uint_as_float(dot2(0x01000001u, permute(from, word, digit << 4 | dither), false, 0x4b4b0000u));
  }
  // What the float of a value's code has to be reduced by, if its centre is zero.
  template <bool DITHER> static __device__ __forceinline__ float origin(const Args& a) {
    float offset = FINE ? (DITHER ? SCALE * (127.5f / 256.0f) : 0.0f) : (DITHER ? 255.0f : 128.0f);
    return BASE + offset + SCALE * (float)((ZERO ? 1 : 0) - a.first);
  }
  template <bool DITHER> static __device__ __forceinline__ float value(float reduced, float unit) {
    return FINE ? reduced * unit : fmaf(reduced, unit, unit * (DITHER ? 127.5f : 128.0f));
  }
};

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool MASK, bool WHOLE>
__device__ __forceinline__ void decode_chunk(
    const Args& a, u64 start, u32 base, int length, const uint2* slots, const float* staged, u32* ring, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  using Float = Floats<V, ZERO>;
  const u32 upward = kept(~0u << lane), address = kept(address_of(ring)), table = kept(address_of(slots));
  const Units<ENTRY> units = {a, Float::template origin<DITHER>(a), Float::SCALE};
  const int rounds = a.rows / ROWS;
  u32 s = a.words[base + lane], left = 2 * length;
  Window window;
  window.begin(a.words + base + 32, ring, length, lane);
  u32 g = (u32)(start / 4) + lane;
  Walk<ENTRY> walk;
  walk.begin(a, g);
  float unit[4], origin[4];
  if (ENTRY == TENSOR && !MASK) walk.read(a, staged, unit, origin, units);
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
      if (ENTRY != TENSOR && !MASK) walk.read(a, staged, unit, origin, units);
      u32 word = DITHER && !MASK ? inverted_hash(g + r * 32, a.low, a.high) : 0;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        y[k] = MASK ? 1.0f : Float::template value<DITHER>(Float::of(packed, word, 4 * r + k) - origin[k], unit[k]);
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
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  using Float = Floats<V, ZERO>;
  if (!MASK) stage<ENTRY>(a, staged, Units<ENTRY>{a, Float::template origin<DITHER>(a), Float::SCALE});
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
      read_raw<T, MASK, true>(a, start, base, valid, lane);
      continue;
    }
    if (valid == a.rows * 128 && aligned(a.x, sizeof(T) * 4))
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, MASK, true>(
          a, start, base, length, slots, staged, rings[warp], lane);
    else
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, MASK, false>(
          a, start, base, length, slots, staged, rings[warp], lane);
    if (escapes) {
      __syncwarp();
      const u32* list = a.words + base + 32 + (length + 1) / 2;
      u32 coded = escapes & 0xffff;
      for (u32 w = lane; w < coded; w += 32) {
        u64 i = start + (list[w] >> 16);
        int q = (int)(list[w] << 16) >> 16;
        float y = 1.0f;
        if (!MASK) {
          u32 entry = entry_of<ENTRY>(a, i);
          float unit = bfloat(a.step[entry]) * 0.00390625f;
          u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), a.low, a.high) : 0, (int)(i & 3));
          y = value_of<DITHER>(q + (int)centre_of<ENTRY>(a, entry), shift, unit);
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

// The sum of a code `middle` has this origin. With a centre there are signs.
constexpr int MIDDLE = 128;
template <bool DITHER> __device__ __forceinline__ constexpr float origin_of(int middle) {
  return 12582912.0f + (float)(256 * middle + (DITHER ? 0 : 128));
}

// The block of a lane in a whole chunk, if all codes of the chunk are sure and have up to four bits. A byte for each
// code, MIDDLE more than it if there are signs; else, with a code for zero, one more.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool SIGNED>
__device__ __forceinline__ bool quantise_narrow(
    const Args& a, const float* staged, u64 start, const Group<T>* group, Block& block, int lane) {
  constexpr int middle = SIGNED ? MIDDLE : ZERO ? 1 : 0;
  const int reach = min(a.room, 14);
  const u32 lowest = ROUNDING + 256 * (middle - (SIGNED ? reach : 0)), beyond = ROUNDING + 256 * (middle + reach + 1);
  const Scales<ENTRY> scales = {a, origin_of<DITHER>(middle)};
  u32 most = 0, least = ~0u, halves[8], lows[8];
  block.signs = block.all = 0;
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
  float inverse[4], origin[4];
  if (ENTRY == TENSOR) walk.read(a, staged, inverse, origin, scales);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (ENTRY != TENSOR) walk.read(a, staged, inverse, origin, scales);
    u32 word = DITHER ? hash((u32)walk.group, a.low, a.high) : 0, low = ~0u, high = 0;
    u32 bytes = digits_of<T, SIGNED ? 0 : ZERO ? 2 : 0, DITHER>(lowest, group[j], inverse, origin, word, low, high);
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
  return __all_sync(~0u, most < beyond && (!SIGNED || least >= lowest));
}
template <typename T, int ENTRY, int ZERO, bool DITHER>
__device__ __forceinline__ bool quantise_narrow(
    const Args& a, const float* staged, u64 start, Block& block, int lane) {
  Group<T> group[8];
  u32 signs = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) group[j].load(a.x, start / 4 + lane + j * 32);
#pragma unroll
  for (int j = 0; j < 8; ++j) signs |= signs_of(group[j]);
  if (Centred<ENTRY>::value || __any_sync(~0u, signs != 0))
    return quantise_narrow<T, ENTRY, ZERO, DITHER, true>(a, staged, start, group, block, lane);
  return quantise_narrow<T, ENTRY, ZERO, DITHER, false>(a, staged, start, group, block, lane);
}

// The codes of a lane's block, its signs, and which values are lost.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ void quantise_block(
    const Args& a, const float* staged, u64 start, int* code, u32& signs, u32& lost, int lane) {
  u64 g = start / 4 + lane;
  Group<T> group[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) load<WHOLE>(group[j], a, g + j * 32);
  Walk<ENTRY> walk;
  walk.begin(a, g);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float inverse[4], origin[4];
    walk.read(a, staged, inverse, origin, Scales<ENTRY>{a, origin_of<DITHER>(MIDDLE)});
    u32 word = DITHER ? hash((u32)g + j * 32, a.low, a.high) : 0;
    int worst = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k;
      float x = group[j].at(k);
      int q = ((int)(sum_of<DITHER>(origin[k], x, inverse[k], word, k) - ROUNDING) >> 8) - MIDDLE;
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
    if (worst > a.room || !WHOLE) {
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
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  stage<ENTRY>(a, staged, Scales<ENTRY>{a, origin_of<DITHER>(MIDDLE)});
  take_ticket(a, places);  // synchronises the block
  const Chunk chunk = chunk_of(a, places, warp, 1024);
  Block block = {{0, 0, 0, 0}, 0, 0};
  int code[32];  // magnitudes
  u32 lost = 0, words = 0, inside = 0, planes = 0, klass = 0;
  bool raw = false, narrow = false;
  if (chunk.valid) {
    bool whole = chunk.valid == 1024 && aligned(a.x, sizeof(T) * 4);
    narrow = whole && quantise_narrow<T, ENTRY, ZERO, DITHER>(a, staged, chunk.start, block, lane);
    if (!narrow) {
      block.signs = block.all = 0;
      if (whole)
        quantise_block<T, ENTRY, ZERO, DITHER, true>(a, staged, chunk.start, code, block.signs, lost, lane);
      else
        quantise_block<T, ENTRY, ZERO, DITHER, false>(a, staged, chunk.start, code, block.signs, lost, lane);
#pragma unroll
      for (int n = 0; n < 32; ++n) block.all |= (u32)code[n];
    }
    klass = class_of(block.all);
    planes = width_of(klass) + (block.signs ? 1 : 0);
    u32 upto = scan(planes, lane);
    inside = upto - planes;
    words = __shfl_sync(~0u, upto, 31);
    if (__any_sync(~0u, lost != 0)) words += __shfl_sync(~0u, scan(__popc(lost), lane), 31) * Type<T>::escape;
    u32 as_raw = raw_words<T>(chunk.valid);
    raw = words >= as_raw;
    if (raw) words = as_raw;
  }
  publish(a, places, words, warp, lane);
  u32 plane[4] = {plane_of(block.nibbles, 0), plane_of(block.nibbles, 1), plane_of(block.nibbles, 2),
                  plane_of(block.nibbles, 3)};
  u32 base = place_of(a, places, warp, lane);
  if (!chunk.valid) return;
  u32 nibble = raw ? (lane == 0 ? 8 : 0) : klass + (block.signs ? 8 : 0);
  u32 upper = __shfl_down_sync(~0u, nibble, 1);
  if (!(lane & 1)) a.headers[(u64)chunk.number * 16 + lane / 2] = (u8)(nibble | upper << 4);
  if (lane == 0) {
    a.heads[chunk.number] = (int)base;
    if (chunk.number == a.chunks - 1) a.heads[chunk.number + 1] = (int)(base + words);
  }
  if ((u64)base + words > a.capacity) return;
  if (raw) {
    write_raw<T>(a, chunk.start, base, words, lane);
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
          list[1] = ((const u32*)a.x)[chunk.start + position];
        } else {
          list[0] = position << 16 | ((const u16*)a.x)[chunk.start + position];
        }
        list += Type<T>::escape;
      }
      at += __shfl_sync(~0u, upto, 31) * Type<T>::escape;
    }
  }
}

// The float with the bits ROUNDING + 256 * code + 255 - dither (or, without dither, no more) has this origin.
template <int ENTRY, bool DITHER> __device__ __forceinline__ Units<ENTRY> units_for(const Args& a) {
  return {a, 12582912.0f + (DITHER ? 255.0f : 128.0f), 256.0f};
}

// The values of a whole chunk whose codes have up to four bits, from a byte for each: even ones, then odd ones.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool MASK, bool SIGNED>
__device__ __forceinline__ void put_narrow(
    const Args& a, const float* staged, u64 start, const u32* low, u32 signs, int lane) {
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
  float unit[4], origin[4];
  if (ENTRY == TENSOR && !MASK) walk.read(a, staged, unit, origin, units_for<ENTRY, DITHER>(a));
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 bytes[2] = {low[j / 2] & 0x0f0f0f0fu, low[j / 2] >> 4 & 0x0f0f0f0fu};
    float y[4];
    if (ENTRY != TENSOR && !MASK) walk.read(a, staged, unit, origin, units_for<ENTRY, DITHER>(a));
    u32 word = DITHER && !MASK ? inverted_hash((u32)walk.group, a.low, a.high) : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k, b = n % 8 / 2;
      u32 weight = 256u << (16 * (b & 1));
      const u32 from = ROUNDING - (ZERO && !SIGNED ? 256 : 0);
      u32 sum = DITHER ? dot4(word, 1u << (8 * k), from) : from;
      if (SIGNED) {
        u32 size = dot2(weight, bytes[k & 1], b > 1, ZERO ? -256 : 0);
        sum = signs & 1u << (4 * (n % 8) + n / 8) ? sum - size : sum + size;
      } else {
        sum = dot2(weight, bytes[k & 1], b > 1, sum);
      }
      y[k] = MASK ? 1.0f : fmaf(__uint_as_float(sum) - origin[k], unit[k], unit[k] * (DITHER ? 127.5f : 128.0f));
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
    const Args& a, const float* staged, u64 start, const u32* low, const u32* in, u32 width, u32 signs, bool whole,
    int lane) {
  u32 high[4] = {0, 0, 0, 0}, top[4] = {0, 0, 0, 0};
#pragma unroll
  for (int p = 4; p < 11; ++p)
    if (p < width) add_plane(p < 8 ? high : top, in[p], p & 3);
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float y[4], unit[4], origin[4];
    if (!MASK) walk.read(a, staged, unit, origin, units_for<ENTRY, DITHER>(a));
    u32 word = DITHER && !MASK ? inverted_hash((u32)walk.group, a.low, a.high) : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k, at = 4 * (n % 8);
      u32 code = (low[n / 8] >> at & 15) | (high[n / 8] >> at & 15) << 4 | (top[n / 8] >> at & 15) << 8;
      if (MASK) {
        y[k] = code ? 1.0f : 0.0f;
      } else {
        int q = (int)code - (ZERO ? 1 : 0);
        q = signs >> (at + n / 8) & 1 ? -q : q;
        u32 sum = ROUNDING + 256 * q + (DITHER ? shift_of<true>(word, k) : 0);
        y[k] = fmaf(__uint_as_float(sum) - origin[k], unit[k], unit[k] * (DITHER ? 127.5f : 128.0f));
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
__global__ void __launch_bounds__(256, 5) blocks_decode(const Args a) {
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31;
  const bool even = aligned(a.x, sizeof(T) * 4);
  if (ENTRY == INNER && !MASK) {
    stage<ENTRY>(a, staged, units_for<ENTRY, DITHER>(a));
    __syncthreads();
  }
  for (u32 chunk = blockIdx.x * 8 + threadIdx.x / 32; chunk < a.chunks; chunk += gridDim.x * 8) {
    u64 start = (u64)chunk * 1024;
    u32 valid = (u32)min(a.count - start, 1024ull);
    u32 base = (u32)a.heads[chunk], after = (u32)a.heads[chunk + 1];
    u32 nibble = a.headers[(u64)chunk * 16 + lane / 2] >> (4 * (lane & 1)) & 15;
    if (__shfl_sync(~0u, nibble, 0) == 8) {
      read_raw<T, MASK, false>(a, start, base, valid, lane);
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
      put_wide<T, ENTRY, ZERO, DITHER, MASK>(a, staged, start, low, in, width, signs, whole, lane);
    else if (!MASK && __any_sync(~0u, signs != 0))
      put_narrow<T, ENTRY, ZERO, DITHER, MASK, true>(a, staged, start, low, signs, lane);
    else
      put_narrow<T, ENTRY, ZERO, DITHER, MASK, false>(a, staged, start, low, signs, lane);
    u32 escapes = (after - base - total) / Type<T>::escape;
    if (escapes) {
      __syncwarp();
      read_escapes<T, MASK>(a, start, a.words + base + total, escapes, lane);
    }
  }
}
