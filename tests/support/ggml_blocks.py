"""Random rows in ggml's block formats, for tests of what reads them."""

import numpy as np
import numpy.typing as npt

from localchat.model_files.ggml_types import NUMBER_FORMATS

_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where a block has its fp16 numbers."""


def random_rows(
    type_: str, n: int, k: int, rng: np.random.Generator, *, size: float = 0.02
) -> npt.NDArray[np.uint8]:
    """Bytes [N, bytes of a row]: every bit is random but for the fp16 numbers, which are near `size`."""
    stored = next(each for each in NUMBER_FORMATS.values() if each.name == type_)
    blocks = rng.integers(0, 256, (n, k // stored.block, stored.block_bytes), dtype=np.uint8)
    for at in _HALVES[type_]:
        numbers = (rng.standard_normal(blocks.shape[:2]) * size).astype(np.float16)
        blocks[:, :, at : at + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(n, -1)
