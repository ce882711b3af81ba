// Codec `division`, of planes that are contiguous: block means, and what is left of them in few bits.
//
// A block of threads has some whole planes in shared memory, and reads and writes memory once. Encoder: lanes take
// rows of a block (of long ones, pieces of eight), add them up in the order of lowtide.coding.block_means, and leave
// residuals where values were; then every thread has one or four neighbouring places of all parts of a plane, as they
// are packed. Decoder: the same places; where parts begin at odd addresses, values go to shared memory first.
//
// Nothing is fused but what is exact: bytes and values are the codec's.

// A number over another one, their product below 2^31, without a division: by 2^31 / divisor, rounded up.
struct Divisor {
  u32 inverse;
  __device__ __forceinline__ u32 divide(u32 x) const { return __umulhi(2 * x, inverse); }
};

// As packed by lowtide/kernels/_division_cuda.py.
struct Args {
  void* values;
  u16 *mean, *low, *scale;  // bfloat16
  u8* codes;
  const u64* number;  // of a graph's replay, or null
  u32 low_key, high_key;
  u32 count, together;  // planes; those of a block of threads
  u32 height, width, area;
  u32 rows, across, blocks;  // of the blocks of a plane
  u32 places;                // of a part
  Divisor by_width, by_across, by_blocks, by_units;  // units: what a thread takes of a plane, PLACES places
  float inside, right, bottom, corner;  // 1 / the number of values of a block, by where it lies
  float largest;                        // finite number of the dtype
};

constexpr u32 THREADS = 256, WARPS = THREADS / 32;
// Of threads, on a multiprocessor, so that some load while others compute: 40 registers a thread. Eight parts take 48.
constexpr u32 blocks_of(u32 bits) { return bits == 1 ? 5 : 6; }
constexpr u32 ORIGIN = 0x43000000u;  // 128, whose second lowest byte counts in steps of 1 / 256
constexpr u32 AHEAD = 4;  // loads of 16 bytes that a thread has under way

// What a tile's kernels share beside values. Extremes come first, as integers in the order of the floats.
struct alignas(16) Scale {
  union { int least; float low; };
  union { int most; float inverse; };
  u32 sound;   // all ones, or zero
  u32 origin;  // of the dither, ORIGIN: loaded with the rest, it takes no instruction
};

__device__ __forceinline__ float infinite() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ int ordered(float x) {
  int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float of_ordered(int bits) { return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff)); }

__device__ __forceinline__ float limited(float x, float largest) {  // NaN stays
#ifdef __CUDA_ARCH__
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(largest));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(-largest));
  return y;
#else
  return x > largest ? largest : x < -largest ? -largest : x;
#endif
}

// The planes of a block of threads.
struct Tile {
  u32 first, planes, values;
  __device__ __forceinline__ Tile(const Args& a) {
    first = blockIdx.x * a.together, planes = min(a.together, a.count - first), values = planes * a.area;
  }
};

template <typename T> struct alignas(16) Vector { T v[16 / sizeof(T)]; };

// ---- encoder -----------------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ void load_tile(const T* values, u32 count, float* to) {
  constexpr u32 EACH = 16 / sizeof(T), STRIDE = EACH * THREADS;
  u32 done = 0;
  if (aligned(values, 16)) {
#pragma unroll 1
    for (u32 i = threadIdx.x * EACH; i < count; i += AHEAD * STRIDE) {
      Vector<T> held[AHEAD];
#pragma unroll
      for (u32 n = 0; n < AHEAD; ++n)
        if (i + n * STRIDE + EACH <= count) held[n] = *(const Vector<T>*)(values + i + n * STRIDE);
#pragma unroll
      for (u32 n = 0; n < AHEAD; ++n)
        if (i + n * STRIDE + EACH <= count) {
#pragma unroll
          for (u32 k = 0; k < EACH; k += 4)
            *(float4*)(to + i + n * STRIDE + k) = make_float4(
                widen(held[n].v[k]), widen(held[n].v[k + 1]), widen(held[n].v[k + 2]), widen(held[n].v[k + 3]));
        }
    }
    done = count / EACH * EACH;
  }
#pragma unroll 1
  for (u32 i = done + threadIdx.x; i < count; i += THREADS) to[i] = widen(values[i]);
}

template <u32 SIZE> __device__ __forceinline__ float add_up(const float* x) {
  if constexpr (SIZE == 1) return x[0];
  else return add_up<SIZE / 2>(x) + add_up<SIZE / 2>(x + SIZE / 2);
}

// Neighbours at an address that is aligned to all of them.
template <u32 V> struct alignas(4 * V) Floats { float v[V]; };

// Extremes of lanes `step`, 2 * step, ... below `stop` apart, noted for a plane by the first of them.
__device__ __forceinline__ void note(Scale* to, bool first, float least, float most, u32 step, u32 stop) {
  for (u32 o = step; o < stop; o *= 2) {
    least = fminf(least, __shfl_xor_sync(~0u, least, o));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  }
  if (first) {
    atomicMin(&to->least, ordered(least));
    atomicMax(&to->most, ordered(most));
  }
}

// Means of the blocks of a tile; its values become residuals, and extremes are noted. The last piece of a row that
// is not empty has TAIL values.
template <u32 TALL, u32 WIDE, u32 V, u32 TAIL>
__device__ __forceinline__ void take_means(const Args& a, const Tile& tile, float* values, Scale* scales, u16* means) {
  constexpr u32 PIECE = WIDE < 8 ? WIDE : 8, PIECES = WIDE / PIECE, LANES = TALL * PIECES, AT_ONCE = 32 / LANES;
  // What the lanes of a warp load together shall lie in different banks: they take neighbouring blocks of a map,
  // neighbouring pieces of a row, and some begin with the second half of a piece. Two halves are added in any order.
  constexpr u32 STEP = TALL > 1 ? AT_ONCE : 1, STOP = STEP * LANES;
  u32 lane = threadIdx.x % 32, piece = lane / STEP % LANES, which = TALL > 1 ? lane % AT_ONCE : lane / LANES;
  u32 down = piece / PIECES, over = piece % PIECES * PIECE, swap = 0;
  if (V == 4 && PIECE == 8 && TAIL == 8) swap = TALL > 1 ? 4 * (down & ~(a.width / 4) & 1) : piece & 4;
  u32 count = tile.planes * a.blocks;
  float least = infinite(), most = -infinite();
  for (u32 start = threadIdx.x / 32 * AT_ONCE; start < count; start += WARPS * AT_ONCE) {
    u32 block = start + which, plane = a.by_blocks.divide(block), rest = block - plane * a.blocks;
    u32 block_row = a.by_across.divide(rest), block_column = rest - block_row * a.across;
    u32 row = block_row * TALL + down, column = block_column * WIDE + over;
    float* at = values + plane * a.area + row * a.width + column;
    bool exists = block < count, some = exists && row < a.height && column < a.width;
    bool whole = some && (TAIL == PIECE || column + PIECE <= a.width);
    Floats<V> x[PIECE / V];
#pragma unroll
    for (u32 k = 0; k < PIECE; k += V) {
      x[k / V] = Floats<V>{};
      if (k < TAIL ? some : whole) x[k / V] = *(const Floats<V>*)(at + (k ^ swap));
    }
    float sum = add_up<PIECE>(&x[0].v[0]);
#pragma unroll
    for (u32 o = STEP; o < STOP; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
    bool last = block_column == a.across - 1;
    float share = block_row == a.rows - 1 ? (last ? a.corner : a.bottom) : (last ? a.right : a.inside);
    Bfloat mean;
    narrow(sum * share, &mean);
    float base = widen(mean);
    if (exists && piece == 0) means[block] = mean.bits;
    if (a.together > 1) least = infinite(), most = -infinite();
#pragma unroll
    for (u32 k = 0; k < PIECE; k += V) {
      if (k < TAIL ? some : whole) {
#pragma unroll
        for (u32 n = 0; n < V; ++n) {
          float residual = x[k / V].v[n] - base;
          x[k / V].v[n] = residual, least = fminf(least, residual), most = fmaxf(most, residual);
        }
        *(Floats<V>*)(at + (k ^ swap)) = x[k / V];
      }
    }
    // NaN, which extremes pass over, comes from a mean that is not finite: values are finite where all means are.
    if (exists && (mean.bits & 0x7f80) == 0x7f80) least = -infinite(), most = infinite();
    if (a.together > 1) note(scales + plane, exists && piece == 0, least, most, STEP, STOP);
  }
  if (a.together == 1) note(scales, lane == 0, least, most, 1, 32);
}

// As in lowtide.coding.minmax.
template <u32 BITS> __device__ __forceinline__ void take_scale(const Args& a, u32 plane, Scale* scale) {
  float least = of_ordered(scale->least) + 0.0f, most = of_ordered(scale->most);  // of two zeros, the positive one
  u32 bits = __float_as_uint(least);
  bits = ((int)bits < 0 ? bits + 0xffff : bits) & 0xffff0000u;
  float low = __uint_as_float(bits), span = most - low;
  bool sound = span < 0x1p126f;  // not where it is NaN
  float step = fmaxf(span * (float)(1.0 / ((1 << BITS) - 1)), 0x1p-126f);
  u32 step_bits = (__float_as_uint(step) + 0xfffc) & 0xffff0000u;
  step = __uint_as_float(step_bits);
  float inverse = __uint_as_float(0x7ef311c7u - step_bits);
#pragma unroll
  for (int n = 0; n < 3; ++n) inverse = inverse * (2.0f - step * inverse);
  a.low[plane] = sound ? (u16)(bits >> 16) : 0;
  a.scale[plane] = !sound ? 0x7fc0 : most > low ? (u16)(step_bits >> 16) : 0;
  scale->low = low, scale->inverse = inverse, scale->sound = sound ? ~0u : 0, scale->origin = ORIGIN;
}

// A code in the lowest byte, and whatever above: a sum with 1.5 * 2^23 is rounded to an integer, ties to even. The
// codec cuts t off at the highest code: it can exceed that by some units in its last place, which no rounding shows.
template <bool DITHER>
__device__ __forceinline__ u32 code_of(float residual, const Scale& scale, u32 word, u32 part) {
  float t = (residual - scale.low) * scale.inverse;
  // 128 + byte / 256 - 128 - 127.5 / 256, which is exact.
  if (DITHER) t += __uint_as_float(__byte_perm(word, scale.origin, 0x7604 | part % 4 << 4)) - 128.498046875f;
  return __float_as_uint(t + 12582912.0f);
}

template <u32 BITS, bool DITHER, u32 PLACES, bool FULL>
__device__ __forceinline__ void put_codes(const Args& a, const Tile& tile, const float* values, const Scale* scales) {
  constexpr u32 PER_BYTE = 8 / BITS, PARTS = PER_BYTE > 4 ? PER_BYTE : 4;
  u32 units = a.places / PLACES, nbytes = a.places * (PARTS / PER_BYTE);
  u32 low_key = a.low_key + (a.number ? (u32)*a.number : 0);
  u8* codes = a.codes + (u64)tile.first * nbytes;
#pragma unroll 1
  for (u32 unit = threadIdx.x; unit < tile.planes * units; unit += THREADS) {
    u32 plane = a.by_units.divide(unit), place = (unit - plane * units) * PLACES;
    Scale scale = scales[plane];
    const float* at = values + plane * a.area + place;
    u8* to = codes + (plane * nbytes + place);
    u32 counter = (tile.first + plane) * (a.places * (PARTS / 4)) + place, words[PLACES], bytes[PLACES];
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
      Floats<PLACES> x = *(const Floats<PLACES>*)(at + part * a.places);
#pragma unroll
      for (u32 k = 0; k < PLACES; ++k) {
        if (DITHER && part % 4 == 0)
          words[k] = dither_word(counter + part / 4 * a.places + k, low_key, a.high_key);
        u32 code = code_of<DITHER>(x.v[k], scale, words[k], part);
        if (!FULL && part * a.places + place + k >= a.area) code = 0;
        bytes[k] = part % PER_BYTE ? bytes[k] + (code << part % PER_BYTE * BITS) : code;
      }
      if (part % PER_BYTE == PER_BYTE - 1) {
        if constexpr (PLACES == 4) {
          u32 lower = __byte_perm(bytes[0], bytes[1], 0x0040), upper = __byte_perm(bytes[2], bytes[3], 0x0040);
          *(u32*)to = __byte_perm(lower, upper, 0x5410) & scale.sound;
        } else {
          *to = (u8)(bytes[0] & scale.sound);
        }
        to += a.places;
      }
    }
  }
}

template <typename T, u32 BITS, bool DITHER, u32 TALL, u32 WIDE, u32 V, u32 TAIL, u32 PLACES, bool FULL>
__global__ void __launch_bounds__(THREADS, blocks_of(BITS)) encode(const Args a) {
  extern __shared__ __align__(16) u8 memory[];
  Scale* scales = (Scale*)memory;
  u16* means = (u16*)(scales + a.together);
  float* values = (float*)(memory + (a.together * (sizeof(Scale) + 2 * a.blocks) + 15) / 16 * 16);
  Tile tile(a);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < tile.planes; i += THREADS)
    scales[i].least = ordered(infinite()), scales[i].most = ordered(-infinite());
  load_tile((const T*)a.values + (u64)tile.first * a.area, tile.values, values);
  __syncthreads();
  take_means<TALL, WIDE, V, TAIL>(a, tile, values, scales, means);
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < tile.planes; i += THREADS) take_scale<BITS>(a, tile.first + i, scales + i);
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < tile.planes * a.blocks; i += THREADS)
    a.mean[(u64)tile.first * a.blocks + i] = means[i] & (u16)scales[a.by_blocks.divide(i)].sound;
  put_codes<BITS, DITHER, PLACES, FULL>(a, tile, values, scales);
}

// ---- decoder -----------------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ void store_tile(const T* from, u32 count, T* values) {
  constexpr u32 EACH = 16 / sizeof(T);
  u32 done = 0;
  if (aligned(values, 16)) {
    done = count / EACH * EACH;
    for (u32 i = threadIdx.x * EACH; i < done; i += THREADS * EACH)
      *(Vector<T>*)(values + i) = *(const Vector<T>*)(from + i);
  }
#pragma unroll 1
  for (u32 i = done + threadIdx.x; i < count; i += THREADS) values[i] = from[i];
}

// The bytes of a unit, one or four; a payload's may lie anywhere.
template <u32 PLACES> __device__ __forceinline__ u32 bytes_at(const u8* at, bool whole) {
  if (PLACES == 1) return *at;
  if (whole) return *(const u32*)at;
  return at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24;
}

template <typename T, u32 BITS, u32 TALL, u32 WIDE, u32 V, u32 PLACES, bool FULL, bool SINGLE>
__global__ void __launch_bounds__(THREADS, blocks_of(BITS)) decode(const Args a) {
  extern __shared__ __align__(16) u8 memory[];
  constexpr u32 PER_BYTE = 8 / BITS, PARTS = PER_BYTE > 4 ? PER_BYTE : 4, LEVELS = (1 << BITS) - 1;
  constexpr bool STAGED = PLACES == 1;
  constexpr u32 MEANS = SINGLE || V == 4 ? 1 : PLACES;  // that the values of a unit in one part have
  float *scales = (float*)memory, *bases = scales + a.together;
  T* staged = (T*)(memory + (4 * a.together * (1 + a.blocks) + 15) / 16 * 16);
  Tile tile(a);
  T* values = (T*)a.values + (u64)tile.first * a.area;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < tile.planes; i += THREADS) scales[i] = widen(Bfloat{a.scale[tile.first + i]});
#pragma unroll 1
  for (u32 i = threadIdx.x; i < tile.planes * a.blocks; i += THREADS) {
    Bfloat mean{a.mean[(u64)tile.first * a.blocks + i]}, low{a.low[tile.first + a.by_blocks.divide(i)]};
    bases[i] = widen(mean) + widen(low);
  }
  __syncthreads();
  u32 units = a.places / PLACES, nbytes = a.places * (PARTS / PER_BYTE);
  const u8* codes = a.codes + (u64)tile.first * nbytes;
  bool whole = aligned(a.codes, 4);
#pragma unroll 1
  for (u32 unit = threadIdx.x; unit < tile.planes * units; unit += THREADS) {
    u32 plane = a.by_units.divide(unit), place = (unit - plane * units) * PLACES, bytes = 0;
    const u8* from = codes + (plane * nbytes + place);
    const float* of_plane = bases + plane * a.blocks;
    T* to = (STAGED ? staged : values) + (plane * a.area + place);
    float scale = scales[plane], base[PARTS][MEANS];
    // All loads before the first store: for all that is known, that may be to the same address.
#pragma unroll
    for (u32 n = 0; n < PARTS * MEANS; ++n) {
      u32 value = n / MEANS * a.places + place + n % MEANS, inside = FULL ? value : min(value, a.area - 1);
      u32 row = a.by_width.divide(inside), column = inside - row * a.width;
      base[n / MEANS][n % MEANS] = of_plane[SINGLE ? 0 : row / TALL * a.across + column / WIDE];
    }
#pragma unroll
    for (u32 part = 0; part < PARTS; ++part) {
      if (part % PER_BYTE == 0) bytes = bytes_at<PLACES>(from, whole), from += a.places;
      u32 value = part * a.places + place;
      Four<T> y;
#pragma unroll
      for (u32 k = 0; k < PLACES; ++k) {
        // 2^23 and the code, as a float. The product is exact: fusing it with the sum changes nothing.
        float code = __uint_as_float(bytes >> (8 * k + part % PER_BYTE * BITS) & LEVELS | 0x4b000000u) - 8388608.0f;
        narrow(limited(fmaf(code, scale, base[part][k % MEANS]), a.largest), &y.v[k]);
      }
      if (FULL || value < a.area) {  // four of them, where it is a multiple of four, as the area then is
        if (STAGED) to[part * a.places] = y.v[0];
        else *(Four<T>*)(to + part * a.places) = y;
      }
    }
  }
  if (STAGED) {
    __syncthreads();
    store_tile(staged, tile.values, values);
  }
}
