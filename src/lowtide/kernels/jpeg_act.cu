// Codec `jpeg_act`: the largest magnitude of each channel, the cosine transform of maps, and the codes of both kinds.
//
// Sums are taken in the order of lowtide.coding.dct and no product is fused with them: codes and values are the
// codec's, bit for bit.

// As packed by lowtide/kernels/jpeg_act.py.
struct Args {
  void* values;
  short* codes;
  u32* peak;            // largest magnitude of each channel, float32
  const float* bases;   // for transforms of 1 .. 8 values: 8 x 8, the weights of an output in a row
  const float* steps;   // of the coefficients of a plane
  const u32* places;    // of the same: the band in the highest two bits, the rank in it
  u64* lost;            // values that are not finite
  u64 starts[4];        // of bands, in codes
  u32 sizes[4];         // of bands, in coefficients of a plane
  u32 count, first;     // values, and the first plane of them
  u32 height, width;
  u32 divide, modulo;   // element i belongs to channel i / divide % modulo
  u32 low, high, mode;
  float largest;        // finite number of the dtype
};

constexpr u32 WARPS = 8, THREADS = 32 * WARPS;
constexpr u32 PIECE = 4096;  // of a run of values of one channel, for a warp
constexpr u32 PITCH = 33;    // of a row of a tile, so that lanes read from different banks
constexpr float UNIT = 127.0f, PUBLISHED = 144.0f;
enum { NEAREST, DITHER, FAITHFUL };

__device__ __forceinline__ float finite(float x, float instead) {
  return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u ? instead : x;
}
__device__ __forceinline__ float peak_of(const Args& a, u32 i) {
  return __uint_as_float(__ldg(a.peak + i / a.divide % a.modulo));
}

// ---- peaks, in memory order --------------------------------------------------------------------------------------

__device__ __forceinline__ void raise(const Args& a, u32 channel, u32 most) {
  if (most > *(volatile const u32*)(a.peak + channel)) atomicMax(&a.peak[channel], most);  // it only grows meanwhile
}
// The bits of a magnitude: as integers they are in the order of the numbers.
__device__ __forceinline__ u32 magnitude(float x, u32& lost) {
  u32 bits = __float_as_uint(x) & 0x7fffffffu;
  if (bits < 0x7f800000u) return bits;
  ++lost;
  return 0;
}
__device__ __forceinline__ void note_lost(const Args& a, u32 lost) {
  lost = sum_of(lost);
  if (lost && threadIdx.x % 32 == 0) atomicAdd(a.lost, (u64)lost);
}

// Runs of `divide` values belong to one channel: a warp for a piece of one.
template <typename T> __global__ void __launch_bounds__(THREADS) peaks_of_runs(const Args a) {
  u32 warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 pieces = (a.divide + PIECE - 1) / PIECE, run = warp / pieces, start = warp % pieces * PIECE;
  if (run >= a.count / a.divide) return;
  const T* values = (const T*)a.values + (u64)run * a.divide;
  u32 stop = min(start + PIECE, a.divide), most = 0, lost = 0;
  for (u32 i = start + lane; i < stop; i += 32) most = max(most, magnitude(widen(values[i]), lost));
  most = most_of(most);
  if (lane == 0) raise(a, run % a.modulo, most);
  note_lost(a, lost);
}

// Neighbours belong to different channels: the grid has a multiple of divide * modulo threads at work.
template <typename T> __global__ void __launch_bounds__(THREADS) peaks_of_columns(const Args a) {
  u64 thread = (u64)blockIdx.x * THREADS + threadIdx.x, period = (u64)a.divide * a.modulo;
  u64 threads = (u64)gridDim.x * THREADS / period * period;
  u32 most = 0, lost = 0;
  if (thread < threads)
    for (u64 i = thread; i < a.count; i += threads)
      most = max(most, magnitude(widen(((const T*)a.values)[i]), lost));
  if (most) raise(a, (u32)(thread % period) / a.divide, most);
  note_lost(a, lost);
}

// ---- codes -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float unit_of(float x, float peak) { return peak > 0 ? finite(x, 0.0f) / peak : 0.0f; }
__device__ __forceinline__ float offset_of(const Args& a, u32 i) {
  return a.mode == DITHER ? ((float)dither_byte(i, a.low, a.high) - 127.5f) * 0.00390625f : 0.0f;
}
// A value before the transform.
__device__ __forceinline__ float scaled(const Args& a, float unit) {
  if (a.mode != FAITHFUL) return unit * UNIT;
  float fixed = rintf(unit * PUBLISHED);
  return fixed < -128.0f ? -128.0f : fixed > 127.0f ? 127.0f : fixed;
}
__device__ __forceinline__ short code_of(const Args& a, float value, float step, u32 i) {
  if (a.mode == FAITHFUL) return (short)truncf(rintf(value) / step);
  return (short)rintf(value / step + offset_of(a, i));
}
__device__ __forceinline__ float value_of(const Args& a, short code, float step, u32 i) {
  return ((float)code - offset_of(a, i)) * step;
}
template <typename T> __device__ __forceinline__ T restored(const Args& a, float value, float peak) {
  value = value * (a.mode == FAITHFUL ? 1.0f / PUBLISHED : 1.0f / UNIT) * peak;
  T y;
  narrow(value < -a.largest ? -a.largest : value > a.largest ? a.largest : value, &y);
  return y;
}

// Maps without a transform, and rows.
template <typename T> __global__ void __launch_bounds__(THREADS) encode_plain(const Args a) {
  u32 i = 4 * (blockIdx.x * THREADS + threadIdx.x), start = a.first * a.height * a.width;
  if (i >= a.count) return;
  Four<T> x = load_four((const T*)a.values + i, a.count - i);
  Four<short> codes;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) {
    float value = scaled(a, unit_of(widen(x.v[k]), peak_of(a, start + i + k)));
    codes.v[k] = a.mode == FAITHFUL ? (short)value : code_of(a, value, 1.0f, start + i + k);
  }
  store_four(a.codes + start + i, a.count - i, codes);
}
template <typename T> __global__ void __launch_bounds__(THREADS) decode_plain(const Args a) {
  u32 i = 4 * (blockIdx.x * THREADS + threadIdx.x), start = a.first * a.height * a.width;
  if (i >= a.count) return;
  Four<short> codes = load_four((const short*)a.codes + start + i, a.count - i);
  Four<T> y;
#pragma unroll
  for (u32 k = 0; k < 4; ++k)
    y.v[k] = restored<T>(a, value_of(a, codes.v[k], 1.0f, start + i + k), peak_of(a, start + i + k));
  store_four((T*)a.values + i, a.count - i, y);
}

// ---- the transform -----------------------------------------------------------------------------------------------

// A warp has 8 rows of 32 columns of a plane. A lane is a column, and for sums along rows a row of one of four blocks.
struct Tile {
  u32 plane, row, column, rows;  // of those handled here; where the tile begins; its rows
  __device__ __forceinline__ Tile(const Args& a, u32 number) {
    u32 across = (a.width + 31) / 32, down = (a.height + 7) / 8;
    column = number % across * 32, number /= across;
    row = number % down * 8, plane = number / down;
    rows = min(a.height - row, 8u);
  }
};
__device__ __forceinline__ u32 tiles_of(const Args& a) {
  return a.count / (a.height * a.width) * ((a.width + 31) / 32) * ((a.height + 7) / 8);
}

// Outputs of a transform of `size` values.
__device__ __forceinline__ void transform(const float* bases, u32 size, const float* in, float* out) {
  const float4* weights = (const float4*)(bases + 64 * (size - 1));
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float4 lower = weights[2 * k], upper = weights[2 * k + 1];
    float w[8] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
    float sum = in[0] * w[0];
#pragma unroll
    for (u32 n = 1; n < 8; ++n) {
      if (n < size) sum = sum + in[n] * w[n];
    }
    out[k] = sum;
  }
}
// Along the rows of a tile in shared memory, then along its columns: a lane's column is the result.
__device__ __forceinline__ void transform_tile(
    const Args& a, const Tile& tile, const float* bases, float* shared, float* column) {
  u32 lane = threadIdx.x % 32, block = lane / 8 * 8, row = lane % 8;
  float in[8], out[8];
  __syncwarp();
  if (tile.column + block < a.width) {
    u32 size = min(a.width - tile.column - block, 8u);
    float* at = shared + row * PITCH + block;
#pragma unroll
    for (int n = 0; n < 8; ++n) in[n] = at[n];
    transform(bases, size, in, out);
#pragma unroll
    for (int n = 0; n < 8; ++n) at[n] = out[n];
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 8; ++n) in[n] = shared[n * PITCH + lane];
  transform(bases, tile.rows, in, column);
  __syncwarp();
}

// Where the code of a coefficient of a plane stands.
__device__ __forceinline__ u64 place_of(const Args& a, u32 plane, u32 coefficient) {
  u32 place = __ldg(a.places + coefficient), band = place >> 30;
  return a.starts[band] + (u64)plane * a.sizes[band] + (place & 0x3fffffffu);
}

__device__ __forceinline__ void stage_bases(const Args& a, float* bases) {
  for (u32 i = threadIdx.x; i < 8 * 64; i += THREADS) bases[i] = a.bases[i];
  __syncthreads();
}

template <typename T> __global__ void __launch_bounds__(THREADS) encode_maps(const Args a) {
  __shared__ __align__(16) float bases[8 * 64];
  __shared__ float memory[WARPS][8 * PITCH];
  stage_bases(a, bases);
  u32 lane = threadIdx.x % 32, area = a.height * a.width, tiles = tiles_of(a);
  float* shared = memory[threadIdx.x / 32];
  for (u32 number = blockIdx.x * WARPS + threadIdx.x / 32; number < tiles; number += gridDim.x * WARPS) {
    Tile tile(a, number);
    u32 column = tile.column + lane, plane = a.first + tile.plane, at = tile.row * a.width + column;
    float peak = peak_of(a, plane * area);
    const T* values = (const T*)a.values + tile.plane * area + at;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      bool inside = column < a.width && n < tile.rows;
      shared[n * PITCH + lane] = inside ? scaled(a, unit_of(widen(values[n * a.width]), peak)) : 0.0f;
    }
    float out[8];
    transform_tile(a, tile, bases, shared, out);
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      u32 coefficient = at + n * a.width;
      if (column < a.width && n < tile.rows)
        a.codes[place_of(a, plane, coefficient)] =
            code_of(a, out[n], __ldg(a.steps + coefficient), plane * area + coefficient);
    }
  }
}

template <typename T> __global__ void __launch_bounds__(THREADS) decode_maps(const Args a) {
  __shared__ __align__(16) float bases[8 * 64];
  __shared__ float memory[WARPS][8 * PITCH];
  stage_bases(a, bases);
  u32 lane = threadIdx.x % 32, area = a.height * a.width, tiles = tiles_of(a);
  float* shared = memory[threadIdx.x / 32];
  for (u32 number = blockIdx.x * WARPS + threadIdx.x / 32; number < tiles; number += gridDim.x * WARPS) {
    Tile tile(a, number);
    u32 column = tile.column + lane, plane = a.first + tile.plane, at = tile.row * a.width + column;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      u32 coefficient = at + n * a.width;
      bool inside = column < a.width && n < tile.rows;
      shared[n * PITCH + lane] = inside ? value_of(a, a.codes[place_of(a, plane, coefficient)],
                                                   __ldg(a.steps + coefficient), plane * area + coefficient)
                                        : 0.0f;
    }
    float out[8], peak = peak_of(a, plane * area);
    transform_tile(a, tile, bases, shared, out);
    T* values = (T*)a.values + tile.plane * area + at;
#pragma unroll
    for (u32 n = 0; n < 8; ++n)
      if (column < a.width && n < tile.rows) values[n * a.width] = restored<T>(a, out[n], peak);
  }
}
