// Integers by their sizes, and the dtypes of tensors: what every source here begins with. Arithmetic is in float32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Half { u16 bits; };
struct Bfloat { u16 bits; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bfloat x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(Half x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return simt_half_to_float(x.bits);
#endif
}

__device__ __forceinline__ void narrow(float x, float* y) { *y = x; }
__device__ __forceinline__ void narrow(float x, Bfloat* y) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y->bits) : "f"(x));
#else
  u32 b = __float_as_uint(x);
  y->bits = (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
#endif
}
__device__ __forceinline__ void narrow(float x, Half* y) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x));
#else
  y->bits = simt_float_to_half_rn(x);
#endif
}

__device__ __forceinline__ bool aligned(const void* x, int bytes) { return ((u64)x & (bytes - 1)) == 0; }
