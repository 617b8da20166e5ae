"""Noise of many tokens, by the functions that draw with it."""

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.sampling import gumbel as noise


def gumbel(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the noise for `tokens` (n,) as (n,) float32."""
    return noise._noise(noise._bits(key, tokens))
