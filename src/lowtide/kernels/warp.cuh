// Numbers of all lanes of a warp, by shuffles: older GPUs have no instruction for it.
__device__ __forceinline__ u32 sum_of(u32 value) {
#pragma unroll
  for (u32 o = 16; o; o /= 2) value += __shfl_xor_sync(~0u, value, o);
  return value;
}
__device__ __forceinline__ u32 most_of(u32 value) {
#pragma unroll
  for (u32 o = 16; o; o /= 2) value = max(value, __shfl_xor_sync(~0u, value, o));
  return value;
}
__device__ __forceinline__ u32 sum_to(u32 value, u32 lane) {  // of the lanes up to this one
#pragma unroll
  for (u32 o = 1; o < 32; o *= 2) {
    u32 other = __shfl_up_sync(~0u, value, o);
    if (lane >= o) value += other;
  }
  return value;
}
