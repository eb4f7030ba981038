// The steps of local updates for vectors of REAL_BITS = 32 or 64 bits per value, in place unless
// noted.
//
// Memory traffic per value, in values: weighted difference 3, averaging 4, momentum 6, mix 3.
#include "warp.h"

INLINE word word_of(real number)
{
    union { real number; word bits; } same;
    same.number = number;
    return same.bits;
}

// x = weight * (start - x), and max |start - x| as in largest.cu.
// Grid: any size (a grid-stride loop).
ELEMENT_KERNEL weighted_difference(
    const real *x,                   // [n]
    const real *__restrict__ start,  // [n]
    real *new_x,                     // [n], written; may be x
    word *__restrict__ largest,      // [1], 0 before; then the word of max |start - x|
    long long n, real weight)
{
    const long long turn = (long long)gridDim.x * blockDim.x * EACH;
    word most = 0;
    for (long long from = 0; from < n; from += turn) {
        real difference[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const long long i = from + element(k);
            difference[k] = i < n ? start[i] - x[i] : 0;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const long long i = from + element(k);
            const word w = word_of(difference[k]) << 1;  // without the sign
            most = w > most ? w : most;
            if (i < n)
                new_x[i] = weight * difference[k];
        }
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        const word other = __shfl_xor_sync(WHOLE_WARP, most, half);
        most = other > most ? other : most;
    }
    if (lane_of_warp() == 0)
        atomicMax(largest, most >> 1);
}

// x -= gradient;  gradient = x.  Grid, here and below: a thread for every EACH values.
ELEMENT_KERNEL averaging_step(
    real *__restrict__ x,         // [n], read and written
    real *__restrict__ gradient,  // [n], read; then the new x
    long long n)
{
    LOAD(x_, x);
    LOAD(g_, gradient);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        if (i < n)
            x[i] = gradient[i] = x_[k] - g_[k];
    }
}

// momentum_step in place;  gradient = x.
ELEMENT_KERNEL outer_momentum_step(
    real *__restrict__ x,         // [n], read and written
    real *__restrict__ m,         // [n], read and written
    real *__restrict__ gradient,  // [n], read; then the new x
    long long n, real lr, real momentum, real gain, int nesterov)
{
    LOAD(x_, x);
    LOAD(m_, m);
    LOAD(g_, gradient);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        const real push = gain * g_[k];
        const real new_m = momentum * m_[k] + push;
        if (i < n) {
            m[i] = new_m;
            x[i] = gradient[i] = x_[k] - lr * (nesterov ? momentum * new_m + push : new_m);
        }
    }
}

// x = weight * (x - common) + common.
ELEMENT_KERNEL mix(
    real *__restrict__ x,             // [n], read and written
    const real *__restrict__ common,  // [n]
    long long n, real weight)
{
    LOAD(x_, x);
    LOAD(common_, common);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        if (i < n)
            x[i] = weight * (x_[k] - common_[k]) + common_[k];
    }
}
