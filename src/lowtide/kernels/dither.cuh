// As in lowtide.coding.dither: one hash for four neighbours, a byte each.
__device__ __forceinline__ u32 dither_word(u32 word, u32 low, u32 high) {
  word += low;
  word ^= word >> 16;
  word *= 0x7feb352du;
  word ^= high;
  word ^= word >> 15;
  word *= 0x846ca68bu;
  return word ^ word >> 16;
}
__device__ __forceinline__ int dither_byte(u32 i, u32 low, u32 high) {
  return (int)(dither_word(i >> 2, low, high) >> (8 * (i & 3)) & 255);
}
