// What every kernel begins with.
//
// The files are written in what CUDA C++ and C11 have in common, so that a C compiler can run
// them too (tests/unit/cuda_emulation.h). Every operation is one IEEE operation: compile with
// --fmad=false, and with the exact divisions and square roots that are the default.
#ifndef PARALLEL_SGD_KERNEL_H
#define PARALLEL_SGD_KERNEL_H

#ifdef __cplusplus
#define KERNEL(threads, resident) extern "C" __global__ void __launch_bounds__(threads, resident)
#define INLINE __device__ __forceinline__
#else
#define KERNEL(threads, resident) void
#define INLINE static inline
#endif

// Kernels that go through vectors value by value. A thread has EACH values in flight; those of
// a warp lie side by side, so every load and store of a warp is one piece of memory.
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
