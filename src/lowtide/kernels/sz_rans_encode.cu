// The coder rans: values become digits, digits symbols, symbols a stream in shared memory.

// Which values of group g have no digit that is sure, now that their centres are looked at. The group is read again:
// nothing of it has to be kept for this.
template <typename T, int ENTRY, int ZERO, bool DITHER, bool WHOLE>
__device__ __forceinline__ u32 doubtful(const Args& a, u32 g) {
  Group<T> lies;
  load<WHOLE>(lies, a, a.x, g);
  Folder<T, 1> folder;
  folder.begin(a, g);
  const auto group = folder.next(a, lies);
  Walk<ENTRY> walk;
  walk.begin(a, g);
  const int first = a.first - (ZERO ? 1 : 0);
  u32 word = DITHER ? hash(g, low_of(a), a.high) : 0, found = 0;
  bool all = ZERO == 2 && bits_of(group) & SIGN<T>;  // then zeros are not known either
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 entry = walk.of(a, k);
    float2 scale = Scales<ENTRY>{a, a.origin}(entry);
    u32 sum = sum_of<DITHER>(scale.y, group.at(k), scale.x, word, k);
    bool sure = sum >= a.lowest && sum < a.beyond;
    if (Entry<ENTRY>::centred) {
      int digit = (int)(sum - ROUNDING) >> 8, q = digit + first + (int)centre_of<ENTRY>(a, entry);
      sure = digit >= a.first - first && digit < a.size && q >= -Type<T>::reach && q <= Type<T>::reach;
    }
    if (all || !(sure || (ZERO && group.at(k) == 0.0f))) found |= 1u << k;
  }
  return found;
}

// With wide alphabets, and dtypes whose codes keep their promise only near zero, which digits are sure depends on the
// centres of a group's channels. Of innermost channels that is worked out beforehand for every four: sums from the one
// number on and before the other.
template <typename T, int V, int ENTRY>
constexpr bool LIMITED = V <= 2 && Type<T>::reach < 2046 && (ENTRY == INNER || ENTRY == FIXED);

template <typename T, int ENTRY, int ZERO> __device__ __forceinline__ uint2 limits_of(const Args& a, u32 entry) {
  const int first = a.first - (ZERO ? 1 : 0), reach = Type<T>::reach;
  int least = reach, most = -reach;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    int centre = (int)centre_of<ENTRY>(a, entry + k);
    least = min(least, centre), most = max(most, centre);
  }
  u32 lowest = (u32)(ROUNDING + 256 * (-reach - least - first));
  u32 beyond = (u32)(ROUNDING + 256 * (reach - most - first + 1));
  return make_uint2(max(lowest, a.lowest), min(beyond, a.beyond));
}
template <typename T, int V, int ENTRY, int SPAN> __device__ __forceinline__ u32 limit_words(const Args& a) {
  return LIMITED<T, V, ENTRY> && ENTRY == INNER ? staged_channels<ENTRY, SPAN>(a) / 2 : 0;
}
template <typename T, int V, int ENTRY, int ZERO, int SPAN>
__device__ __forceinline__ void stage_limits(const Args& a, uint2* limits) {
  for (u32 n = threadIdx.x; n < limit_words<T, V, ENTRY, SPAN>(a) / 2; n += blockDim.x)
    limits[n] = limits_of<T, ENTRY, ZERO>(a, 4 * n % a.modulo);
}

// How a symbol is encoded: the reciprocal of its share; the states, from which on a word is emitted first; 4096 - share;
// bias << 6 | unused << 5 | shift. For a state below 2**31 the quotient by the share is the high half of the product with
// the reciprocal, shifted, exactly.
constexpr u32 UNUSED = 1u << 5;
__device__ __forceinline__ uint4 encoding_of(u32 freq, u32 before) {
  if (freq < 2) return make_uint4(~0u, 1u << 19, 4095, (before + 4095) << 6);
  u32 shift = 32 - __clz(freq - 1);
  u32 whole = (1u << 31) / freq, rest = (1u << 31) - whole * freq;
  u32 reciprocal = (whole << shift) + ((rest << shift) + freq - 1) / freq;  // 2 ** (31 + shift) / freq, rounded up
  return make_uint4(reciprocal, freq << 19, 4096 - freq, before << 6 | (shift - 1));
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
      value = Element<T>::at(a, i);
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
    if (lane == 0) number = (u32)atomicAdd(a.work + 1, 1ull);
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
template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool PREDICTED, bool WHOLE>
__device__ __forceinline__ void encode_chunk(
    const Args& a, u64 start, const uint4* table, const float* staged, Staged& out, int lane) {
  constexpr int N = 4 * ROWS, S = N / V;
  constexpr bool LIMITS = LIMITED<T, V, ENTRY>;
  using Coded = typename Lies<T>::Coded;
  const uint2* limits = (const uint2*)(staged + staged_words<ENTRY, ROWS>(a));
  const u32 below = (1u << lane) - 1, begin = address_of(out.stream), symbols = kept(address_of(table));
  const u32 full = kept(begin + 2 * a.stage - 64 * S);
  const Scales<ENTRY> scales = {a, a.origin};
  constexpr bool HOLD = ENTRY != FIXED;
  const u32 pairs[3] = {held<HOLD>(a.pairs[0]), held<HOLD>(a.pairs[1]), held<HOLD>(a.pairs[2])};
  const u32 beyond = held<HOLD>(a.beyond);
  u32 s = 1u << 15, cursor = begin;
  int round = a.rows / ROWS - 1;
  u32 g = (u32)(start / 4) + lane + round * ROWS * 32;
  Walk<ENTRY, -1, ROWS> walk;
  walk.begin(a, ENTRY == INNER ? g : g + (ROWS - 1) * 32);
  float inverse[4], origin[4];
  if (Entry<ENTRY>::constant) walk.read(a, staged, inverse, origin, scales);
  uint2 limit = make_uint2(a.lowest, beyond);
  if (LIMITS && ENTRY == FIXED) limit = limits_of<T, ENTRY, ZERO>(a, walk.of(a, 0));
  Folder<T, -1> folder;
  folder.begin(a, g + (ROWS - 1) * 32);
  Group<T> group[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) load<WHOLE>(group[r], a, a.x, (u64)g + r * 32);
  for (; round >= 0; --round) {
    if (cursor > full) {
      out.length = (cursor - begin) / 2;
      if (!spill(a, out, lane)) {
        out.raw = true;
        return;
      }
      cursor = begin + 2 * out.length;
    }
    u32 packed[ROWS], most[ROWS], least[ROWS], bits = 0, rows = 0;
#pragma unroll
    for (int r = ROWS - 1; r >= 0; --r) {
      if (!Entry<ENTRY>::constant) walk.read(a, staged, inverse, origin, scales, r);
      if (LIMITS && ENTRY == INNER) limit = *(const uint2*)((const u8*)limits + walk.entry / 2 + 256 * r);
      u32 word = DITHER ? hash(g + r * 32, low_of(a), a.high) : 0;
      const auto coded = folder.next(a, group[r]);
      packed[r] = digits_of<Coded, ZERO, DITHER>(limit.x, coded, inverse, origin, word, least[r], most[r]);
      if (LIMITS && (most[r] >= limit.y || (ZERO != 2 && least[r] < limit.x))) rows |= 1u << r;
      if (ZERO == 2) bits |= bits_of(coded);
      if (ENTRY != INNER) walk.next(a);
    }
    if (ENTRY == INNER) walk.next(a);
    if (round) {  // there is time until they are needed
#pragma unroll
      for (int r = 0; r < ROWS; ++r) load<WHOLE>(group[r], a, a.x, (u64)g + r * 32 - ROWS * 32);
    }
    u32 escaped = 0, largest = most[0], smallest = ZERO == 2 ? a.lowest : least[0];
#pragma unroll
    for (int r = 1; r < ROWS; ++r) {
      largest = max(largest, most[r]);
      if (ZERO != 2) smallest = min(smallest, least[r]);
    }
    const bool negative = ZERO == 2 && (bits & SIGN<T>) != 0;
    if (__any_sync(~0u, (LIMITS ? rows != 0 : largest >= beyond || smallest < a.lowest) || negative)) {
      u32 todo = 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (negative || (!LIMITS && (most[r] >= beyond || (ZERO != 2 && least[r] < a.lowest)))) rows |= 1u << r;
      for (; rows; rows &= rows - 1) {
        int r = __ffs(rows) - 1;
        todo |= doubtful<T, ENTRY, ZERO, DITHER, WHOLE>(a, g + r * 32) << (4 * r);
      }
      escaped = mend<T, ROWS, ENTRY, ZERO, DITHER, WHOLE, false>(a, start, g, todo, packed, out, lane);
    }
    if (PREDICTED)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) packed[r] = differences<V>(packed[r], a.size, a.fill, lane);
    u32 places[S], unused = 0;
    symbols_of<V, ROWS>(packed, pairs, symbols, places);
    uint4 e[S];
#pragma unroll
    for (int t = 0; t < S; ++t) {
      e[t] = symbol_at(places[t], table);
      unused |= e[t].w;
    }
#pragma unroll
    for (int t = S - 1; t >= 0; --t) {
      emit(s, cursor, e[t].y, below, (u8*)out.stream);
      s += __funnelshift_r(__umulhi(s, e[t].x), 0, e[t].w) * e[t].z + (e[t].w >> 6);
    }
    if (!PREDICTED && __any_sync(~0u, kept(unused & UNUSED) != 0)) {  // symbols without a share: the table has `fill` in their places
      u32 todo = 0;
#pragma unroll
      for (int t = 0; t < S; ++t)
        if (e[t].w & UNUSED) todo |= ((1u << V) - 1) << (t * V);
      mend<T, ROWS, ENTRY, ZERO, DITHER, WHOLE, true>(a, start, g, todo & ~escaped, packed, out, lane);
    }
    g -= ROWS * 32;
  }
  out.length = (cursor - begin) / 2;
  out.state = s;
}

// The chunk's words at their place: the states, the stream, the escapes.
template <typename T>
__device__ __forceinline__ void write_staged(const Args& a, const Staged& staged, u32* out, int lane) {
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

// Where a chunk of `words` words goes: chunks lie in the order in which they are ready. Of `work` both numbers are zero
// between launches: words so far, with chunks so far above bit 40; slots that have been taken.
__device__ __forceinline__ u32 place_for(const Args& a, u32 words, int lane) {
  u64 before = 0;
  if (lane == 0) {
    before = atomicAdd(a.work, 1ull << 40 | words);
    if (before >> 40 == a.chunks - 1) {
      *(volatile u64*)a.work = 0;
      *(volatile u64*)(a.work + 1) = 0;
      if (a.status) *(volatile long long*)a.status = (long long)((before & (1ull << 40) - 1) + words);
    }
  }
  return __shfl_sync(~0u, (u32)before, 0);
}

// Where it goes instead if its payload has no room for it: to the reserve that payloads of a graph share. `at` then has the
// top bit. Null where there is no room either.
__device__ __forceinline__ u32* place_away(const Args& a, u32& at, u32 words, int lane) {
  if (!a.reserved) return 0;
  u64 before = 0;
  if (lane == 0) before = atomicAdd(a.taken, (u64)words);
  before = __shfl_sync(~0u, before, 0);
  if (before + words > a.reserved) return 0;
  at = AWAY | (u32)before;
  return a.reserve + before;
}

// The chunk of a warp, found anew each time: no register has to be kept for it.
__device__ __forceinline__ Chunk own_chunk(const Args& a, int warp) {
#ifdef __CUDA_ARCH__
  u32 block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
#else
  u32 block = blockIdx.x;
#endif
  return numbered_chunk(a, block * 8 + warp, a.rows * 128);
}

// PREDICTED: digits become differences, all of which have a share.
template <typename T, int V, int ROWS, int ENTRY, int ZERO, bool DITHER, bool PREDICTED = false>
__global__ void __launch_bounds__(256, Lies<T>::folded ? 3 : 4) rans_encode(const Args a) {
  static_assert(!PREDICTED || (ZERO == 0 && !Lies<T>::folded), "zeros are not predicted, nor are pairs");
  using In = typename Lies<T>::In;
  __shared__ uint4 table[256];
  __shared__ u32 sums[8];
  extern __shared__ __align__(16) u32 dynamic[];
  float* scales = (float*)dynamic;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  Chunk chunk = own_chunk(a, warp);
  if (128u * (lane + 1) <= chunk.valid * sizeof(In)) {  // it is read from its end
    const u64 at = chunk.start + chunk.valid - 128 / sizeof(In) * (lane + 1);
    prefetch((const In*)a.x + at);
    if (Lies<T>::folded) prefetch((const In*)a.other + at);
  }
  stage<ENTRY, ROWS>(a, scales, Scales<ENTRY>{a, a.origin});
  stage_limits<T, V, ENTRY, ZERO, ROWS>(a, (uint2*)(scales + staged_words<ENTRY, ROWS>(a)));
  {
    int symbols = 1, fill_symbol = 0;
    for (int k = 0; k < V; ++k) symbols *= a.size, fill_symbol = fill_symbol * a.size + a.fill;
    u32 freq = (int)threadIdx.x < symbols ? a.freqs[threadIdx.x] : 0;
    table[threadIdx.x] = encoding_of(freq, slots_before(freq, sums));
    __syncthreads();
    if (freq == 0) {
      uint4 fill = table[fill_symbol];
      fill.w |= UNUSED;
      table[threadIdx.x] = fill;
    }
    __syncthreads();
  }
  chunk = own_chunk(a, warp);
  if (!chunk.valid) return;  // from here on every warp goes its own way
  u32* own = dynamic + staged_words<ENTRY, ROWS>(a) + limit_words<T, V, ENTRY, ROWS>(a);
  own += warp * (a.stage / 2 + CODES + EXACTS * Type<T>::escape);
  Staged staged = {(u16*)own, own + a.stage / 2, own + a.stage / 2 + CODES, 0, 0, 0, 0, 0, 0, false};
  if (chunk.valid == a.rows * 128 && aligned(a.x, sizeof(In) * 4) && (!Lies<T>::folded || aligned(a.other, sizeof(In) * 4)))
    encode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, PREDICTED, true>(a, chunk.start, table, scales, staged, lane);
  else
    encode_chunk<T, V, ROWS, ENTRY, ZERO, DITHER, PREDICTED, false>(a, chunk.start, table, scales, staged, lane);
  chunk = own_chunk(a, warp);
  u32 words = 32 + (staged.spilled + staged.length + 1) / 2 + staged.coded + staged.lost * Type<T>::escape;
  const u32 as_raw = raw_words<T>(chunk.valid);
  staged.raw |= staged.coded > CODES || staged.lost > EXACTS || words >= as_raw;
  if (staged.raw) words = as_raw;
  u32 at = place_for(a, words, lane);
  u32* out = (u64)at + words <= a.capacity ? a.words + at : 0;
  if (REPLAYED && !out) out = place_away(a, at, words, lane);
  if (lane == 0) {
    int* head = a.heads + 3 * (u64)chunk.number;
    head[0] = (int)at;
    head[1] = staged.raw ? -1 : (int)(staged.spilled + staged.length);
    head[2] = staged.raw ? 0 : (int)(staged.coded | staged.lost << 16);
  }
  if (!out) return;
  if (staged.raw)
    write_restored<T, ENTRY, ZERO, DITHER>(a, chunk.start, out, words, lane);
  else
    write_staged<T>(a, staged, out, lane);
}
