// Common definitions of all kernels.
//
// The files use the common subset of CUDA C++ and C11, so that tests can compile and run them with
// a C compiler (tests/unit/cuda_emulation.h). Every operation is one IEEE operation: compile with
// --fmad=false, and with exact divisions and square roots (the default).
#ifndef PARALLEL_SGD_KERNEL_H
#define PARALLEL_SGD_KERNEL_H

#ifdef __cplusplus
#define KERNEL(threads, resident) extern "C" __global__ void __launch_bounds__(threads, resident)
#define INLINE __device__ __forceinline__
#else
#define KERNEL(threads, resident) void
#define INLINE static inline
#endif

// Elementwise kernels. A thread has EACH values in flight; the values of a warp lie side by side,
// so the loads and stores of a warp are coalesced.
#define EACH 4
#define ELEMENT_KERNEL KERNEL(256, 1)

INLINE long long element(int k)
{
    return ((long long)blockIdx.x * EACH + k) * blockDim.x + threadIdx.x;
}

#ifndef REAL_BITS
#define REAL_BITS 32
#endif
#if REAL_BITS == 64
typedef double real;
typedef unsigned long long word;  // the same number of bits
#else
typedef float real;
typedef unsigned word;
#endif

INLINE unsigned bits_of(float x)
{
    union { float number; unsigned bits; } same;
    same.number = x;
    return same.bits;
}

INLINE float number_of(unsigned bits)
{
    union { unsigned bits; float number; } same;
    same.bits = bits;
    return same.number;
}

// Read first, then compute: the loads of all EACH values are in flight together.
#define LOAD(kept, vector)                                 \
    real kept[EACH];                                       \
    _Pragma("unroll") for (int k = 0; k < EACH; k++)       \
        kept[k] = element(k) < n ? vector[element(k)] : 0

#endif
