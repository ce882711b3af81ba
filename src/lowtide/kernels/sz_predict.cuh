// Prediction along rows, for the coder rans: what stands for a digit is how much it is more, modulo the size of the
// alphabet, than the one before it in the row of 128 that a warp has at once (lowtide.coding.rans); `fill` comes before the
// first one. Only where zero has no code of its own.

// Where a field is less than the other it borrows its spare bit, the one of number `bits`, and `size` is added.
__device__ __forceinline__ u32 less_modulo(u32 a, u32 b, u32 size, u32 spare, int bits) {
  u32 borrowed = ~((a | spare) - b) & spare;
  return a - b + (borrowed >> bits) * size;
}

// The digits of a group, a byte each, less the ones before them. With one value a symbol they need all eight bits.
template <int V> __device__ __forceinline__ u32 differences(u32 digits, u32 size, u32 fill, int lane) {
  u32 last = __shfl_up_sync(~0u, digits, 1);
  u32 before = permute(lane ? last : fill << 24, digits, 0x6543);
  if (V > 1) return less_modulo(digits, before, size, 0x80808080u, 7);
  u32 even = less_modulo(digits & 0x00ff00ffu, before & 0x00ff00ffu, size, 0x01000100u, 8);
  u32 odd = less_modulo(digits >> 8 & 0x00ff00ffu, before >> 8 & 0x00ff00ffu, size, 0x01000100u, 8);
  return even | odd << 8;
}

// The sum of the numbers of this lane and those before it.
__device__ __forceinline__ u32 sum_to_here(u32 sum, int lane) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
#ifdef __CUDA_ARCH__
    asm volatile("{ .reg .pred p; .reg .u32 below; shfl.sync.up.b32 below|p, %0, %1, 0, 0xffffffff; @p add.u32 %0, %0, below; }"
                 : "+r"(sum) : "r"(o));
#else
    u32 below = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += below;
#endif
  }
  return sum;
}

// The way back: sums of differences, over the lanes before for several rows at once, in fields of a word. Those of a row
// stay below 129 * 256; with three values a symbol, where digits are below six, below 2**10.
template <int V, int ROWS> struct Sums {
  static constexpr int FIELDS = V == 1 ? 1 : V == 3 ? 3 : 2, BITS = V == 3 ? 10 : 16;
  static constexpr u32 EACH = FIELDS == 1 ? 1 : FIELDS == 2 ? 1 | 1 << BITS : 1 | 1 << BITS | 1 << 2 * BITS;
  u32 before[(ROWS + FIELDS - 1) / FIELDS];

  static __device__ __forceinline__ u32 row_of(const u32* packed, int r) {
    if (V == 1) {
      u32 low = permute(packed[4 * r], packed[4 * r + 1], 0x40), high = permute(packed[4 * r + 2], packed[4 * r + 3], 0x40);
      return permute(low, high, 0x5410);
    }
    u32 selector = 0;
    const int first = 4 * r / V;  // a row's four values are of one symbol or of two
    for (int k = 0; k < 4; ++k) selector |= ((4 * r + k) / V - first << 2 | (4 * r + k) % V) << (4 * k);
    return V == 4 ? packed[r] : permute(packed[first], packed[first + 1], selector);
  }
  __device__ __forceinline__ void begin(const u32* packed, u32 fill, int lane) {
#pragma unroll
    for (int w = 0; w < (ROWS + FIELDS - 1) / FIELDS; ++w) {
      u32 own = 0;
#pragma unroll
      for (int f = 0; f < FIELDS; ++f)
        if (w * FIELDS + f < ROWS) own |= dot4(row_of(packed, w * FIELDS + f), 0x01010101u, 0) << (BITS * f);
      before[w] = sum_to_here(own, lane) - own + fill * EACH;
    }
  }
  // The digits of row r: the last bytes but one of words that Floats can take them from. `reciprocal` is 2**32 / size,
  // rounded up: the quotient is exact for sums below 2**24.
  __device__ __forceinline__ void read(const u32* packed, int r, u32 size, u32 reciprocal, u32* digits) const {
    const u32 row = row_of(packed, r), from = before[r / FIELDS] >> (BITS * (r % FIELDS));
    const u32 start = FIELDS == 1 ? from : from & (1u << BITS) - 1;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 sum = dot4(row, 0x01010101u >> (24 - 8 * k), start);
      digits[k] = sum + 0x4b000000u - __umulhi(sum, reciprocal) * size;
    }
  }
};
