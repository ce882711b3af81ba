// Four neighbours, in one access where they lie right and exist.
template <typename T> struct alignas(4 * sizeof(T)) Four { T v[4]; };

template <typename T> __device__ __forceinline__ bool is_whole(const T* at, u64 count) {
  return count >= 4 && aligned(at, 4 * sizeof(T));
}

// Elements 0 .. 3 at an address behind which there are `count`, zeros past the end.
template <typename T> __device__ __forceinline__ Four<T> load_four(const T* at, u64 count) {
  if (is_whole(at, count)) return *(const Four<T>*)at;
  Four<T> four;
#pragma unroll
  for (u32 k = 0; k < 4; ++k) four.v[k] = k < count ? at[k] : T{};
  return four;
}
template <typename T> __device__ __forceinline__ void store_four(T* at, u64 count, const Four<T>& four) {
  if (is_whole(at, count)) {
    *(Four<T>*)at = four;
    return;
  }
#pragma unroll
  for (u32 k = 0; k < 4; ++k)
    if (k < count) at[k] = four.v[k];
}
