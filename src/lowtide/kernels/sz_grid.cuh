// The arithmetic of lowtide.coding.grid: dither, codes, values, and the digits that codes become.

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

// One value once more, with care: its code, and whether the code keeps its promise.
template <typename T, bool DITHER>
__device__ __noinline__ int2 careful(float x, float inverse, const u16* step, const float* bound, u32 shift) {
  int q = code_of(x, inverse, shift);
  return make_int2(q, keeps<T, DITHER>(step, bound, x, q, shift));
}
template <typename T, int ENTRY, bool DITHER>
__device__ __forceinline__ int2 careful(const Args& a, u64 i, float x, u32 entry) {
  u32 shift = shift_of<DITHER>(DITHER ? hash((u32)(i >> 2), low_of(a), a.high) : 0, (int)(i & 3));
  int2 found = careful<T, DITHER>(x, a.inverse[entry], a.step + entry, a.bound + entry, shift);
  found.x -= (int)centre_of<ENTRY>(a, entry);
  return make_int2(found.x, found.y && found.x >= -2046 && found.x <= 2046);
}

// The bits of a group, or-ed together, of which SIGN are signs; a byte of ones for each value that is not zero, where all
// signs are clear.
template <typename T> constexpr u32 SIGN = 0x80008000u;
template <> constexpr u32 SIGN<float> = 0x80000000u;
template <typename T> __device__ __forceinline__ u32 bits_of(const Group<T>& group) { return group.v.x | group.v.y; }
template <> __device__ __forceinline__ u32 bits_of(const Group<float>& group) {
  u32 bits = __float_as_uint(group.v.x) | __float_as_uint(group.v.y) | __float_as_uint(group.v.z);
  return bits | __float_as_uint(group.v.w);
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
  return DITHER ? dot2(k & 1 ? 0x10000 : 1, word, k > 1, bits) : bits;
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
