"""Counter-based noise: one standard Gumbel variable for each (seed, choice, position, token id).

A CPU and a GPU compute it alike, no state is kept, and neither the order of the candidates nor
drafts change it. `key` is 64 bits, made once for a draw; everything below wraps at 64 bits, shifts
are logical:

    mix(x)      x ^= x >> 30;  x *= M1;  x ^= x >> 27;  x *= M2;  x ^= x >> 31
    key         mix(mix(mix(seed + G) ^ choice + G) ^ position + G)      (^ binds before +)
    x           key + (token + 1) * G
    h           x ^= x >> 30;  x *= M1;  x ^= x >> 27;  x *= M2
    v           (float32(h >> 32) + 0.5) * 2**-32 in float32, at most 1 - 2**-24
    E           -ln(1 - v)       exponential
    gumbel      -ln(E)           between LOWEST and HIGHEST

The winners of a draw have a small v, where float32 is finest; that is why E is taken from 1 - v and
not from v. A kernel must compute it as log1p(-v), or as a series for small v: log(1 - v) loses
these bits, and the approximate logarithm of a GPU is off by more than E there.

This is the splitmix64 generator (Steele, Lea, Flood 2014) read at index `token`, without its last
shift, which reaches only one of the 32 bits that are used. Gumbel-max with counter-based noise:
Maddison et al. 2014.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

G = 0x9E3779B97F4A7C15
M1 = 0xBF58476D1CE4E5B9
M2 = 0x94D049BB133111EB
MASK = 0xFFFFFFFFFFFFFFFF

LOWEST = -2.82
HIGHEST = 22.88
REACH = HIGHEST - LOWEST
"""A candidate whose logit over temperature is this much below the best one's cannot win."""

_TOP = np.float32(1.0 - 2.0**-24)
_EXACT_BELOW = 1.0 - 2.0**-12


def mix(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit numbers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * M1) & MASK
    x = ((x ^ (x >> 27)) * M2) & MASK
    return x ^ (x >> 31)


def draw_key(seed: int, choice: int, position: int) -> int:
    """The key of one draw. `position`: index of the drawn token in its sequence. A seed outside 64
    bits is taken modulo 2**64."""
    key = mix(seed + G)
    key = mix((key ^ choice) + G)
    return mix((key ^ position) + G)


def chance(key: int) -> float:
    """Return a number between 0 and 1 for a decision of the draw: v of the token -1, in float32."""
    return float(min((np.float32(mix_bits(key)) + np.float32(0.5)) * np.float32(2.0**-32), _TOP))


def mix_bits(x: int) -> int:
    """Return the 32 bits of the hash h of x."""
    x = ((x ^ (x >> 30)) * M1) & MASK
    return (((x ^ (x >> 27)) * M2) & MASK) >> 32


def clear_winner(key: int, tokens: Sequence[int], scores: Sequence[float]) -> int | None:
    """Return the token with the largest score + noise, for a few tokens.

    Works in float64 without numpy, whose kernels cost more than the arithmetic on a few numbers when their code
    is not in the cache. None if the rounding of float32 may decide, for which `winner` must be asked.
    """
    best = second = -math.inf
    token = -1
    for candidate, score in zip(tokens, scores, strict=True):
        v = (mix_bits((key + (candidate + 1) * G) & MASK) + 0.5) * 2.0**-32
        # Near 1, v has few bits in float32.
        if v > _EXACT_BELOW:
            return None
        total = score - math.log(-math.log1p(-v))
        if total > best:
            second = best
            best = total
            token = candidate
        elif total > second:
            second = total
    rounding = 1e-3 - 1e-6 * min(scores)
    if best - second <= rounding:
        return None
    return token


def winner(key: int, pieces: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> int:
    """The token with the largest score + noise, the first among equals.

    `pieces`: tokens (n,), rising from piece to piece, and their finite scores (n,); one at least. After the
    first piece logarithms are taken only where the bits are small enough to win.
    """
    best = -math.inf
    token = -1
    for tokens, scores in pieces:
        bits = _bits(key, tokens)
        # gumbel > t means E < exp(-t), and v is below E.
        limit = math.exp(min(0.0, float(scores.max()) - best)) * (1 + 1e-3) * 2.0**32
        if limit < 2.0**32:
            kept = np.flatnonzero(bits <= limit)
            if not kept.size:
                continue
            tokens = tokens[kept]
            scores = scores[kept]
            bits = bits[kept]
        total = scores + _noise(bits)
        index = int(total.argmax())
        if total[index] > best:
            best = float(total[index])
            token = int(tokens[index])
    return token


def _bits(key: int, tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    x = tokens.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(G)
    x += np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(M2)
    x >>= np.uint64(32)
    return x.astype(np.uint32)


def _noise(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    out = bits.astype(np.float32)
    out += np.float32(0.5)
    out *= np.float32(2.0**-32)
    np.minimum(out, _TOP, out=out)
    np.negative(out, out=out)
    np.log1p(out, out=out)
    np.negative(out, out=out)
    np.log(out, out=out)
    np.negative(out, out=out)
    return out
