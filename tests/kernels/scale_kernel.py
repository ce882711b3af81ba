"""A small kernel in CUDA C++, to compile and to launch."""

from __future__ import annotations

# y = x * FACTOR + 1, by way of dynamic shared memory; what lies behind ``last`` words of it is not used.
SOURCE = """
struct Arguments { const float* x; float* y; unsigned count, last; };

template <int FACTOR, bool FUSED>
__global__ void scale(const Arguments a) {
    extern __shared__ float staged[];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    float* mine = staged + a.last - threadIdx.x;
    *mine = i < a.count ? a.x[i] : 0;
    __syncthreads();
    if (i < a.count) a.y[i] = FUSED ? fmaf(*mine, FACTOR, 1) : *mine * FACTOR + 1;
}
"""
PLAIN, FUSED = "scale<3, false>", "scale<3, true>"
