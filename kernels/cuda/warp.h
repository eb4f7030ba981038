// Common parts of the block kernels: a warp encodes or decodes a block of the wire format
// (../blocks.py).
//
// Lane j owns the values j, j + 32, j + 64, ... of its block and adds them in this order; then
// `warp_sum` adds the lanes by halves. This is the order of `lane_sum` in ../reference.py, so
// every sum has the reference's bits, and a ballot over a group of 32 values is the group's word.
#ifndef PARALLEL_SGD_WARP_H
#define PARALLEL_SGD_WARP_H

#include "kernel.h"

// 128 threads are the warps of four blocks. Six times that many fit on a multiprocessor when a
// thread has at most 80 registers: enough for all loads of a block of 1024 values at once.
#define BLOCK_KERNEL KERNEL(128, 6)

// Set when a file is compiled, depending on the longest block:
#ifndef GROUPS
#define GROUPS 32  // groups of 32 values held in a warp's registers at a time: GROUPS values a lane
#endif
#ifndef KEPT
#define KEPT 1  // 1: a whole block is held, and read once;  0: every pass reads the block again
#endif

#define WHOLE_WARP 0xffffffffu

// A pass over a block by chunks of GROUPS groups: `at` is a chunk's first value.
#define EACH_CHUNK(at) for (int at = 0; at < (KEPT ? 1 : length); at += 32 * GROUPS)

INLINE int lane_of_warp(void) { return (int)(threadIdx.x % 32); }

// The block that this warp works on.
INLINE long long block_of_warp(void)
{
    return ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

typedef struct {
    long long value, byte;  // where the block begins in the vectors and in the payload
    int length, raw;        // the number of values; 1 if the block is raw
} Place;

INLINE Place place_of(long long block, const long long *starts, const long long *offsets)
{
    Place place;
    place.value = starts[block] - starts[0];
    place.byte = offsets[block] - offsets[0];
    place.length = (int)(starts[block + 1] - starts[block]);
    place.raw = offsets[block + 1] - offsets[block] == 4LL * place.length;
    return place;
}

// lanes 0..31 -> in every lane their sum: 16 sums of lanes j and j + 16, then 8 of those, ...
INLINE float warp_sum(float lane_sum)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
        lane_sum = lane_sum + __shfl_xor_sync(WHOLE_WARP, lane_sum, half);
    return lane_sum;
}

INLINE float warp_max(float lane_max)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
        lane_max = fmaxf(lane_max, __shfl_xor_sync(WHOLE_WARP, lane_max, half));
    return lane_max;
}

INLINE word warp_max_word(word lane_max)
{
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        const word other = __shfl_xor_sync(WHOLE_WARP, lane_max, half);
        lane_max = other > lane_max ? other : lane_max;
    }
    return lane_max;
}

// v[k] = g + r of this lane's values at + lane, at + 32 + lane, ...; 0 after the block's end.
// All loads are independent of each other, so all of them are in flight together.
INLINE void load_sum(float *v, const float *gradient, const float *residual, int at, int length)
{
    const int lane = lane_of_warp();
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const int i = at + 32 * k + lane;
        v[k] = i < length ? gradient[i] + residual[i] : 0.0f;
    }
}

// A block of few values, which encoding would not make smaller: send v itself, without loss.
INLINE void encode_raw(const float *gradient, float *residual, float *raw, int length)
{
#pragma unroll 1
    for (int i = lane_of_warp(); i < length; i += 32) {
        raw[i] = gradient[i] + residual[i];
        residual[i] = 0.0f;
    }
}

INLINE void decode_raw(const float *raw, float *out, int length, int add)
{
#pragma unroll 1
    for (int i = lane_of_warp(); i < length; i += 32)
        out[i] = add ? out[i] + raw[i] : raw[i];
}

#endif
