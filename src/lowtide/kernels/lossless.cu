// Words into byte planes and back, without the words that are zero where a bitmap says which those are.
// W is the word; all kernels are templates, so that only those are compiled that are asked for.

// As packed by lowtide/kernels/lossless.py.
struct Args {
  const void* source;
  void* target;
  u8* planes[8];   // highest byte first
  u8* zeros;       // the bitmap
  int* counts;     // of words other than zero in every chunk
  const int* before;  // and in all chunks before it
  u32* histogram;  // 256 numbers a plane
  u64 one;         // what a mask has where a word is neither zero nor minus zero
  u32 count, stored, parts;
};

constexpr u32 CHUNK = 1024, WARPS = 8, THREADS = 32 * WARPS;
constexpr u32 AHEAD = 8;  // words that a lane reads before it writes any

template <typename W> __device__ __forceinline__ W turned_left(W word) {
  return (W)((W)(word << 1) | (W)(word >> (8 * sizeof(W) - 1)));
}
template <typename W> __device__ __forceinline__ W turned_right(W word) {
  return (W)((W)(word >> 1) | (W)(word << (8 * sizeof(W) - 1)));
}
__device__ __forceinline__ u32 chunk_of() { return blockIdx.x * WARPS + threadIdx.x / 32; }
__device__ __forceinline__ u32 lanes_before(u32 mask, u32 lane) { return __popc(mask & ((1u << lane) - 1)); }

// 32 bits of the bitmap, which ends with the byte that has the last of them and may lie anywhere.
__device__ __forceinline__ bool is_whole_word(const Args& a, u32 first) {
  return a.count - first >= 32 && aligned(a.zeros, 4);
}
__device__ __forceinline__ u32 read_bits(const Args& a, u32 first) {
  if (first >= a.count) return 0;
  const u8* at = a.zeros + first / 8;
  if (is_whole_word(a, first)) return *(const u32*)at;
  u32 bits = 0;
  for (u32 k = 0; k < 4 && 8 * k < a.count - first; ++k) bits |= (u32)at[k] << (8 * k);
  return bits;
}
__device__ __forceinline__ void write_bits(const Args& a, u32 first, u32 bits) {
  if (first >= a.count) return;
  u8* at = a.zeros + first / 8;
  if (is_whole_word(a, first)) {
    *(u32*)at = bits;
    return;
  }
  for (u32 k = 0; k < 4 && 8 * k < a.count - first; ++k) at[k] = (u8)(bits >> (8 * k));
}

template <typename W> __global__ void __launch_bounds__(THREADS) count_words(const Args a) {
  u32 chunk = chunk_of(), lane = threadIdx.x % 32, found = 0;
  if (chunk * (u64)CHUNK >= a.count) return;
#pragma unroll
  for (u32 j = 0; j < CHUNK / 128; ++j) {
    u32 i = chunk * CHUNK + 128 * j + 4 * lane;
    Four<W> four = load_four((const W*)a.source + i, i < a.count ? a.count - i : 0);
#pragma unroll
    for (u32 k = 0; k < 4; ++k) found += four.v[k] != 0;
  }
  found = sum_of(found);
  if (lane == 0) a.counts[chunk] = (int)found;
}

template <typename W> __global__ void __launch_bounds__(THREADS) count_bits(const Args a) {
  u32 chunk = chunk_of(), lane = threadIdx.x % 32;
  if (chunk * (u64)CHUNK >= a.count) return;
  u32 zeros = sum_of((u32)__popc(read_bits(a, chunk * CHUNK + 32 * lane)));
  if (lane == 0) a.counts[chunk] = (int)(min(a.count - chunk * CHUNK, CHUNK) - zeros);
}

template <typename W, bool BITMAP> __global__ void __launch_bounds__(THREADS) split(const Args a) {
  u32 chunk = chunk_of(), lane = threadIdx.x % 32;
  if (chunk * (u64)CHUNK >= a.count) return;
  u32 place = BITMAP ? (u32)a.before[chunk] : chunk * CHUNK, bits = 0;
  for (u32 j = 0; j < 32; j += AHEAD) {
    W words[AHEAD];
#pragma unroll
    for (u32 k = 0; k < AHEAD; ++k) {
      u32 i = chunk * CHUNK + 32 * (j + k) + lane;
      words[k] = i < a.count ? ((const W*)a.source)[i] : (W)0;
    }
#pragma unroll
    for (u32 k = 0; k < AHEAD; ++k) {
      bool inside = chunk * CHUNK + 32 * (j + k) + lane < a.count;
      u32 zeros = BITMAP ? __ballot_sync(~0u, inside && words[k] == 0) : 0;
      if (lane == j + k) bits = zeros;
      u32 at = place + lanes_before(~zeros, lane);
      place += 32 - __popc(zeros);
      if (!inside || zeros >> lane & 1) continue;
      W turned = turned_left(words[k]);
#pragma unroll
      for (u32 p = 0; p < sizeof(W); ++p) a.planes[p][at] = (u8)(turned >> (8 * (sizeof(W) - 1 - p)));
    }
  }
  if (BITMAP) write_bits(a, chunk * CHUNK + 32 * lane, bits);
}

template <typename W, bool BITMAP, bool MASK> __global__ void __launch_bounds__(THREADS) merge(const Args a) {
  u32 chunk = chunk_of(), lane = threadIdx.x % 32;
  if (chunk * (u64)CHUNK >= a.count) return;
  u32 place = BITMAP ? (u32)a.before[chunk] : chunk * CHUNK;
  u32 bits = BITMAP ? read_bits(a, chunk * CHUNK + 32 * lane) : 0;
#pragma unroll 4
  for (u32 j = 0; j < 32; ++j) {
    u32 i = chunk * CHUNK + 32 * j + lane;
    u32 zeros = BITMAP ? __shfl_sync(~0u, bits, j) : 0;
    u32 at = place + lanes_before(~zeros, lane);
    place += 32 - __popc(zeros);
    if (i >= a.count) continue;
    W word = 0;
    if (!(zeros >> lane & 1) && at < a.stored) {
#pragma unroll
      for (u32 p = 0; p < sizeof(W); ++p) word |= (W)((W)__ldg(a.planes[p] + at) << (8 * (sizeof(W) - 1 - p)));
      word = MASK ? word & (W)~(W)1 ? (W)a.one : (W)0 : turned_right(word);  // the lowest bit is the sign
    }
    ((W*)a.target)[i] = word;
  }
}

// How often each byte occurs in each plane: `parts` blocks a plane. Every lane counts in a bank of its own.
template <typename W> __global__ void __launch_bounds__(THREADS) count_bytes(const Args a) {
  __shared__ u32 bins[256 * 32];
  u32 plane = blockIdx.x / a.parts, part = blockIdx.x % a.parts, lane = threadIdx.x % 32;
  for (u32 i = threadIdx.x; i < 256 * 32; i += THREADS) bins[i] = 0;
  __syncthreads();
  const u8* bytes = a.planes[plane];
  for (u64 i = 4 * ((u64)part * THREADS + threadIdx.x); i < a.stored; i += 4 * (u64)a.parts * THREADS) {
    u64 left = a.stored - i;
    Four<u8> four = load_four(bytes + i, left);
#pragma unroll
    for (u32 k = 0; k < 4; ++k)
      if (k < left) atomicAdd(&bins[four.v[k] * 32 + lane], 1u);
  }
  __syncthreads();
  u32 sum = 0;
  for (u32 k = 0; k < 32; ++k) sum += bins[threadIdx.x * 32 + (k + threadIdx.x) % 32];
  if (sum) atomicAdd(&a.histogram[256 * plane + threadIdx.x], sum);
}
