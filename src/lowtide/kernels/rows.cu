// Bounds of rows and the steps they lead to, in one pass over the values: what lowtide.bounds and lowtide.coding.grid
// work out, for rows that are stretches of memory. LANES threads share a row.

// As packed by lowtide/kernels/_rows.py.
struct Args {
  const void* x;
  double* bound;
  float* inverse;   // 256 / step
  float* promised;
  u16* step;        // bfloat16
  u64 rows, length;
  double times;     // what bounds are: so many standard deviations, or so much if they are not `measured`
  double most;      // steps are made for bounds up to this one
  double factor;    // from a bound to its step
  float least;      // steps below are taken as zero
  u32 measured;
};

constexpr int THREADS = 256;

// How many values, their mean, and the sum of the squares of their distances from it.
struct Moments {
  float count, mean, squares;
};

// Of two sets together. Between equal means nothing is rounded: the spread of equal values is exactly zero.
__device__ __forceinline__ Moments joined(const Moments& a, const Moments& b) {
  float count = a.count + b.count, share = count > 0 ? b.count / count : 0, apart = b.mean - a.mean;
  return {count, fmaf(apart, share, a.mean), fmaf(apart, apart * (a.count * share), a.squares + b.squares)};
}

// Of a power of two of values: for the same reason, in pairs.
template <int N> __device__ __forceinline__ Moments moments_of(const float* values) {
  float sums[N], squares = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) sums[k] = values[k];
#pragma unroll
  for (int half = N / 2; half; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  float mean = sums[0] * (1.0f / N);
#pragma unroll
  for (int k = 0; k < N; ++k) squares = fmaf(values[k] - mean, values[k] - mean, squares);
  return {(float)N, mean, squares};
}

// Sixteen bytes of values, in one load.
__device__ __forceinline__ void load(const float* x, float* values) {
  float4 v = __ldg((const float4*)x);
  values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}
template <typename T> __device__ __forceinline__ void load(const T* x, float* values) {
  uint4 v = __ldg((const uint4*)x);
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    T half;
    half.bits = (u16)(words[k / 2] >> (16 * (k % 2)));
    values[k] = widen(half);
  }
}

// What one lane sees of a row.
template <typename T, int LANES> __device__ __forceinline__ Moments share_of(const T* row, u64 length, u32 lane) {
  constexpr u32 N = 16 / sizeof(T);
  Moments sum = {0, 0, 0};
  float values[N];
  if (aligned(row, 16) && length % N == 0) {
    for (u64 i = lane * N; i < length; i += LANES * N) {
      load(row + i, values);
      sum = joined(sum, moments_of<N>(values));
    }
    return sum;
  }
  u64 i = lane;
  for (; i + LANES * (N - 1) < length; i += LANES * N) {
#pragma unroll
    for (u32 k = 0; k < N; ++k) values[k] = widen(row[i + k * LANES]);
    sum = joined(sum, moments_of<N>(values));
  }
  for (; i < length; i += LANES) sum = joined(sum, {1, widen(row[i]), 0});
  return sum;
}

// Of all lanes of a row, for the first of them.
template <int LANES> __device__ __forceinline__ Moments gathered(Moments sum) {
#pragma unroll
  for (int o = (LANES < 32 ? LANES : 32) / 2; o; o /= 2) {
    float count = __shfl_xor_sync(~0u, sum.count, o), mean = __shfl_xor_sync(~0u, sum.mean, o);
    sum = joined(sum, {count, mean, __shfl_xor_sync(~0u, sum.squares, o)});
  }
  if (LANES > 32) {
    __shared__ Moments parts[THREADS / 32];
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int part = 1; part < THREADS / 32; ++part) sum = joined(sum, parts[part]);
  }
  return sum;
}

// The float32 next to a number that is not negative, on the side of zero.
__device__ __forceinline__ float down(double x) {
  float y = (float)x;
  return (double)y > x ? __uint_as_float(__float_as_uint(y) - 1) : y;
}

template <typename T, int LANES> __global__ void __launch_bounds__(THREADS) measure(const Args a) {
  u64 row = (u64)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  u32 lane = threadIdx.x % LANES;
  double bound = a.times;
  if (a.measured) {
    Moments sum = {0, 0, 0};
    if (row < a.rows) sum = share_of<T, LANES>((const T*)a.x + row * a.length, a.length, lane);
    sum = gathered<LANES>(sum);
    T deviation;  // a statistic is in the dtype of its tensor
    narrow(sqrtf(sum.squares / sum.count), &deviation);
    bound *= (double)widen(deviation);
  }
  if (lane || row >= a.rows) return;
  if (!(bound <= 1.7976931348623157e308)) bound = 0;  // NaN and inf
  double wanted = (bound < a.most ? bound : a.most) * a.factor;
  u32 bits = __float_as_uint(down(wanted)) & 0xffff0000u;
  if (!(__uint_as_float(bits) >= a.least)) bits = 0;
  a.bound[row] = bound;
  a.promised[row] = down(bound);
  a.inverse[row] = 256.0f / __uint_as_float(bits);
  a.step[row] = (u16)(bits >> 16);
}
