// The local update rules for vectors of REAL_BITS = 32 or 64 bits a value: in place, but for the
// new x, which may go into another vector.
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
        const real root = sqrt(new_v);  // in C of doubles; rounded to float, it is the same
        if (i < n) {
            m[i] = new_m;
            v[i] = new_v;
            new_x[i] = x_[k] - (lr * new_m / (root + epsilon) + decay * x_[k]);
        }
    }
}

// The same of a gradient that was quantized: root = min(sqrt(v), max(v / sqrt(v + noise),
// least * |m|)) in place of sqrt(v).
ELEMENT_KERNEL adam_step_of_quantized(
    const real *x,                      // [n]
    real *__restrict__ m,               // [n], read and written
    real *__restrict__ v,               // [n], read and written
    const real *__restrict__ gradient,  // [n]
    real *new_x,                        // [n], written; may be x
    long long n, real scale, real lr, real one_minus_beta1, real one_minus_beta2, real epsilon,
    real decay, real noise, real least)
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
        const real sum = new_v + noise, divisor = sqrt(sum), lowest = least * fabs(new_m);
        const real highest = sqrt(new_v), above = new_v / divisor;
        const real least_root = above > lowest ? above : lowest;
        const real root = least_root < highest ? least_root : highest;
        if (i < n) {
            m[i] = new_m;
            v[i] = new_v;
            new_x[i] = x_[k] - (lr * new_m / (root + epsilon) + decay * x_[k]);
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
