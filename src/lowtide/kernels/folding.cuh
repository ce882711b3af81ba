// The arithmetic of lowtide.coding.fold, in the same order, to the last bit: a value of each tensor of a pair becomes one,
// and that one becomes both.

namespace folding {
constexpr float ON = 1, OFF = 1.5f;      // where t begins
constexpr float SLIP = 1.0f / 1024, FAR = 1099511627776.0f;  // 2 ** 40
enum { ZERO, FINE, COARSE, STEEP, LOWEST, PER_FINE, PER_COARSE };  // rows of a table, a column for each channel

__device__ __forceinline__ float folded(float x, float y, float zero, float per_fine, float per_coarse) {
  bool is_on = !(y <= 0);  // NaN passes
  float distance = (x - zero) * (is_on ? per_fine : per_coarse);
  distance = distance >= -SLIP ? (distance < 0 ? 0.0f : distance) + (is_on ? ON : OFF) : (1 - distance) * FAR;
  return is_on ? distance : -distance;
}
__device__ __forceinline__ float distance_of(float t) {
  float size = fabsf(t);
  return size < FAR / 2 ? size - (t <= 0 ? OFF : ON) : 1 - size / FAR;
}
// The norm's input, and what ReLU made of its output.
__device__ __forceinline__ float source_of(float t, float zero, float fine, float coarse) {
  return distance_of(t) * (t <= 0 ? -coarse : fine) + zero;
}
__device__ __forceinline__ float made_of(float t, float steep, float lowest) {
  return t <= 0 ? 0.0f : distance_of(t) * steep + lowest;
}
}  // namespace folding
