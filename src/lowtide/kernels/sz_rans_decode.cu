// The coder rans: a stream becomes symbols, symbols digits, digits values or a mask.

// The stream of a chunk, read from its end: 384 words of 16 bits in shared memory, the 256 before, from `fill` on, on
// their way. A round takes 128 at most: when the window slides, they move up, so that no place in it is beyond its end.
struct Window {
  static constexpr int WORDS = 192, BEFORE = 64;  // of 32 bits; BEFORE: what a stream that is too short is read from
  const u32* from;
  u32* memory;
  u32 next[4];
  int fill;

  __device__ __forceinline__ void fetch() {
    fill -= 256, from -= 128;
    if (fill < 0) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) next[j] = __ldg(from + j * 32);
  }
  // Gives the place behind the last word, in bytes.
  __device__ __forceinline__ int begin(const u32* stream, u32* into, int length, int lane) {
    memory = into + lane, fill = max(length - 129, 0) / 256 * 256, from = stream + fill / 2 + lane;
    const int end = (int)address_of(into) + 2 * (length - fill), pairs = (length + 1 - fill) / 2 - lane;
    u32 last[6];
#pragma unroll
    for (int j = 0; j < 6; ++j) last[j] = j * 32 < pairs ? __ldg(from + j * 32) : 0;
    __syncwarp();  // the last chunk's window has been read
#pragma unroll
    for (int j = 0; j < 6; ++j) memory[j * 32] = last[j];
    __syncwarp();
    fetch();
    return end;
  }
  // A place below this one, in bytes from the window's begin, is too low for a round, unless nothing is left to come.
  __device__ __forceinline__ int limit() const { return fill < 0 ? 0 : 256; }
  __device__ __forceinline__ void slide(int& end) {
    u32 first = memory[0], second = memory[32];
    __syncwarp();
    memory[128] = first, memory[160] = second;
#pragma unroll
    for (int j = 0; j < 4; ++j) memory[j * 32] = next[j];
    __syncwarp();
    end += 512;
    fetch();
  }
};

// The lanes with states below 2**15 take a word each from the end of the stream, the last lane's first. `end` is the
// place behind the words left; `upward` has the bits of this lane and those after it.
__device__ __forceinline__ void refill(u32& s, int& end, u32 upward, const u32* memory) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{ .reg .pred p; .reg .u32 all, after, at;"
      "  setp.lt.u32 p, %0, 32768;"
      "  vote.sync.ballot.b32 all, p, 0xffffffff;"
      "  and.b32 after, all, %2;"
      "  popc.b32 after, after;"
      "  mad.lo.u32 at, after, -2, %1;"
      "  ld.shared.u16 at, [at];"
      "  @p prmt.b32 %0, at, %0, 0x5410;"
      "  popc.b32 all, all;"
      "  mad.lo.u32 %1, all, -2, %1; }"
      : "+r"(s), "+r"(end) : "r"(upward) : "memory");
#else
  u32 all = __ballot_sync(~0u, s < 32768);
  if (s < 32768) s = s << 16 | ((const u16*)memory)[end / 2 - __popc(all & upward)];
  end -= 2 * __popc(all);
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

// The table of slots: share << 16 | slot - slots before, and the symbol's digits. Symbols that have slots are numbered;
// a slot's symbol is found by counting the first slots up to it, each of which has a bit in `begins`. For 256 threads.
template <int V, int ZERO>
__device__ __forceinline__ void fill_slots(const Args& a, uint2* slots, u32* memory, u32 half) {
  uint2* entries = (uint2*)memory;  // of slot 0, if it were theirs
  u32 *begins = memory + 512, *counts = memory + 640, *sums = memory + 768;
  const u32 thread = threadIdx.x, lane = thread & 31;
  u32 symbols = 1;
  for (int k = 0; k < V; ++k) symbols *= a.size;
  const u32 freq = thread < symbols ? a.freqs[thread] : 0;
  if (thread < 128) begins[thread] = 0;
  const u32 first = slots_before(freq, sums), word = first / 32 & 127;
  if (freq) atomicOr(begins + word, 1u << (first & 31));
  __syncthreads();
  const u32 before = slots_before(thread < 128 ? __popc(begins[thread]) : 0, sums);
  if (thread < 128) counts[thread] = before - 1;
  __syncthreads();
  if (freq) {
    u32 number = counts[word] + __popc(begins[word] << (31 - (first & 31)));
    entries[number] = make_uint2((freq << 16) - first, unpacked<V, ZERO>(thread, a.size) | half);
  }
  __syncthreads();
#pragma unroll 4
  for (u32 n = 0; n < 16; ++n) {
    u32 at = thread / 32 + 8 * n, slot = thread + 256 * n;
    uint2 entry = entries[(int)(counts[at] + __popc(begins[at] << (31 - lane)))];
    slots[slot] = make_uint2(entry.x + slot, entry.y);
  }
  __syncthreads();
}

// A digit and 255 - dither become a float by their bytes alone: BASE + SCALE * digit + SCALE / 256 * (255 - dither).
// Two or three digits leave a byte of a symbol for the exponent and take the float's upper bits: then there are halves
// of a 256th of a step, and a difference and a product make a value. Two leave one more byte, for such a half: then the
// float that stands for zero has so few bits that its product with a unit is exact, and one multiply-add makes the same
// value (FUSED). Marks of digits that do not mean zero are part of the base.
template <int V, int ZERO, bool DITHER> struct Floats {
  static constexpr bool FINE = V == 2 || V == 3, FUSED = V == 2;
  static constexpr float SCALE = !FINE ? 256.0f : ZERO ? 131072.0f : 65536.0f;
  static constexpr float BASE =
      FINE ? (ZERO ? 16777216.0f : 8388608.0f) : 13303808.0f + (ZERO && V > 1 ? 32768.0f : 0.0f);
  static constexpr u32 HALF = FUSED && DITHER ? 0x800000u : 0;  // in byte 2 of a symbol
  static constexpr float MIDDLE = !DITHER ? 0.0f : SCALE * ((HALF ? 128.0f : 127.5f) / 256.0f);
  static constexpr float OFFSET = FINE ? MIDDLE : DITHER ? 255.0f : 128.0f;

  static __device__ __forceinline__ float of(const u32* packed, u32 word, int n) {
    u32 from = packed[n / V], digit = n % V, dither = 4 + n % 4;
    if (FINE) return __uint_as_float(permute(from, word, (FUSED ? 0x3002 : 0x300b) | digit << 8 | dither << 4));
    if (V == 1) return __uint_as_float(permute(from, word, 0x3300 | digit << 4 | dither));
    return __uint_as_float(dot2(0x01000001u, permute(from, word, digit << 4 | dither), false, 0x4b4b0000u));
  }
  // What the float of a value's code has to be reduced by, if its centre is zero.
  static __device__ __forceinline__ float origin(const Args& a) {
    return BASE + OFFSET + SCALE * (float)((ZERO ? 1 : 0) - a.first);
  }
  static __device__ __forceinline__ float value(float reduced, float unit) {
    return FINE ? reduced * unit : fmaf(reduced, unit, unit * (DITHER ? 127.5f : 128.0f));
  }
};

// The two numbers of an entry: its unit, and its origin or, where values are made by one multiply-add, what that adds.
template <typename FLOAT, int ENTRY> struct Numbers {
  const Args& a;
  __device__ __forceinline__ float2 operator()(u32 entry) const {
    float2 found = Units<ENTRY>{a, FLOAT::origin(a), FLOAT::SCALE}(entry);
    return make_float2(found.x, FLOAT::FUSED ? -found.y * found.x : found.y);
  }
};

// Centres of 16-bit values are small (`farthest_centre` in coding/grid.py): for INNER they are added to the digits of a
// round, four words at a time. Staged are the units and, for every group that a round may begin with, those four words:
// its centres, counted from -NEAR, where symbols have their digits.
constexpr int NEAR = 4;
template <typename T, int V, int ENTRY> constexpr bool ADDED = ENTRY == INNER && sizeof(T) == 2 && V > 1;

template <typename T, int V, int ROWS, int ENTRY, typename F>
__device__ __forceinline__ void stage_units(const Args& a, float* staged, F numbers) {
  if (!ADDED<T, V, ENTRY>) {
    stage<ENTRY, ROWS>(a, staged, numbers);
    return;
  }
  const u32 channels = staged_channels<ENTRY, ROWS>(a);
  for (u32 n = threadIdx.x; n < channels; n += blockDim.x) staged[n] = numbers(n % a.modulo).x;
  for (u32 n = threadIdx.x; n < a.modulo; n += blockDim.x) {
    u32 added = 0;
    for (u32 k = 0; k < V; ++k) {
      u32 value = n % 4 * V + k, channel = (n / 4 * 4 + value / 4 * 128 + value % 4) % a.modulo;
      added |= (u32)((int)centre_of<ENTRY>(a, channel) + NEAR) << (8 * k);
    }
    ((u32*)staged)[channels + n] = added;
  }
}

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, int GIVE, bool WHOLE>
__device__ __forceinline__ void decode_chunk(
    const Args& a, u64 start, u32 base, int length, const uint2* slots, const float* staged, u32* memory, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  static_assert(S == 4, "a round takes as many words as a window keeps when it slides");
  constexpr bool MASK = GIVE == ONLY_MASK, ADDING = ADDED<T, V, ENTRY> && !MASK;
  using Float = Floats<V, ZERO, DITHER>;
  constexpr bool FUSED = Float::FUSED && !ADDING;
  const u32 upward = kept(~0u << lane), table = held<ENTRY != RUNS>(kept(address_of(slots)));
  const Numbers<Float, ENTRY> numbers = {a};
  u32 s = a.words[base + lane];
  Window window;
  int end = window.begin(a.words + base + 32, memory, length, lane);
  // `g` counts groups from zero; or, where registers are few, it is what their dither comes from, and pointers move.
  constexpr bool COUNTED = MASK || V == 2 || Entry<ENTRY>::constant;
  const u32 number = (u32)(start / 4) + lane, low = number + low_of(a);
  const u32 high = held<COUNTED && DITHER && !MASK>(a.high);
  u32 g = COUNTED ? 0 : low;
  const u32 last = g + a.rows * 32;
  u8 *x = (u8*)a.x + (start + 4 * lane) * sizeof(T), *mask = (u8*)a.mask + (start + 4 * lane) * sizeof(T);
  Walk<ENTRY, 1, ROWS> walk;
  walk.begin(a, start / 4 + lane);
  float unit[2][4], origin[4];
  if (ADDING)
    for (int k = 0; k < 4; ++k) origin[k] = Float::origin(a) + NEAR * Float::SCALE;
  u32 entry = walk.entry;
  const u32 over = walk.over, all = held<ADDING>(0 - 4 * a.modulo);
  const u8 *its_units = (const u8*)staged, *its_centres = (const u8*)(staged + staged_channels<ENTRY, ROWS>(a));
  const bool twice = ADDING && ROWS == 3 && a.modulo == 256;  // the third row has the channels of the first
  if (Entry<ENTRY>::constant && !MASK) walk.read(a, staged, unit[0], origin, numbers);
  for (;; window.slide(end)) {
    const int limit = (int)kept(address_of(memory) + window.limit());
    do {
      u32 packed[S];
#pragma unroll
      for (int t = 0; t < S; ++t) {
        uint2 e = slot_of(s, table, slots);
        packed[t] = e.y;
        s = (e.x >> 16) * ((s >> 12) - 65536) + e.x;  // share * (s >> 12) + e.x % 65536, in fewer steps
        refill(s, end, upward, memory);
      }
      if (ADDING) {
        uint4 added = *(const uint4*)(its_centres + entry);
        packed[0] += added.x, packed[1] += added.y, packed[2] += added.z, packed[3] += added.w;
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float y[4];
        float* of = unit[ADDING ? r & 1 : 0];
        if (ADDING) {
          if (r < 2 || !twice) {
            float4 v = *(const float4*)(its_units + entry + 512 * r);
            of[0] = v.x, of[1] = v.y, of[2] = v.z, of[3] = v.w;
          }
        } else if (!Entry<ENTRY>::constant && !MASK) {
          walk.read(a, staged, of, origin, numbers, r);
        }
        u32 from = (COUNTED ? low + g : g) + r * 32;
        u32 word = DITHER && !MASK ? inverted_hash(from, 0, COUNTED ? high : a.high) : 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float f = Float::of(packed, word, 4 * r + k);
          y[k] = MASK ? 1.0f : FUSED ? fmaf(f, of[k], origin[k]) : Float::value(f - origin[k], of[k]);
        }
        Group<T> group;
        group.set(y);
        if (ZERO) {
          u32 marks[4];
          int bytes[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) marks[k] = packed[(4 * r + k) / V], bytes[k] = V == 1 ? 1 : (4 * r + k) % V;
          clear_zeros(group, marks, bytes);
          if (GIVE == BOTH) {
            const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            Group<T> is;
            is.set(ones);
            clear_zeros(is, marks, bytes);
            if (WHOLE)
              is.store(mask, (COUNTED ? (u64)g : 0) + r * 32);
            else
              store<false>(is, a, a.mask, (u64)(number + (COUNTED ? g : g - low)) + r * 32);
          }
        }
        if (WHOLE)
          group.store(x, (COUNTED ? (u64)g : 0) + r * 32);
        else
          store<false>(group, a, a.x, (u64)(number + (COUNTED ? g : g - low)) + r * 32);
        if (!MASK && ENTRY != INNER) walk.next(a);
      }
      if (ADDING)
        entry += over, entry = min(entry, entry + all);
      else if (!MASK && ENTRY == INNER)
        walk.next(a);
      g = COUNTED ? kept(g + ROWS * 32) : g + ROWS * 32;
      if (!COUNTED) x += 32 * N * sizeof(T), mask += 32 * N * sizeof(T);
    } while (g != last && end >= limit);
    if (g == last) return;
  }
}

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, int GIVE>
__global__ void __launch_bounds__(256, 5) rans_decode(const Args a) {
  constexpr bool MASK = GIVE == ONLY_MASK;
  // Lanes that take no word read behind the last one.
  __shared__ __align__(16) u32 windows[Window::BEFORE + 8 * Window::WORDS + 2];
  __shared__ uint2 slots[4096];
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  using Float = Floats<V, ZERO, DITHER>;
  if (!MASK) stage_units<T, V, ROWS, ENTRY>(a, staged, Numbers<Float, ENTRY>{a});
  fill_slots<V, ZERO>(a, slots, windows + Window::BEFORE, Float::HALF);  // before they are windows
  u32* memory = windows + Window::BEFORE + warp * Window::WORDS;
  // Chunks that are left over for a last turn are shared by all blocks, rather than taken by the first ones.
  for (u32 chunk = warp * gridDim.x + blockIdx.x; chunk < a.chunks; chunk += gridDim.x * 8) {
    u64 start = (u64)chunk * a.rows * 128;
    u32 valid = (u32)min(a.count - start, (u64)a.rows * 128);
    u32 base = (u32)a.heads[3 * chunk];
    int length = a.heads[3 * chunk + 1];
    if (REPLAYED) {
      u32 escapes = (u32)a.heads[3 * chunk + 2];
      u32 words = 32 + (length + 1) / 2 + (escapes & 0xffff) + (escapes >> 16) * Type<T>::escape;
      if ((u64)base + (length < 0 ? raw_words<T>(valid) : words) > a.capacity) {
        put_nothing<T>(a, a.x, start, valid, lane);
        if (GIVE == BOTH) put_nothing<T>(a, a.mask, start, valid, lane);
        continue;
      }
    }
    if (length < 0) {
      read_raw<T, GIVE, true>(a, start, base, valid, lane);
      continue;
    }
    if (valid == a.rows * 128 && aligned(a.x, sizeof(T) * 4))
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, GIVE, true>(
          a, start, base, length, slots, staged, memory, lane);
    else
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, GIVE, false>(
          a, start, base, length, slots, staged, memory, lane);
    // What was known of the chunk is read again: there are no registers for it while it is decoded.
    const u32 number = kept(chunk), escapes = (u32)a.heads[3 * number + 2];
    if (escapes) {
      __syncwarp();
      start = (u64)number * a.rows * 128;
      const u32* list = a.words + (u32)a.heads[3 * number] + 32 + (a.heads[3 * number + 1] + 1) / 2;
      u32 coded = escapes & 0xffff;
      for (u32 w = lane; w < coded; w += 32) {
        u64 i = start + (list[w] >> 16);
        int q = (int)(list[w] << 16) >> 16;
        float y = 1.0f;
        if (!MASK) {
          u32 entry = entry_of<ENTRY>(a, i);
          float unit = bfloat(a.step[entry]) * 0.00390625f;
          u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), low_of(a), a.high) : 0, (int)(i & 3));
          y = value_of<DITHER>(q + (int)centre_of<ENTRY>(a, entry), shift, unit);
        }
        const bool zero = ZERO && q == 4096;
        narrow(zero ? 0.0f : y, (T*)a.x + i);
        if (GIVE == BOTH) narrow(zero ? 0.0f : 1.0f, (T*)a.mask + i);
      }
      read_escapes<T, GIVE>(a, start, list + coded, escapes >> 16, lane);
    }
  }
}
