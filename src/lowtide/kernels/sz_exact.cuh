// Values that no code carries, and chunks that are not worth coding: as they are, or as they would come back.

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

// Element i of a mask, or of a gradient behind it.
template <typename T, int GIVE> __device__ __forceinline__ void put_where(const Args& a, u64 i, bool on) {
  T value;
  narrow(GIVE == GATED || !on ? 0.0f : 1.0f, &value);
  ((T*)a.x)[i] = GIVE == GATED && on ? ((const T*)a.other)[i] : value;
}

// Element i, given its bits; with RESTORED values only plus zero is zero.
template <typename T, int GIVE, bool RESTORED> __device__ void put_exact(const Args& a, u64 i, u32 bits) {
  if (UNFOLDS(GIVE)) {
    Unfolded<T, GIVE>::put(a, i, __uint_as_float(bits));
  } else if (GIVE != ONLY_VALUES) {
    put_where<T, GIVE>(a, i, (RESTORED ? bits : sizeof(T) == 4 ? bits << 1 : bits << 17) != 0);
  } else if (sizeof(T) == 4)
    ((u32*)a.x)[i] = bits;
  else
    ((u16*)a.x)[i] = (u16)bits;
}

template <typename T, int GIVE, bool RESTORED>
__device__ void read_raw(const Args& a, u64 start, u32 base, u32 valid, int lane) {
  for (u32 i = lane; i < valid; i += 32) {
    u32 bits = sizeof(T) == 4 ? *words_at(a, base + i) : ((const u16*)words_at(a, base))[i];
    put_exact<T, GIVE, RESTORED>(a, start + i, bits);
  }
}

template <typename T, int GIVE>
__device__ void read_escapes(const Args& a, u64 start, const u32* list, u32 escapes, int lane) {
  for (u32 i = lane; i < escapes; i += 32) {
    u32 word = list[i * Type<T>::escape];
    u64 at = start + (sizeof(T) == 4 ? word : word >> 16);
    put_exact<T, GIVE, false>(a, at, sizeof(T) == 4 ? list[2 * i + 1] : word & 0xffff);
  }
}

// A chunk that did not fit its payload: nobody is to take what comes back for a value.
template <typename T, int GIVE = ONLY_VALUES>
__device__ __forceinline__ void put_nothing(const Args& a, u64 start, u32 valid, int lane) {
  using In = typename Lies<T>::In;
  for (u64 i = start + lane; i < start + valid; i += 32) {
    narrow(__uint_as_float(0x7fc00000u), (In*)a.x + i);
    if (GIVE == SOURCE_AND_GATED) narrow(__uint_as_float(0x7fc00000u), (In*)a.beside + i);
  }
}

// What element i comes back as, bit for bit: itself where no code carries it. Where zero has a code, another value that
// comes back as zero is minus zero.
template <typename T, int ENTRY, int ZERO, bool DITHER> __device__ __forceinline__ u32 restored(const Args& a, u64 i) {
  T value = Element<T>::at(a, i);
  float x = widen(value);
  if (ZERO && x == 0.0f) return 0;
  u32 entry = entry_of<ENTRY>(a, i);
  int2 found = careful<T, ENTRY, DITHER>(a, i, x, entry);
  if (found.y) {
    u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), low_of(a), a.high) : 0, (int)(i & 3));
    int q = found.x + (int)centre_of<ENTRY>(a, entry);
    float unit = bfloat(a.step[entry]) * 0.00390625f;
    narrow(a.whole ? value_of<false>(q, 128, unit) : value_of<DITHER>(q, shift, unit), &value);
    if (ZERO && widen(value) == 0.0f) return sizeof(T) == 4 ? 0x80000000u : 0x8000u;
  }
  return sizeof(T) == 4 ? *(const u32*)&value : *(const u16*)&value;
}

// A chunk as it comes back, from element `start` on: whether it is stored so must not change values.
template <typename T, int ENTRY, int ZERO, bool DITHER>
__device__ void write_restored(const Args& a, u64 start, u32* out, u32 words, int lane) {
  constexpr u32 N = 4 / sizeof(T);
  for (u32 w = lane; w < words; w += 32) {
    u32 word = 0;
#pragma unroll 1
    for (u32 k = 0; k < N; ++k) {
      u64 i = start + N * w + k;
      if (i < a.count) word |= restored<T, ENTRY, ZERO, DITHER>(a, i) << (16 * k);
    }
    out[w] = word;
  }
}
