// BITS = 4 or 8 bits per value: a block's payload is a float step, then a group of 4 * BITS bytes
// for each 32 values. Byte j of a group holds the codes of values j, j + 4 BITS, ..., lowest first.
//
// Memory traffic per value: encode 12 bytes and the code, decode-and-add 8 and the code.
#include "warp.h"

#ifndef BITS
#define BITS 4
#endif
#define LARGEST ((float)((1 << (BITS - 1)) - 1))  // codes are -LARGEST .. LARGEST
#define WIDTH (4 * BITS)                          // bytes of a group
#define SMALLEST_STEP ((float)1e-37)
#define AHEAD (GROUPS < 16 ? GROUPS : 16)         // groups read at a time in decoding
#define ROUNDING 12582912.0f  // 1.5 * 2**23: adding it rounds to the nearest even integer

// From every lane's code: in lane j < WIDTH the byte of values j, j + WIDTH, ...
INLINE unsigned pack(int code)
{
    unsigned packed = (unsigned)code & ((1u << BITS) - 1);
#pragma unroll
    for (int half = 16, shift = 4; half >= WIDTH; half /= 2, shift /= 2)
        packed |= __shfl_xor_sync(WHOLE_WARP, packed, half) << shift;
    return packed;
}

// The code of lane j in a byte of its group, with its sign.
INLINE int unpack(unsigned byte, int lane)
{
    return (int)(byte << (32 - BITS - BITS * (lane / WIDTH))) >> (32 - BITS);
}

// q = code * step, code = round(v / step), step = max|v| / LARGEST.  Grid: a warp for every block.
BLOCK_KERNEL encode_levels(
    const float *__restrict__ gradient,      // [n], n = starts[m] - starts[0], e.g. 2500
    float *__restrict__ residual,            // [n], read; then v - q
    unsigned char *__restrict__ payload,     // [offsets[m] - offsets[0]], e.g. 1276; 4-byte aligned
    const long long *__restrict__ starts,    // [m + 1], e.g. 0, 1024, 2048, 2500
    const long long *__restrict__ offsets,   // [m + 1], e.g. with 4 bits 0, 516, 1032, 1276
    long long m)
{
    const int lane = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= m)
        return;
    const Place place = place_of(block, starts, offsets);
    const int length = place.length;
    gradient += place.value;
    residual += place.value;
    payload += place.byte;
    if (place.raw) {
        encode_raw(gradient, residual, (float *)payload, length);
        return;
    }

    float v[GROUPS];
    if (KEPT)
        load_sum(v, gradient, residual, 0, length);

    float largest = 0.0f;
    EACH_CHUNK(at) {
        if (!KEPT)
            load_sum(v, gradient, residual, at, length);
#pragma unroll
        for (int k = 0; k < GROUPS; k++)
            largest = fmaxf(largest, fabsf(v[k]));
    }
    const float step = warp_max(largest) / LARGEST;
    const float inverse = step >= SMALLEST_STEP ? 1.0f / step : 0.0f;
    if (lane == 0)
        *(float *)payload = step;

    unsigned char *bytes_of_lane = payload + 4 + lane;
    EACH_CHUNK(at) {
        if (!KEPT)
            load_sum(v, gradient, residual, at, length);
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int i = at + 32 * k + lane;
            const float code = v[k] * inverse + ROUNDING - ROUNDING;
            const unsigned packed = pack((int)code);
            if (lane < WIDTH && i - lane < length)
                bytes_of_lane[(at / 32 + k) * WIDTH] = (unsigned char)packed;
            if (i < length)
                residual[i] = v[k] - code * step;
        }
    }
}

// out = q, or out += q.  Grid: a warp for every block.
BLOCK_KERNEL decode_levels(
    const unsigned char *__restrict__ payload,  // [offsets[m] - offsets[0]], e.g. 1276
    float *__restrict__ out,                    // [starts[m] - starts[0]], e.g. 2500
    const long long *__restrict__ starts,       // [m + 1], e.g. 0, 1024, 2048, 2500
    const long long *__restrict__ offsets,      // [m + 1], e.g. with 4 bits 0, 516, 1032, 1276
    long long m, int add)
{
    const int lane = lane_of_warp();
    const long long block = block_of_warp();
    if (block >= m)
        return;
    const Place place = place_of(block, starts, offsets);
    const int length = place.length;
    out += place.value;
    payload += place.byte;
    if (place.raw) {
        decode_raw((const float *)payload, out, length, add);
        return;
    }

    const float step = *(const float *)payload;
    const unsigned char *bytes_of_lane = payload + 4 + lane % WIDTH;
    for (int at = 0; at < length; at += 32 * AHEAD) {
        float x[AHEAD];
        unsigned byte[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int i = at + 32 * k + lane;
            byte[k] = i < length ? bytes_of_lane[(at / 32 + k) * WIDTH] : 0;
            x[k] = add && i < length ? out[i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int i = at + 32 * k + lane;
            const float q = (float)unpack(byte[k], lane) * step;
            if (i < length)
                out[i] = add ? x[k] + q : q;
        }
    }
}
