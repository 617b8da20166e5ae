"""DRY ("don't repeat yourself"): a penalty on tokens that would continue a repeated sequence.

The rule is p-e-w's (github.com/oobabooga/text-generation-webui/pull/5677), with the limits of llama.cpp
(src/llama-sampler.cpp: llama_sampler_dry_apply). The text is the last `dry_penalty_last_n` known tokens, prompt
and output; -1 is all of them. For each token of the text but the first, count how many tokens before it equal
the last tokens of the text, in the same order. The count ends before a breaker, so that nothing repeats across
one. A token with a count of at least `dry_allowed_length` would continue a repetition, unless it is a breaker
itself. With the largest count of a token, its logit is reduced by

    dry_multiplier * dry_base ** min(count - dry_allowed_length, longest_exponent(dry_base))

in float32, where the power is computed in float64. `SamplingParams.dry_breakers` lists the tokens that break.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import SamplingParams

_LOG_OF_LARGEST = 88.7228391
"""ln of the largest float32. llama.cpp limits the power to it."""
_MOST = 1024
"""Largest exponent. It bounds the time for a base near 1."""


def longest_exponent(base: float) -> int:
    """Return the exponent from which the penalty stays the same."""
    if base <= math.exp(_LOG_OF_LARGEST / _MOST):
        return _MOST
    return int(_LOG_OF_LARGEST / math.log(base))


def breaker_bits(texts: Iterable[str], pieces: Sequence[bytes], last: Sequence[int]) -> bytes:
    """Return the tokens that break sequences, as `SamplingParams.dry_breakers`.

    A token breaks if its bytes contain a text. If no token contains it, the last token of the text breaks, as
    in p-e-w's rule. `pieces`: bytes of all tokens. `last`: last token of each text, -1 if it has none.
    """
    flags = np.zeros(len(pieces), np.bool_)
    for text, token in zip(texts, last, strict=True):
        wanted = text.encode()
        matches = [number for number, piece in enumerate(pieces) if wanted in piece]
        flags[matches or ([token] if token >= 0 else [])] = True
    return np.packbits(flags, bitorder="little").tobytes()


def repetition_penalties(
    known: NDArray[np.int64], params: SamplingParams, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the tokens that would continue a repetition (n,) and the penalties on their logits.

    `known`: the tokens before the drawn one.
    """
    text = known
    if params.dry_penalty_last_n >= 0:
        text = known[max(0, known.size - params.dry_penalty_last_n) :]
    allowed = params.dry_allowed_length
    exponent_limit = longest_exponent(params.dry_base)
    counts: dict[int, int] = {}
    if text.size > allowed:
        counts = _counts(text, params.dry_breakers, allowed, allowed + exponent_limit)
    tokens = [token for token in counts if 0 <= token < vocab_size]
    exponents = np.array([counts[token] - allowed for token in tokens], np.float64)
    # Float32 settings, so that a GPU computes the same numbers.
    growth = np.exp(exponents * math.log(float(np.float32(params.dry_base))))
    penalties = float(np.float32(params.dry_multiplier)) * growth
    return np.array(tokens, np.int64), penalties.astype(np.float32)


def _counts(text: NDArray[np.int64], breakers: bytes, allowed: int, limit: int) -> dict[int, int]:
    """Return the length of the longest repetition that each token would continue, at most `limit`.

    Tokens whose repetition is shorter than `allowed`, and breakers, are left out.
    """
    counts: dict[int, int] = {}
    if not allowed:
        counts = dict.fromkeys(text[1:].tolist(), 0)
    last = text.size - 1
    # Positions whose token follows a repetition of the last `count` tokens.
    following = np.flatnonzero(text[:-1] == text[last]) + 1
    if _breaks(int(text[last]), breakers):
        following = following[:0]
    count = 1
    while following.size:
        if count == limit or count > last or _breaks(int(text[last - count]), breakers):
            longer = np.zeros(following.size, np.bool_)
        else:
            # The index is -1 where the repetition begins with the text.
            longer = text[following - count - 1] == text[last - count]
            longer &= following > count
        if count >= allowed:
            counts.update(dict.fromkeys(text[following[~longer]].tolist(), count))
        following = following[longer]
        count += 1
    return {token: count for token, count in counts.items() if not _breaks(token, breakers)}


def _breaks(token: int, breakers: bytes) -> bool:
    return 0 <= token < 8 * len(breakers) and bool(breakers[token // 8] >> token % 8 & 1)
