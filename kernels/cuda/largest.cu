// max |x| by comparing bit patterns: without the sign, a float's word grows with its magnitude.
// Infinity is above all numbers, and NaN above infinity. So the result is NaN if any value is.
//
// Memory traffic: reads every value once.
#include "warp.h"

// Grid: any size (a grid-stride loop). Fewer warps make fewer atomic updates of `largest`.
ELEMENT_KERNEL largest_magnitude(
    const word *__restrict__ x,  // [n], float32 or float64 values as their words
    word *__restrict__ largest,  // [1], 0 before; then the word of max |x|
    long long n)
{
    const long long turn = (long long)gridDim.x * blockDim.x * EACH;
    word most = 0;
    for (long long from = 0; from < n; from += turn) {
        word w[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const long long i = from + element(k);
            w[k] = i < n ? x[i] << 1 : 0;  // without the sign
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            most = w[k] > most ? w[k] : most;
    }
    most = warp_max_word(most);
    if (lane_of_warp() == 0)
        atomicMax(largest, most >> 1);
}
