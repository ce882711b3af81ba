// Where chunks go: a decoupled look-back over the blocks of the grid.

// What a block knows of its chunks' places. Its ticket is its number in the order of starting.
struct Places {
  u32 ticket, lengths[32], total, base;
};
// A ticket is asked for first and needed last: it takes a while to come.
__device__ __forceinline__ u32 take_ticket(const Args& a) {
  return threadIdx.x == 0 ? (u32)atomicAdd(a.work, 1ull) : 0;
}
__device__ __forceinline__ void show_ticket(Places& places, u32 ticket) {
  if (threadIdx.x == 0) places.ticket = ticket;
  __syncthreads();
}

// A chunk of a tensor, if there is one of that number (`valid` > 0).
struct Chunk {
  u32 number, valid;
  u64 start;
};
__device__ __forceinline__ Chunk numbered_chunk(const Args& a, u32 number, u32 size) {
  u64 start = (u64)number * size;
  return {number, number < a.chunks ? (u32)min(a.count - start, (u64)size) : 0, start};
}

// The first word of each warp's chunk, given its length. A block publishes its total, then adds up what the blocks
// before it published until it meets one that knows its own place. `work` words: epoch, 1 total or 2 place, words.
// There is time for other work between the two steps, while the blocks before catch up.
__device__ void publish(const Args& a, Places& places, u32 words, int warp, int lane) {
  if (lane == 0) places.lengths[warp] = words;
  __syncthreads();
  if (warp) return;
  u32 ticket = places.ticket;
  int warps = blockDim.x / 32;
  u32 mine = lane < warps ? places.lengths[lane] : 0, sum = mine;
  for (int o = 1; o < 32; o <<= 1) {
    u32 below = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += below;
  }
  __syncwarp();
  if (lane < warps) places.lengths[lane] = sum - mine;
  if (lane < 31) return;
  places.total = sum;
  *(volatile u64*)(a.work + 2 + ticket) = (u64)a.epoch << 34 | (ticket ? 1ull : 2ull) << 32 | sum;
}
__device__ u32 place_of(const Args& a, Places& places, int warp, int lane) {
  if (warp == 0) {
    __syncwarp();  // lane 31 has left the total
    const u32 ticket = places.ticket;
    volatile u64* state = a.work + 2;
    const u64 tag = (u64)a.epoch << 34;
    u32 before = 0, known = 0;
    for (int at = (int)ticket - 1 - lane; !known; at -= 32) {
      u64 word = at >= 0 ? state[at] : tag | 2ull << 32;
      while (word >> 34 != a.epoch || (word >> 32 & 3) == 0) word = state[at];
      known = __ballot_sync(~0u, (word >> 32 & 3) == 2);
      if (lane <= (known ? __ffs(known) - 1 : 31)) before += (u32)word;
    }
    for (int o = 16; o; o >>= 1) before += __shfl_xor_sync(~0u, before, o);
    if (lane == 0) {
      u64 after = (u64)(before + places.total);
      if (ticket) state[ticket] = tag | 2ull << 32 | after;
      places.base = before;
      if (ticket == gridDim.x - 1) {  // every block has its ticket by now
        *(volatile u64*)a.work = 0;
        if (a.status) *(volatile long long*)a.status = (long long)after;
      }
    }
  }
  __syncthreads();
  return places.base + places.lengths[warp];
}
