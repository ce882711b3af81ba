// Copies a view with gaps into dense memory, in units of 16 bytes. Nothing is computed: a thread has several units on
// their way at once, and finds where they lie without a division.

// As packed by lowtide/kernels/_packing.py.
struct Gaps {          // so many units are skipped wherever a row, or a block of rows, ends
  u32 inverse, shift;  // of its length: i / length is i * inverse >> shift for every i below 2 ** 31
  u32 gap;             // modulo 2 ** 32: rows may overlap
};
struct Args {
  const uint4* from;
  uint4* to;
  u32 count;  // of units
  Gaps rows, blocks;
};

constexpr u32 THREADS = 256, BLOCKS = 6;  // of a block; on a multiprocessor, so that registers hold all units
constexpr u32 UNITS = 4;                  // of a thread at once

__device__ __forceinline__ u32 skipped(const Gaps& g, u32 i) { return (u32)((u64)i * g.inverse >> g.shift) * g.gap; }
__device__ __forceinline__ uint4 unit(const Args& a, u32 i) {
  u32 place = i + skipped(a.rows, i) + skipped(a.blocks, i);
  return __ldg(a.from + place);
}

__global__ void __launch_bounds__(THREADS, BLOCKS) pack(const Args a) {
  u32 i = blockIdx.x * THREADS * UNITS + threadIdx.x;
  for (; i + (UNITS - 1) * THREADS < a.count; i += gridDim.x * THREADS * UNITS) {
    uint4 units[UNITS];
#pragma unroll
    for (u32 k = 0; k < UNITS; ++k) units[k] = unit(a, i + k * THREADS);
#pragma unroll
    for (u32 k = 0; k < UNITS; ++k) a.to[i + k * THREADS] = units[k];
  }
  for (; i < a.count; i += THREADS) a.to[i] = unit(a, i);  // fewer are left
}
