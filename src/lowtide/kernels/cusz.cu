// The quantiser of codec `cusz`, in memory order: the arithmetic of lowtide.coding.grid, without a centre.

// As packed by lowtide/kernels/cusz.py.
struct Args {
  void* values;
  short* codes;
  const float* inverse;   // 256 / step
  const float* promised;
  const u16* step;        // bfloat16
  u64* lost;              // how many values have no code
  u32 count, low, high, dithered;
  u32 terms, divide[2], modulo[2], times[2];  // where elements find their step: lowtide.coding.layout.index_terms
};

constexpr u32 THREADS = 256;
constexpr int MAX_CODE = 2046, NO_CODE = -32768;

template <typename T> struct Reach;  // codes up to it keep their promise by construction
template <> struct Reach<float> { static constexpr int value = MAX_CODE; };
template <> struct Reach<Half> { static constexpr int value = 7; };
template <> struct Reach<Bfloat> { static constexpr int value = 8; };

__device__ __forceinline__ u32 entry_of(const Args& a, u32 i) {
  u32 entry = 0;
  if (a.terms > 0) entry = i / a.divide[0] % a.modulo[0] * a.times[0];
  if (a.terms > 1) entry += i / a.divide[1] % a.modulo[1] * a.times[1];
  return entry;
}
__device__ __forceinline__ float step_of(const Args& a, u32 entry) {
  return __uint_as_float((u32)__ldg(a.step + entry) << 16);
}

// Adding 1.5 * 2**23 leaves rint(x * inverse) in the low bits of the sum. What is out of range, inf and NaN come out
// further than 2046 steps from zero. Unsigned, because the difference may wrap.
__device__ __forceinline__ int code_of(float x, float inverse, int shift) {
  u32 units = __float_as_uint(fmaf(x, inverse, 12582912.0f)) - 0x4b400000u;
  return (int)(units + (u32)shift) >> 8;
}
__device__ __forceinline__ float value_of(const Args& a, int q, int shift, float step) {
  return ((float)(q * 256 - shift) + (a.dithered ? 127.5f : 128.0f)) * (step * 0.00390625f);
}

template <typename T>
__device__ __forceinline__ int quantised(const Args& a, u32 i, float x, int shift) {
  if (x == 0) return 0;
  u32 entry = entry_of(a, i);
  int q = code_of(x, __ldg(a.inverse + entry), shift), size = q < 0 ? -q : q;
  if (size > MAX_CODE) return NO_CODE;
  if (size <= Reach<T>::value) return q;
  T rounded;
  narrow(value_of(a, q, shift, step_of(a, entry)), &rounded);
  double error = (double)widen(rounded) - (double)x;
  return (error < 0 ? -error : error) <= (double)__ldg(a.promised + entry) ? q : NO_CODE;
}

__device__ __forceinline__ int shift_of(const Args& a, u32 word, u32 k) {
  return a.dithered ? (int)(word >> (8 * k) & 255) : 128;
}

template <typename T> __global__ void __launch_bounds__(THREADS) quantise(const Args a) {
  u32 group = blockIdx.x * THREADS + threadIdx.x, i = 4 * group, left = i < a.count ? a.count - i : 0;
  u32 word = a.dithered ? dither_word(group, a.low, a.high) : 0, lost = 0;
  Four<T> x = load_four((const T*)a.values + i, left);
  Four<short> codes;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    int q = quantised<T>(a, i + k, k < left ? widen(x.v[k]) : 0.0f, shift_of(a, word, k));
    lost += q == NO_CODE;
    codes.v[k] = (short)q;
  }
  store_four(a.codes + i, left, codes);
  lost = sum_of(lost);
  if (lost && threadIdx.x % 32 == 0) atomicAdd(a.lost, (u64)lost);
}

template <typename T> __global__ void __launch_bounds__(THREADS) restore(const Args a) {
  u32 group = blockIdx.x * THREADS + threadIdx.x, i = 4 * group;
  if (i >= a.count) return;
  u32 word = a.dithered ? dither_word(group, a.low, a.high) : 0;
  Four<short> codes = load_four((const short*)a.codes + i, a.count - i);
  Four<T> y;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    float step = step_of(a, entry_of(a, i + k));
    narrow(value_of(a, codes.v[k], shift_of(a, word, k), step), &y.v[k]);
  }
  store_four((T*)a.values + i, a.count - i, y);
}
