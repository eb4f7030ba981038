// The product of two thin matrices P and Q of `rank` columns each; REAL_BITS = 32 or 64 bits per
// value.
//
// Memory traffic: each value of out is written once, or read and written; P and Q stay in the
// caches.
#include "kernel.h"

// out = P Q^T, or out -= P Q^T, column by column.  Grid: a thread for every EACH values.
ELEMENT_KERNEL low_rank_product(
    real *__restrict__ out,      // [n], n = rows * columns, row by row; written
    const real *__restrict__ p,  // [rank * rows]
    const real *__restrict__ q,  // [rank * columns]
    long long n, long long columns, int rank, int subtract)
{
    const long long rows = n / columns;
    for (int e = 0; e < EACH; e++) {
        const long long i = element(e);
        if (i >= n)
            return;
        const long long row = i / columns, column = i % columns;
        real sum = subtract ? out[i] : 0;
        for (int k = 0; k < rank; k++) {
            const real product = p[k * rows + row] * q[k * columns + column];
            sum = subtract ? sum - product : sum + product;
        }
        out[i] = sum;
    }
}
