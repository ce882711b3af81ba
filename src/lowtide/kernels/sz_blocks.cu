// The coder blocks: a lane has a block of 32 values and writes as many planes of bits as its largest code needs.

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
  if (Entry<ENTRY>::constant) walk.read(a, staged, inverse, origin, scales);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (!Entry<ENTRY>::constant) walk.read(a, staged, inverse, origin, scales);
    u32 word = DITHER ? hash((u32)walk.group, low_of(a), a.high) : 0, low = ~0u, high = 0;
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
  for (int j = 0; j < 8; ++j) signs |= bits_of(group[j]);
  if (Entry<ENTRY>::centred || __any_sync(~0u, (signs & SIGN<T>) != 0))
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
  for (int j = 0; j < 8; ++j) load<WHOLE>(group[j], a, a.x, g + j * 32);
  Walk<ENTRY> walk;
  walk.begin(a, g);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float inverse[4], origin[4];
    walk.read(a, staged, inverse, origin, Scales<ENTRY>{a, origin_of<DITHER>(MIDDLE)});
    u32 word = DITHER ? hash((u32)g + j * 32, low_of(a), a.high) : 0;
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
    walk.next(a);
  }
}

template <typename T, int ENTRY, int ZERO, bool DITHER>
__global__ void __launch_bounds__(256, 4) blocks_encode(const Args a) {
  __shared__ Places places;
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const u32 ticket = take_ticket(a);
  stage<ENTRY>(a, staged, Scales<ENTRY>{a, origin_of<DITHER>(MIDDLE)});
  show_ticket(places, ticket);  // synchronises the block
  const Chunk chunk = numbered_chunk(a, places.ticket * 8 + warp, 1024);
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
template <typename T, int ENTRY, int ZERO, bool DITHER, int GIVE, bool SIGNED>
__device__ __forceinline__ void put_narrow(
    const Args& a, const float* staged, u64 start, const u32* low, u32 signs, int lane) {
  constexpr bool MASK = GIVE != ONLY_VALUES;
  Walk<ENTRY> walk;
  walk.begin(a, start / 4 + lane);
  float unit[4], origin[4];
  if (Entry<ENTRY>::constant && !MASK) walk.read(a, staged, unit, origin, units_for<ENTRY, DITHER>(a));
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 bytes[2] = {low[j / 2] & 0x0f0f0f0fu, low[j / 2] >> 4 & 0x0f0f0f0fu};
    float y[4];
    if (!Entry<ENTRY>::constant && !MASK) walk.read(a, staged, unit, origin, units_for<ENTRY, DITHER>(a));
    u32 word = DITHER && !MASK ? inverted_hash((u32)walk.group, low_of(a), a.high) : 0;
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
    if (GIVE == GATED) group.load(a.other, walk.group);
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
template <typename T, int ENTRY, int ZERO, bool DITHER, int GIVE>
__device__ __forceinline__ void put_wide(
    const Args& a, const float* staged, u64 start, const u32* low, const u32* in, u32 width, u32 signs, bool whole,
    int lane) {
  constexpr bool MASK = GIVE != ONLY_VALUES;
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
    u32 word = DITHER && !MASK ? inverted_hash((u32)walk.group, low_of(a), a.high) : 0;
    Group<T> given;
    if (GIVE == GATED && whole)
      load<true>(given, a, a.other, walk.group);
    else if (GIVE == GATED)
      load<false>(given, a, a.other, walk.group);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int n = 4 * j + k, at = 4 * (n % 8);
      u32 code = (low[n / 8] >> at & 15) | (high[n / 8] >> at & 15) << 4 | (top[n / 8] >> at & 15) << 8;
      if (MASK) {
        y[k] = !code ? 0.0f : GIVE == GATED ? given.at(k) : 1.0f;
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

template <typename T, int ENTRY, int ZERO, bool DITHER, int GIVE>
__global__ void __launch_bounds__(256, 5) blocks_decode(const Args a) {
  constexpr bool MASK = GIVE != ONLY_VALUES;
  extern __shared__ __align__(16) float staged[];
  int lane = threadIdx.x & 31;
  const bool even = aligned(a.x, sizeof(T) * 4) && (GIVE != GATED || aligned(a.other, sizeof(T) * 4));
  if (Entry<ENTRY>::staged && !MASK) {
    stage<ENTRY>(a, staged, units_for<ENTRY, DITHER>(a));
    __syncthreads();
  }
  for (u32 chunk = blockIdx.x * 8 + threadIdx.x / 32; chunk < a.chunks; chunk += gridDim.x * 8) {
    u64 start = (u64)chunk * 1024;
    u32 valid = (u32)min(a.count - start, 1024ull);
    u32 base = (u32)a.heads[chunk], after = (u32)a.heads[chunk + 1];
    if (REPLAYED && after > a.capacity) {
      put_nothing<T>(a, start, valid, lane);
      continue;
    }
    u32 nibble = a.headers[(u64)chunk * 16 + lane / 2] >> (4 * (lane & 1)) & 15;
    if (__shfl_sync(~0u, nibble, 0) == 8) {
      read_raw<T, GIVE, false>(a, start, base, valid, lane);
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
      put_wide<T, ENTRY, ZERO, DITHER, GIVE>(a, staged, start, low, in, width, signs, whole, lane);
    else if (!MASK && __any_sync(~0u, signs != 0))
      put_narrow<T, ENTRY, ZERO, DITHER, GIVE, true>(a, staged, start, low, signs, lane);
    else
      put_narrow<T, ENTRY, ZERO, DITHER, GIVE, false>(a, staged, start, low, signs, lane);
    u32 escapes = (after - base - total) / Type<T>::escape;
    if (escapes) {
      __syncwarp();
      read_escapes<T, GIVE>(a, start, a.words + base + total, escapes, lane);
    }
  }
}
