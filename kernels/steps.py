"""Optimizer steps and steps of local updates in Numba: the bytes of `reference`.

Each step is one pass over memory. Numba compiles separate code for steps in place, where LLVM sees
a single pointer and needs no checks for overlapping vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import simd
from .compiled import compiled
from .reference import MOMENT_GROUP, Array

U64 = np.uint64
GROUP = U64(MOMENT_GROUP)


def sgd_step(x: Array, gradient: Array, lr: float, out: Array | None = None) -> None:
    _sgd_step(x, gradient, x.dtype.type(lr), out)


def momentum_step(
    x: Array,
    m: Array,
    gradient: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
    out: Array | None = None,
) -> None:
    real = x.dtype.type
    _momentum_step(x, m, gradient, real(lr), real(momentum), real(gain), nesterov, out)


def adam_step(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    out: Array | None = None,
) -> None:
    numbers = (scale, lr, 1 - beta1, 1 - beta2, epsilon, decay)
    _adam_step(x, m, v, gradient, *map(x.dtype.type, numbers), out)


def adam_step_of_quantized(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    slopes: Array,
    shifts: Array,
    first: int,
    least: float,
    out: Array | None = None,
) -> None:
    numbers = map(x.dtype.type, (scale, lr, 1 - beta1, 1 - beta2, epsilon, decay, least))
    _adam_step_of_quantized(x, m, v, gradient, *numbers, slopes, shifts, U64(first), out)


def add_to_groups(values: Array, first: int, step: int, sums: Array) -> None:
    _add_to_groups(values, U64(first), U64(step), sums)


def adagrad_step(
    x: Array,
    s: Array,
    gradient: Array,
    scale: float,
    lr: float,
    epsilon: float,
    out: Array | None = None,
) -> None:
    _adagrad_step(x, s, gradient, *map(x.dtype.type, (scale, lr, epsilon)), out)


def compensate_delay(gradient: Array, x: Array, backup: Array, factor: float) -> None:
    _compensate_delay(gradient, x, backup, gradient.dtype.type(factor))


def weighted_difference(x: Array, start: Array, weight: float, out: Array | None = None) -> float:
    real = x.dtype.type
    return float(_weighted_difference(x, start, real(weight), real(0), out))


def averaging_step(x: Array, gradient: Array) -> None:
    _averaging_step(x, gradient)


def outer_momentum_step(
    x: Array,
    m: Array,
    gradient: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
) -> None:
    real = x.dtype.type
    _outer_momentum_step(x, m, gradient, real(lr), real(momentum), real(gain), nesterov)


def mix(x: Array, common: Array, weight: float) -> None:
    _mix(x, common, x.dtype.type(weight))


@compiled
def _sgd_step(x: Array, gradient: Array, lr: float, out: Array | None = None) -> None:
    new_x = x if out is None else out
    for i in range(len(x)):
        new_x[i] = x[i] - lr * gradient[i]


@compiled
def _momentum_step(
    x: Array,
    m: Array,
    g: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
    out: Array | None = None,
) -> None:
    new_x = x if out is None else out
    if nesterov:
        for i in range(len(x)):
            push = gain * g[i]
            new = momentum * m[i] + push
            m[i] = new
            new_x[i] = x[i] - lr * (momentum * new + push)
    else:
        for i in range(len(x)):
            new = momentum * m[i] + gain * g[i]
            m[i] = new
            new_x[i] = x[i] - lr * new


@compiled
def _adam_step(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    weight1: float,
    weight2: float,
    epsilon: float,
    decay: float,
    out: Array | None = None,
) -> None:
    new_x = x if out is None else out
    for i in range(len(x)):
        g = scale * gradient[i]
        m[i] += weight1 * (g - m[i])
        v[i] += weight2 * (g * g - v[i])
        new_x[i] = x[i] - (lr * m[i] / (np.sqrt(v[i]) + epsilon) + decay * x[i])


@compiled
def _adam_step_of_quantized(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    weight1: float,
    weight2: float,
    epsilon: float,
    decay: float,
    least: float,
    slopes: Array,
    shifts: Array,
    first: int,
    out: Array | None = None,
) -> None:
    new_x = x if out is None else out
    begin = U64(0)  # unsigned: no check for negative indices
    while begin < len(x):
        group = (first + begin) // GROUP
        end = min((group + U64(1)) * GROUP - first, U64(len(x)))
        slope, shift = slopes[group], shifts[group]
        for i in range(begin, end):
            g = scale * gradient[i]
            m[i] += weight1 * (g - m[i])
            v[i] += weight2 * (g * g - v[i])
            root, lowest = np.sqrt(slope * v[i] + shift), least * abs(m[i])
            root = root if root > lowest else lowest
            new_x[i] = x[i] - (lr * m[i] / (root + epsilon) + decay * x[i])
        begin = end


@compiled
def _add_to_groups(values: Array, first: int, step: int, sums: Array) -> None:
    begin = U64(0)
    while begin < len(values):
        group = (first + begin) // GROUP
        end = min((group + U64(1)) * GROUP - first, U64(len(values)))
        signs = U64(0)
        if step:
            signs = (step << U64(32)) | group
            signs = (signs ^ (signs >> U64(30))) * U64(0xBF58476D1CE4E5B9)
            signs = (signs ^ (signs >> U64(27))) * U64(0x94D049BB133111EB)
            signs ^= signs >> U64(31)
        signs >>= (first + begin) % GROUP
        total = sums[group]
        for i in range(begin, end):
            total += -values[i] if signs & U64(1) else values[i]
            signs >>= U64(1)
        sums[group] = total
        begin = end


@compiled
def _adagrad_step(
    x: Array,
    s: Array,
    gradient: Array,
    scale: float,
    lr: float,
    epsilon: float,
    out: Array | None = None,
) -> None:
    new_x = x if out is None else out
    for i in range(len(x)):
        g = scale * gradient[i]
        s[i] += g * g
        new_x[i] = x[i] - lr * g / (np.sqrt(s[i]) + epsilon)


@compiled
def _compensate_delay(gradient: Array, x: Array, backup: Array, factor: float) -> None:
    for i in range(len(x)):
        gradient[i] += factor * gradient[i] * gradient[i] * (x[i] - backup[i])


@compiled
def _weighted_difference(
    x: Array, start: Array, weight: float, zero: float, out: Array | None = None
) -> Any:
    new_x = x if out is None else out
    largest = simd.magnitude_to_word(zero)
    for i in range(len(x)):
        difference = start[i] - x[i]
        largest = max(largest, simd.magnitude_to_word(difference))
        new_x[i] = weight * difference
    return simd.word_to_magnitude(largest)


@compiled
def _averaging_step(x: Array, gradient: Array) -> None:
    for i in range(len(x)):
        new = x[i] - gradient[i]
        x[i] = new
        gradient[i] = new


@compiled
def _outer_momentum_step(
    x: Array,
    m: Array,
    g: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
) -> None:
    if nesterov:
        for i in range(len(x)):
            push = gain * g[i]
            new_m = momentum * m[i] + push
            new = x[i] - lr * (momentum * new_m + push)
            m[i] = new_m
            x[i] = new
            g[i] = new
    else:
        for i in range(len(x)):
            new_m = momentum * m[i] + gain * g[i]
            new = x[i] - lr * new_m
            m[i] = new_m
            x[i] = new
            g[i] = new


@compiled
def _mix(x: Array, common: Array, weight: float) -> None:
    for i in range(len(x)):
        x[i] = weight * (x[i] - common[i]) + common[i]
