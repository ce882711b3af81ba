// The coder rans: what both directions share.

constexpr int CODES = 320, EXACTS = 64;  // escapes that a warp can stage
constexpr u32 SPILL = 4096;              // 16-bit words of a slot that takes what a stage cannot hold

// Slots before each symbol, for 256 threads, by way of eight words of shared memory.
__device__ __forceinline__ u32 slots_before(u32 freq, u32* sums) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  u32 sum = freq;
  for (int o = 1; o < 32; o <<= 1) {
    u32 below = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += sums[w];
  __syncthreads();
  return sum - freq;
}

// Where something lies in shared memory; the emulator has no such numbers.
__device__ __forceinline__ u32 address_of(const void* shared) {
#ifdef __CUDA_ARCH__
  return (u32)__cvta_generic_to_shared(shared);
#else
  return 0;
#endif
}
// A number to keep in a register, where the compiler would rather make it again in every round.
__device__ __forceinline__ u32 kept(u32 x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// The same for one that all lanes share, where there is a register for it.
template <bool HOLD> __device__ __forceinline__ u32 held(u32 x) { return HOLD ? __shfl_sync(~0u, x, 0) : x; }
