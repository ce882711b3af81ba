// The coder rans: a stream becomes symbols, symbols digits, digits values or a mask, which may be put to use at once.

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
    __syncwarp();  // what goes has been read: votes order nothing in memory
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
  // The same for a digit that has a word of its own, in byte 0 below 0x4b in byte 3: of kinds 1 and 2.
  static __device__ __forceinline__ float of_digit(u32 from, u32 word, int k) {
    static_assert(V < 3, "three or four digits do not lie in words of their own");
    return __uint_as_float(permute(from, word, (FINE ? 0x300b : 0x3300) | (4 + k) << (FINE ? 4 : 0)));
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

// Digits that were predicted have a word each, with room for finer floats unless they need all eight bits.
template <int V, int ZERO, bool PREDICTED> using FloatsOf = Floats<(PREDICTED && V > 1 ? 2 : V), ZERO>;

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, int GIVE, bool PREDICTED, bool WHOLE>
__device__ __forceinline__ void decode_chunk(
    const Args& a, u64 start, u32 base, int length, const uint2* slots, const float* staged, u32* ring, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  constexpr bool MASK = GIVE == ONLY_MASK || GIVE == GATED, PASSES = GIVE == GATED || GIVE == SOURCE_AND_GATED;
  using In = typename Lies<T>::In;
  using Float = FloatsOf<V, ZERO, PREDICTED>;
  const u32 upward = kept(~0u << lane), address = kept(address_of(ring)), table = kept(address_of(slots));
  const Units<ENTRY> units = {a, Float::template origin<DITHER>(a), Float::SCALE};
  const int rounds = a.rows / ROWS;
  u32 s = *words_at(a, base + lane), left = 2 * length;
  Window window;
  window.begin(words_at(a, base + 32), ring, length, lane);
  u32 g = (u32)(start / 4) + lane;
  Walk<ENTRY> walk;
  walk.begin(a, g);
  float unit[4], origin[4];
  if (Entry<ENTRY>::constant && !MASK) walk.read(a, staged, unit, origin, units);
  Unfolder<T, GIVE> unfolder;
  unfolder.begin(a, g);
  const u32 reciprocal = PREDICTED ? 0xffffffffu / a.size + 1 : 0;
  for (int round = 0; round < rounds; ++round) {
    if (window.fill && (int)left < 2 * window.fill + 64 * S) window.slide(lane);
    Group<In> given[PASSES ? ROWS : 1];
    if (PASSES)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) load<WHOLE>(given[r], a, a.other, (u64)g + r * 32);
    u32 packed[S];
#pragma unroll
    for (int t = 0; t < S; ++t) {
      uint2 e = slot_of(s, table, slots);
      packed[t] = e.y;
      s = (e.x >> 16) * (s >> 12) + (e.x & 0xffff);
      refill(s, left, upward, address, ring);
    }
    Sums<V, ROWS> sums;
    if (PREDICTED) sums.begin(packed, a.fill, lane);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float y[4];
      if (!Entry<ENTRY>::constant && !MASK) walk.read(a, staged, unit, origin, units);
      u32 word = DITHER && !MASK ? inverted_hash(g + r * 32, low_of(a), a.high) : 0;
      if constexpr (PREDICTED) {
        u32 digits[4];
        sums.read(packed, r, a.size, reciprocal, digits);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          y[k] = Float::template value<DITHER>(Float::of_digit(digits[k], word, k) - origin[k], unit[k]);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          y[k] = MASK ? 1.0f : Float::template value<DITHER>(Float::of(packed, word, 4 * r + k) - origin[k], unit[k]);
      }
      if constexpr (UNFOLDS(GIVE)) {
        unfolder.template put<WHOLE>(a, y, given[PASSES ? r : 0], (u64)g + r * 32);
      } else {
        Group<T> group;
        group.set(y);
        if (GIVE == GATED) group = given[r];
        if (ZERO) {
          u32 marks[4];
          int bytes[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) marks[k] = packed[(4 * r + k) / V], bytes[k] = V == 1 ? 1 : (4 * r + k) % V;
          clear_zeros(group, marks, bytes);
        }
        store<WHOLE>(group, a, (u64)g + r * 32);
        if (!MASK) walk.next(a);
      }
    }
    g += ROWS * 32;
  }
}

template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, int GIVE, bool PREDICTED = false>
__global__ void __launch_bounds__(256, UNFOLDS(GIVE) ? 4 : 5) rans_decode(const Args a) {
  static_assert(!PREDICTED || (ZERO == 0 && GIVE == ONLY_VALUES), "what is predicted gives nothing but values");
  constexpr bool MASK = GIVE == ONLY_MASK || GIVE == GATED, PASSES = GIVE == GATED || GIVE == SOURCE_AND_GATED;
  using In = typename Lies<T>::In;
  __shared__ __align__(1024) u32 rings[8][256];
  __shared__ uint2 slots[4096];  // share << 16 | slot - slots before, and the symbol's digits
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  using Float = FloatsOf<V, ZERO, PREDICTED>;
  if (!MASK) stage<ENTRY>(a, staged, Units<ENTRY>{a, Float::template origin<DITHER>(a), Float::SCALE});
  {
    u32 *firsts = rings[0], *digits = rings[1];  // before they are rings
    int symbols = 1;
    for (int k = 0; k < V; ++k) symbols *= a.size;
    u32 freq = (int)threadIdx.x < symbols ? a.freqs[threadIdx.x] : 0;
    firsts[threadIdx.x] = slots_before(freq, rings[2]) | freq << 16;
    digits[threadIdx.x] = unpacked<V, ZERO>(threadIdx.x, a.size);
    __syncthreads();
    u32 mine = firsts[warp + 8 * lane], as = digits[warp + 8 * lane];  // a warp's symbols are eight apart
    for (int n = 0; warp + 8 * n < symbols; ++n) {
      u32 first = __shfl_sync(~0u, mine, n), share = first >> 16, digit = __shfl_sync(~0u, as, n);
      for (u32 j = lane; j < share; j += 32) slots[(first & 0xffff) + j] = make_uint2(share << 16 | j, digit);
    }
    __syncthreads();
  }
  const bool even = aligned(a.x, sizeof(In) * 4) && (!PASSES || aligned(a.other, sizeof(In) * 4)) &&
                    (GIVE != SOURCE_AND_GATED || aligned(a.beside, sizeof(In) * 4));
  for (u32 chunk = blockIdx.x * 8 + warp; chunk < a.chunks; chunk += gridDim.x * 8) {
    u64 start = (u64)chunk * a.rows * 128;
    u32 valid = (u32)min(a.count - start, (u64)a.rows * 128);
    u32 base = (u32)a.heads[3 * chunk];
    int length = a.heads[3 * chunk + 1];
    u32 escapes = (u32)a.heads[3 * chunk + 2];
    if (REPLAYED) {
      u32 words = 32 + (length + 1) / 2 + (escapes & 0xffff) + (escapes >> 16) * Type<T>::escape;
      if (!has_place(a, base, length < 0 ? raw_words<T>(valid) : words)) {
        put_nothing<T, GIVE>(a, start, valid, lane);
        continue;
      }
    }
    if (length < 0) {
      read_raw<T, GIVE, true>(a, start, base, valid, lane);
      continue;
    }
    if (valid == a.rows * 128 && even)
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, GIVE, PREDICTED, true>(
          a, start, base, length, slots, staged, rings[warp], lane);
    else
      decode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, GIVE, PREDICTED, false>(
          a, start, base, length, slots, staged, rings[warp], lane);
    if (escapes) {
      __syncwarp();
      if (REPLAYED) base = (u32)a.heads[3 * chunk];  // again: no register has to be kept for it
      const u32* list = words_at(a, base + 32 + (length + 1) / 2);
      u32 coded = escapes & 0xffff;
      for (u32 w = lane; w < coded; w += 32) {
        u64 i = start + (list[w] >> 16);
        int q = (int)(list[w] << 16) >> 16;
        const bool zero = ZERO && q == 4096;
        if (MASK) {
          put_where<T, GIVE>(a, i, !zero);
          continue;
        }
        u32 entry = entry_of<ENTRY>(a, i);
        float unit = bfloat(a.step[entry]) * 0.00390625f;
        u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), low_of(a), a.high) : 0, (int)(i & 3));
        float y = value_of<DITHER>(q + (int)centre_of<ENTRY>(a, entry), shift, unit);
        if (zero) y = 0.0f;
        if (UNFOLDS(GIVE))
          Unfolded<T, GIVE>::put(a, i, y);
        else
          narrow(y, (T*)a.x + i);
      }
      read_escapes<T, GIVE>(a, start, list + coded, escapes >> 16, lane);
    }
  }
}
