"""What the tests of the entropy code share: vectors, and comparisons with the reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from kernel_bodies import Both, same_bytes

from parallel_sgd.kernels import reference
from parallel_sgd.kernels.entropy_reference import BLOCK, DAMAGED, LARGEST, most_bytes

F32 = np.float32
STEP = 0.375  # a bfloat16


@functools.cache
def values(n: int) -> dict[str, Any]:
    """Vectors of every density and magnitude, in steps. Copy them before you write."""
    random = np.random.default_rng(n)
    noise, laplace, uneven = (random.standard_normal(n) for _ in range(3))
    runs = np.repeat(np.exp(2 * random.standard_normal(n // 64 + 1) - 2), 64)[:n]
    return {
        "zeros": np.zeros(n),
        "live ones": np.ones(n),
        "all 127": np.full(n, 127),
        "all -128": np.full(n, -128),
        "all 32767": np.full(n, 32767),
        "all -32767": np.full(n, -32767),
        "clipped": np.copysign(1e9, noise),
        **{f"noise of {scale}": noise * scale for scale in (0.2, 0.5, 1, 3, 40, 5000, 20000)},
        "raw with zeros": np.where(random.random(n) < 0.05, 0, np.copysign(30000, noise)),
        "few and large": np.where(random.random(n) < 0.05, np.copysign(30000, noise), 0),
        "heavy tails": noise * np.exp(2 * uneven),
        "live in places": noise * runs,
        "about 127": random.choice([0, 1, -1, 126, 127, 128, -127, -128, -129], n),
        "seldom above 127": np.where(random.random(n) < 0.01, 300 * laplace, noise * 0.4),
        "ones": noise > 0.5,
        "half are live": np.arange(n) % 2,
        "ties": np.round(2 * noise) / 2,
    }


def split(v: Any, step: float = STEP) -> tuple[Any, Any]:
    """A gradient and a residual whose sum is about v steps."""
    v = (v * F32(step)).astype(F32)
    residual = (v / 3).astype(F32)
    return v - residual, residual


def addends(n: int) -> Any:
    """What is added to: values, and zeros of both signs."""
    out = np.linspace(-3, 3, n, dtype=F32)
    out[::3], out[1::3] = -0.0, 0.0
    return out


def encode_alike(both: Both, gradient: Any, residual: Any, room: int, step: float) -> Any:
    """The message and what is lost, of the reference: this body must have the same. Behind the
    message it may write what it likes into the payload."""
    lost, payload = residual.copy(), np.full(room, 0xA5, np.uint8)
    whole, part = both.guard(payload)
    whole_residual, residual = both.guard(residual)
    whole_gradient, part_of_gradient = both.guard(lost if gradient is None else gradient)
    given = None if gradient is None else part_of_gradient
    length = both.kernels.encode_entropy(given, residual, part, step)
    assert length == reference.encode_entropy(gradient, lost, payload, step)
    assert same_bytes(both.cupy.asnumpy(residual), lost)
    assert same_bytes(both.cupy.asnumpy(part)[:length], payload[:length])
    assert gradient is None or same_bytes(both.cupy.asnumpy(given), gradient)
    assert all(map(both.is_guarded, (whole, whole_residual, whole_gradient)))
    return payload[:length], lost


def check(
    both: Both, gradient: Any, residual: Any, room: int | None = None, step: float = STEP
) -> tuple[Any, float]:
    """Encode, decode in both ways, and check what is promised. The message, and its step."""
    n = len(residual)
    v = residual if gradient is None else gradient + residual
    given = most_bytes(n) if room is None else room
    message, lost = encode_alike(both, gradient, residual, given, step)
    assert len(message) == int(message[:4].view(np.uint32)[0]) <= most_bytes(n)
    used = float(message[4:8].view(F32)[0])
    assert room is not None or used == step
    both("decode_entropy", message, addends(n), True)
    q = both("decode_entropy", message, addends(n), False)[1].astype(float)
    clipped = np.abs(q) >= LARGEST * used
    assert (v.astype(float) == q + lost)[~clipped].all()
    most = used * (0.5 + 2.0**-22 * np.abs(q) / used)  # v * (1 / step) has two roundings
    assert (np.abs(lost) <= most)[~clipped].all()
    return message, used


def decode_alike(both: Both, message: Any, n: int) -> int:
    """What the reference makes of a message: this body must make the same of it, or refuse it too,
    and may write what it likes into `out`, and nowhere else."""
    with np.errstate(all="ignore"):
        length = reference.decode_entropy(message, np.zeros(n, F32), False)
        for add in (False, True):
            if length != DAMAGED:
                both("decode_entropy", message, addends(n), add)
                continue
            (whole, part), (out_whole, out) = both.guard(message), both.guard(addends(n))
            assert both.kernels.decode_entropy(part, out, add) == DAMAGED
            assert both.is_guarded(out_whole)
            assert both.is_guarded(whole)
            assert (both.cupy.asnumpy(part) == message).all()
    return length


def good_messages() -> list[tuple[int, Any]]:
    """Messages with blocks of all kinds: gaps, marks, raw, none; without sizes and with these."""
    kinds = {70: "all 32767", 300: "noise of 0.2", 301: "half are live", 1000: "noise of 1"}
    vectors = [values(n)[name] for n, name in kinds.items()]
    several = values(4 * BLOCK + 100)["noise of 0.5"].copy()
    several[:BLOCK] *= 1e4
    several[BLOCK : 2 * BLOCK] = 0
    messages = []
    for v in (*vectors, several):
        payload = np.zeros(most_bytes(len(v)), np.uint8)
        length = reference.encode_entropy(*split(v), payload, STEP)
        messages.append((len(v), payload[:length]))
    return messages


def damage(message: Any, random: np.random.Generator) -> Any:
    """A message with some bits flipped, half of the time in its first bytes, or a wrong length."""
    message = message.copy()
    for _ in range(random.integers(1, 4)):
        end = len(message) if random.random() < 0.5 else min(len(message), 24)
        message[random.integers(end)] ^= 1 << random.integers(8)
    kind = random.random()
    if kind < 0.1:
        return message[: random.integers(len(message))]
    if kind < 0.2:
        return np.concatenate([message, random.integers(0, 256, 20, np.uint8)])
    if kind < 0.3:  # the length is that of what is there
        shorter = message[: random.integers(8, len(message))]
        shorter[:4] = np.array([len(shorter)], "<u4").view(np.uint8)
        return shorter
    return message
