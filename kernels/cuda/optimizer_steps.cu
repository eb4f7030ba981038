// The local update rules for vectors of REAL_BITS = 32 or 64 bits per value: in place, except for
// the new x, which may go into another vector.
//
// Memory traffic per value, in values: sgd 3 (reads x and g, writes x), momentum 5, adam 7,
// adagrad 5, delay compensation 4.
#include "kernel.h"

// x -= lr * g.  Grid, as of all kernels here: a thread for every EACH values.
ELEMENT_KERNEL sgd_step(
    const real *x,                      // [n]
    const real *__restrict__ gradient,  // [n]
    real *new_x,                        // [n], written; may be x
    long long n, real lr)
{
    LOAD(x_, x);
    LOAD(g_, gradient);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        if (i < n)
            new_x[i] = x_[k] - lr * g_[k];
    }
}

// m = momentum * m + gain * g;  x -= lr * m, or Nesterov: x -= lr * (momentum * m + gain * g).
ELEMENT_KERNEL momentum_step(
    const real *x,                      // [n]
    real *__restrict__ m,               // [n], read and written
    const real *__restrict__ gradient,  // [n]
    real *new_x,                        // [n], written; may be x
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
            new_x[i] = x_[k] - lr * (nesterov ? momentum * new_m + push : new_m);
        }
    }
}

// g = scale * gradient;  m += one_minus_beta1 * (g - m);  v += one_minus_beta2 * (g * g - v);
// x -= lr * m / (sqrt(v) + epsilon) + decay * x.
ELEMENT_KERNEL adam_step(
    const real *x,                      // [n]
    real *__restrict__ m,               // [n], read and written
    real *__restrict__ v,               // [n], read and written
    const real *__restrict__ gradient,  // [n]
    real *new_x,                        // [n], written; may be x
    long long n, real scale, real lr, real one_minus_beta1, real one_minus_beta2, real epsilon,
    real decay)
{
    LOAD(x_, x);
    LOAD(m_, m);
    LOAD(v_, v);
    LOAD(g_, gradient);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        const real g = scale * g_[k];
        const real new_m = m_[k] + one_minus_beta1 * (g - m_[k]);
        const real new_v = v_[k] + one_minus_beta2 * (g * g - v_[k]);
        const real root = sqrt(new_v);  // in C of doubles; the rounded result is the same
        if (i < n) {
            m[i] = new_m;
            v[i] = new_v;
            new_x[i] = x_[k] - (lr * new_m / (root + epsilon) + decay * x_[k]);
        }
    }
}

#define MOMENT_GROUP 64

// adam_step on a quantized gradient: root = max(sqrt(slope * v + shift), least * |m|) in
// place of sqrt(v), with the slope and shift of the value's group.
ELEMENT_KERNEL adam_step_of_quantized(
    const real *x,                      // [n]
    real *__restrict__ m,               // [n], read and written
    real *__restrict__ v,               // [n], read and written
    const real *__restrict__ gradient,  // [n]
    real *new_x,                        // [n], written; may be x
    const real *__restrict__ slopes,    // for each group of the whole vector
    const real *__restrict__ shifts,
    long long n,
    long long first,                    // the index of x[0] in the whole vector
    real scale, real lr, real one_minus_beta1, real one_minus_beta2, real epsilon, real decay,
    real least)
{
    LOAD(x_, x);
    LOAD(m_, m);
    LOAD(v_, v);
    LOAD(g_, gradient);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k), group = (first + i) / MOMENT_GROUP;
        if (i < n) {
            const real g = scale * g_[k];
            const real new_m = m_[k] + one_minus_beta1 * (g - m_[k]);
            const real new_v = v_[k] + one_minus_beta2 * (g * g - v_[k]);
            const real square = slopes[group] * new_v + shifts[group];
            const real lowest = least * fabs(new_m), above = sqrt(square);
            const real root = above > lowest ? above : lowest;
            m[i] = new_m;
            v[i] = new_v;
            new_x[i] = x_[k] - (lr * new_m / (root + epsilon) + decay * x_[k]);
        }
    }
}

// sums[group] += sum of sign * value, value by value; the signs are random bits selected by `step`,
// or all +.  Grid: a thread for every EACH groups.
ELEMENT_KERNEL add_to_groups(
    real *__restrict__ sums,          // [groups], read and written
    const real *__restrict__ values,  // [n]
    long long groups,
    long long n,
    long long first,                  // the index of values[0] in the whole vector
    unsigned long long step)          // 0: all signs are +
{
    for (int k = 0; k < EACH; k++) {
        const long long group = element(k), begin = group * MOMENT_GROUP - first;
        if (group < groups && begin < n && begin + MOMENT_GROUP > 0) {
            unsigned long long signs = 0;
            if (step) {  // SplitMix64's finalizer
                signs = step << 32 | (unsigned long long)group;
                signs = (signs ^ signs >> 30) * 0xBF58476D1CE4E5B9ull;
                signs = (signs ^ signs >> 27) * 0x94D049BB133111EBull;
                signs ^= signs >> 31;
            }
            real total = sums[group];
            for (int place = 0; place < MOMENT_GROUP; place++) {
                const long long i = begin + place;
                if (i >= 0 && i < n)
                    total += signs >> place & 1 ? -values[i] : values[i];
            }
            sums[group] = total;
        }
    }
}

// g = scale * g;  s += g * g;  x -= lr * g / (sqrt(s) + epsilon).
ELEMENT_KERNEL adagrad_step(
    const real *x,                      // [n]
    real *__restrict__ s,               // [n], read and written
    const real *__restrict__ gradient,  // [n]
    real *new_x,                        // [n], written; may be x
    long long n, real scale, real lr, real epsilon)
{
    LOAD(x_, x);
    LOAD(s_, s);
    LOAD(g_, gradient);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        const real g = scale * g_[k];
        const real new_s = s_[k] + g * g;
        const real root = sqrt(new_s);  // as in adam_step
        if (i < n) {
            s[i] = new_s;
            new_x[i] = x_[k] - lr * g / (root + epsilon);
        }
    }
}

// g += factor * g * g * (x - backup).
ELEMENT_KERNEL compensate_delay(
    real *__restrict__ gradient,      // [n], read and written
    const real *__restrict__ x,       // [n]
    const real *__restrict__ backup,  // [n]
    long long n, real factor)
{
    LOAD(g_, gradient);
    LOAD(x_, x);
    LOAD(backup_, backup);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = element(k);
        if (i < n)
            gradient[i] = g_[k] + factor * g_[k] * g_[k] * (x_[k] - backup_[k]);
    }
}
