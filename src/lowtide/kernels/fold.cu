// Folds the input of a batch norm and what ReLU made of its output into one tensor, and back: lowtide.coding.fold says
// what is computed, in the same order, to the last bit. One look at every value; four neighbours to a thread at a time.

// As packed by lowtide/kernels/_fold.py.
struct Divisor {
  u32 inverse, shift;  // i / divisor is i * inverse >> shift for every i below 2 ** 31
};
struct Args {
  const void* from;    // x, or t
  const void* made;    // y, for the encoder; what ReLU's backward was given, for `gate`
  void* to;            // t; or x' or y'
  const float* table;  // a row for each number, of as many columns as channels
  u32 count, channels;
  Divisor run, lap;    // values of a channel that are neighbours, and channels
  u32 where;           // channels lie
};
struct Channels {      // whose table is made
  const float *mean, *inverse_std, *weight, *bias;
  const double *source, *made;  // bounds; `made` may be missing
  float* table;
  u32 channels, per_channel;    // whether there is a bound of x for each
};

constexpr u32 THREADS = 256, UNITS = 2;  // of a block; of four values, to a thread
constexpr double NEAR = 8, FINEST = 1.0 / 1048576;
using namespace folding;
enum { SOURCE, MADE };                       // what is unfolded
enum { RUNS, INNER, ANY };  // in runs of a multiple of four values; innermost, a multiple of four; elsewhere

__device__ __forceinline__ u32 divided(u32 i, const Divisor& by) { return (u32)((u64)i * by.inverse >> by.shift); }
__device__ __forceinline__ u32 channel_of(const Args& a, u32 i) {
  u32 run = divided(i, a.run);
  return run - divided(run, a.lap) * a.channels;
}

// The channels of values i .. i + 3.
struct Columns {
  u32 at[4];
  __device__ __forceinline__ Columns(const Args& a, u32 i) {
    at[0] = channel_of(a, i);
    if (a.where == ANY)
#pragma unroll
      for (u32 k = 1; k < 4; ++k) at[k] = channel_of(a, i + k);
  }
  __device__ __forceinline__ void read(const Args& a, int row, float* numbers) const {
    const float* columns = a.table + row * a.channels;
    if (a.where == INNER) {
      float4 v = __ldg((const float4*)(columns + at[0]));
      numbers[0] = v.x, numbers[1] = v.y, numbers[2] = v.z, numbers[3] = v.w;
      return;
    }
    numbers[0] = __ldg(columns + at[0]);
#pragma unroll
    for (u32 k = 1; k < 4; ++k) numbers[k] = a.where == ANY ? __ldg(columns + at[k]) : numbers[0];
  }
};

template <typename T> __global__ void __launch_bounds__(THREADS) fold(const Args a) {
  u32 i = (blockIdx.x * THREADS * UNITS + threadIdx.x) * 4;
#pragma unroll
  for (u32 unit = 0; unit < UNITS; ++unit, i += THREADS * 4) {
    if (i >= a.count) return;
    u32 left = a.count - i;
    Four<T> x = load_four((const T*)a.from + i, left), y = load_four((const T*)a.made + i, left);
    Columns columns(a, i);
    float zero[4], fine[4], coarse[4];  // the last two as what distances are multiplied by
    columns.read(a, ZERO, zero), columns.read(a, PER_FINE, fine), columns.read(a, PER_COARSE, coarse);
    Four<float> t;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) t.v[k] = folded(widen(x.v[k]), widen(y.v[k]), zero[k], fine[k], coarse[k]);
    store_four((float*)a.to + i, left, t);
  }
}

template <typename T, int PART> __global__ void __launch_bounds__(THREADS) unfold(const Args a) {
  u32 i = (blockIdx.x * THREADS * UNITS + threadIdx.x) * 4;
#pragma unroll
  for (u32 unit = 0; unit < UNITS; ++unit, i += THREADS * 4) {
    if (i >= a.count) return;
    u32 left = a.count - i;
    Four<float> t = load_four((const float*)a.from + i, left);
    Columns columns(a, i);
    float from[4], on[4], off[4];
    columns.read(a, PART == SOURCE ? ZERO : LOWEST, from);
    columns.read(a, PART == SOURCE ? FINE : STEEP, on);
    if (PART == SOURCE) columns.read(a, COARSE, off);
    Four<T> part;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      narrow(PART == MADE ? made_of(t.v[k], on[k], from[k]) : source_of(t.v[k], from[k], on[k], off[k]), &part.v[k]);
    }
    store_four((T*)a.to + i, left, part);
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS) gate(const Args a) {
  u32 i = (blockIdx.x * THREADS * UNITS + threadIdx.x) * 4;
#pragma unroll
  for (u32 unit = 0; unit < UNITS; ++unit, i += THREADS * 4) {
    if (i >= a.count) return;
    u32 left = a.count - i;
    Four<float> t = load_four((const float*)a.from + i, left);
    Four<T> gradient = load_four((const T*)a.made + i, left);
#pragma unroll
    for (u32 k = 0; k < 4; ++k)
      if (t.v[k] <= 0) gradient.v[k] = T{};
    store_four((T*)a.to + i, left, gradient);
  }
}

__global__ void __launch_bounds__(THREADS) tabulate(const Channels a) {
  u32 c = blockIdx.x * THREADS + threadIdx.x;
  if (c >= a.channels) return;
  double inverse_std = a.inverse_std[c], weight = a.weight[c], bias = a.bias[c];
  double spread = 1 / inverse_std, steep = fabs(weight) * inverse_std, sign = weight < 0 ? -1 : 1;
  double ahead = steep > 0 ? bias / steep : bias > 0 ? 1e300 : -1e300;  // of x0 is the mean
  bool is_near = fabs(ahead) <= NEAR * spread;
  if (!is_near) ahead = copysign(NEAR * spread, ahead);
  double coarse = fmax(a.source[a.per_channel ? c : 0], FINEST * spread), fine = coarse;
  if (a.made) fine = fmin(coarse, fmax(*a.made / steep, FINEST * spread));
  a.table[ZERO * a.channels + c] = (float)(a.mean[c] - sign * ahead);
  a.table[FINE * a.channels + c] = (float)(sign * fine);
  a.table[COARSE * a.channels + c] = (float)(sign * coarse);
  a.table[STEEP * a.channels + c] = (float)(steep * fine);
  a.table[LOWEST * a.channels + c] = (float)(is_near ? 0 : bias - steep * ahead);
  a.table[PER_FINE * a.channels + c] = (float)(sign / fine);
  a.table[PER_COARSE * a.channels + c] = (float)(-sign / coarse);
}
