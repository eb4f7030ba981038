// Sixteen bits per value: float16, clipped to its range, or bfloat16. Both round to nearest even.
// Integer arithmetic, since C has no 16-bit floating-point type.
//
// Memory traffic per value: encode 14 bytes, decode-and-add 10, decode 6.
#include "kernel.h"

#define LARGEST_HALF 65504.0f

INLINE unsigned to_half(float v, int bfloat)
{
    if (bfloat)
        return (bits_of(v) + 0x7fff + (bits_of(v) >> 16 & 1)) >> 16;
    const float clipped = fminf(fmaxf(v, -LARGEST_HALF), LARGEST_HALF);
    const unsigned sign = bits_of(clipped) & 0x80000000u;
    const unsigned magnitude = bits_of(clipped) ^ sign;
    // Below 2**-14 a float16 is a multiple of 2**-24: so is a float32 after adding 0.5.
    const unsigned small = bits_of(number_of(magnitude) + 0.5f) - bits_of(0.5f);
    // Above: exponent bias 127 -> 15, and 23 -> 10 bits of fraction.
    const unsigned normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    return sign >> 16 | (magnitude < 113u << 23 ? small : normal);
}

INLINE float from_half(unsigned half, int bfloat)
{
    if (bfloat)
        return number_of(half << 16);
    // The fraction and exponent read as a float32 are 2**112 too small; infinity stays infinite.
    const float magnitude = number_of((half & 0x7fffu) << 13) * 0x1p112f;
    const unsigned special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    return number_of((half & 0x8000u) << 16 | bits_of(magnitude) | special);
}

// v = g + r is sent as q, and r = v - q.  Grid: a thread for every EACH values.
ELEMENT_KERNEL encode_half(
    const float *__restrict__ gradient,     // [n]
    float *__restrict__ residual,           // [n], read; then v - q
    unsigned short *__restrict__ payload,   // [n]
    long long n, int bfloat)
{
    float v[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        v[k] = i < n ? gradient[i] + residual[i] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        const unsigned half = to_half(v[k], bfloat);
        if (i < n) {
            payload[i] = (unsigned short)half;
            residual[i] = v[k] - from_half(half, bfloat);
        }
    }
}

// out = q, or out += q.  Grid: a thread for every EACH values.
ELEMENT_KERNEL decode_half(
    const unsigned short *__restrict__ payload,  // [n]
    float *__restrict__ out,                     // [n]
    long long n, int add, int bfloat)
{
    unsigned half[EACH];
    float x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        half[k] = i < n ? payload[i] : 0;
        x[k] = add && i < n ? out[i] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        const float q = from_half(half[k], bfloat);
        if (i < n)
            out[i] = add ? x[k] + q : q;
    }
}
