// Where elements find their step, and the numbers that go with it.

// How elements find their step. ENTRY 0: one for all. 1: runs of a length that is a multiple of four. 2: the innermost
// axis, its size a multiple of four. 3: runs of four or more, or the innermost axis of four or more. 4: anything.
// 5: as 1, but with more steps than a block can stage. 6: as 2, of a size that divides 128.
enum { TENSOR, RUNS, INNER, MIXED, ANY, MANY, FIXED };

// Codes are counted from a centre where a channel has a step of its own. Of some kinds a lane has the same four steps in
// every row; those of others are staged: a block keeps two numbers a channel in shared memory, ready for use.
template <int ENTRY> struct Entry {
  static constexpr bool centred = ENTRY != TENSOR, constant = ENTRY == TENSOR || ENTRY == FIXED;
  static constexpr bool staged = ENTRY == INNER || ENTRY == RUNS, inner = ENTRY == INNER || ENTRY == FIXED;
};

template <int ENTRY> __device__ __forceinline__ u32 entry_of(const Args& a, u64 element) {
  u32 i = (u32)element;  // tensors have fewer than 2**32
  if (ENTRY == TENSOR) return 0;
  if (Entry<ENTRY>::inner) return i % a.modulo;
  u32 entry = i / a.divide % a.modulo;
  return ENTRY == ANY ? entry * a.times + i / a.divide2 % a.modulo2 * a.times2 : entry;
}

__device__ __forceinline__ float bfloat(u16 bits) { return __uint_as_float((u32)bits << 16); }
template <int ENTRY> __device__ __forceinline__ float centre_of(const Args& a, u32 entry) {
  return Entry<ENTRY>::centred && a.centre ? bfloat(__ldg(a.centre + entry)) : 0.0f;
}

// What is staged for INNER: first all numbers of the one kind, then all of the other, each followed by those that it
// begins with, so that SPAN rows are read without looking for the end. For RUNS: pairs.
template <int ENTRY, int SPAN> __device__ __forceinline__ u32 staged_channels(const Args& a) {
  return a.modulo + (ENTRY == INNER ? 128 * (SPAN - 1) : 0);
}
template <int ENTRY, int SPAN> __device__ __forceinline__ u32 staged_words(const Args& a) {
  return Entry<ENTRY>::staged ? 2 * staged_channels<ENTRY, SPAN>(a) : 0;
}

// Walks the groups of one lane, SPAN rows (of 32 groups) at a time: on, or back with STEP -1. Where entries are staged,
// `entry` is a place in bytes. Kinds other than INNER read a row at a time.
template <int ENTRY, int STEP = 1, int SPAN = 1> struct Walk {
  static constexpr u32 SIZE = ENTRY == INNER ? 4 : ENTRY == RUNS ? 8 : 1, STRIDE = ENTRY == INNER ? 128 * SPAN : 128;
  u32 entry, rest, over, left;
  u64 group;
  __device__ __forceinline__ void begin(const Args& a, u64 g) {
    group = g;
    if (ENTRY == TENSOR || ENTRY == ANY) return;
    u32 i = (u32)(4 * g), all = Entry<ENTRY>::inner ? a.modulo : a.divide * a.modulo;
    u32 by = STEP > 0 ? STRIDE % all : all - STRIDE % all;  // back is on to the same entry
    if (Entry<ENTRY>::inner) {
      entry = i % a.modulo * SIZE, over = by % a.modulo * SIZE;
      return;
    }
    entry = i / a.divide % a.modulo * SIZE, rest = i % a.divide;
    over = by / a.divide % a.modulo * SIZE, left = by % a.divide;
  }
  // What wraps around below zero is larger than what does not: the smaller of both is the one wanted.
  __device__ __forceinline__ void next(const Args& a) {
    group += STRIDE / 4 * STEP;
    if (Entry<ENTRY>::constant || ENTRY == ANY) return;
    entry += over;
    if (ENTRY != INNER) {
      rest += left;
      if (rest >= a.divide) entry += SIZE;
      rest = min(rest, rest - a.divide);
    }
    entry = min(entry, entry - SIZE * a.modulo);
  }
  __device__ __forceinline__ u32 of(const Args& a, int k) const {
    if (ENTRY == TENSOR) return 0;
    if (ENTRY == RUNS || ENTRY == MANY) return entry / SIZE;
    if (Entry<ENTRY>::inner) return entry / SIZE + k;
    if (ENTRY == ANY) return entry_of<ANY>(a, 4 * group + k);
    u32 e = entry + (a.divide == 1 ? k : rest + k >= a.divide);
    return e >= a.modulo ? e - a.modulo : e;
  }
  // The two numbers of each value of a group, by its entry or as they are staged; for INNER, of row `row` of SPAN.
  template <typename F>
  __device__ __forceinline__ void read(
      const Args& a, const float* staged, float* first, float* second, F find, int row = 0) const {
    if (ENTRY == INNER) {
      const u8* at = (const u8*)staged + entry + 512 * row;
      float4 v = *(const float4*)at, w = *(const float4*)(at + 4 * staged_channels<ENTRY, SPAN>(a));
      first[0] = v.x, first[1] = v.y, first[2] = v.z, first[3] = v.w;
      second[0] = w.x, second[1] = w.y, second[2] = w.z, second[3] = w.w;
    } else if (ENTRY == TENSOR || ENTRY == RUNS || ENTRY == MANY) {
      float2 found = ENTRY == RUNS ? *(const float2*)((const u8*)staged + entry) : find(of(a, 0));
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
template <int ENTRY, int SPAN = 1, typename F>
__device__ __forceinline__ void stage(const Args& a, float* staged, F find) {
  if (!Entry<ENTRY>::staged) return;
  const u32 channels = staged_channels<ENTRY, SPAN>(a);
  for (u32 n = threadIdx.x; n < channels; n += blockDim.x) {
    float2 found = find(ENTRY == INNER ? n % a.modulo : n);
    if (ENTRY == RUNS)
      ((float2*)staged)[n] = found;
    else
      staged[n] = found.x, staged[channels + n] = found.y;
  }
}
