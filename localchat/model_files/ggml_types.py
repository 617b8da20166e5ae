"""Table of ggml's number formats.

Readers of headers do not need the `gguf` package. A test compares the two.
"""

from typing import NamedTuple


class NumberFormat(NamedTuple):
    """A storage format: `block` numbers take `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


NUMBER_FORMATS: dict[int, NumberFormat] = {
    0: NumberFormat("F32", 1, 4),
    1: NumberFormat("F16", 1, 2),
    2: NumberFormat("Q4_0", 32, 18),
    3: NumberFormat("Q4_1", 32, 20),
    6: NumberFormat("Q5_0", 32, 22),
    7: NumberFormat("Q5_1", 32, 24),
    8: NumberFormat("Q8_0", 32, 34),
    10: NumberFormat("Q2_K", 256, 84),
    11: NumberFormat("Q3_K", 256, 110),
    12: NumberFormat("Q4_K", 256, 144),
    13: NumberFormat("Q5_K", 256, 176),
    14: NumberFormat("Q6_K", 256, 210),
    15: NumberFormat("Q8_K", 256, 292),
    16: NumberFormat("IQ2_XXS", 256, 66),
    17: NumberFormat("IQ2_XS", 256, 74),
    18: NumberFormat("IQ3_XXS", 256, 98),
    19: NumberFormat("IQ1_S", 256, 50),
    20: NumberFormat("IQ4_NL", 32, 18),
    21: NumberFormat("IQ3_S", 256, 110),
    22: NumberFormat("IQ2_S", 256, 82),
    23: NumberFormat("IQ4_XS", 256, 136),
    24: NumberFormat("I8", 1, 1),
    25: NumberFormat("I16", 1, 2),
    26: NumberFormat("I32", 1, 4),
    27: NumberFormat("I64", 1, 8),
    28: NumberFormat("F64", 1, 8),
    29: NumberFormat("IQ1_M", 256, 56),
    30: NumberFormat("BF16", 1, 2),
    34: NumberFormat("TQ1_0", 256, 54),
    35: NumberFormat("TQ2_0", 256, 66),
    39: NumberFormat("MXFP4", 32, 17),
    40: NumberFormat("NVFP4", 64, 36),
    41: NumberFormat("Q1_0", 128, 18),
    42: NumberFormat("Q2_0", 64, 18),
}
"""Formats by ggml's type number.

Missing numbers were removed from ggml, occur in no file (Q8_1 is for products only), or are newer than this
table.
"""

KV_FORMATS: dict[str, NumberFormat] = {
    NUMBER_FORMATS[code].name.lower(): NUMBER_FORMATS[code] for code in (0, 1, 30, 8, 7, 6, 3, 2)
}
"""KV cache formats by the names of `--kv-type`, best first."""

FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
}
"""Values of `general.file_type`, which name the mix of formats in a file."""


def keeps_finer_formats(layer: int, layers: int) -> bool:
    """Return True for the layers whose values and down projections a mix such as Q4_K_M stores finer.

    These are the first and last eighth, and every third other, as in llama.cpp (src/llama-quant.cpp).
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def stored_bytes(format_: NumberFormat, elements: int) -> int:
    """Return the size of `elements` numbers in complete blocks."""
    return -(-elements // format_.block) * format_.block_bytes
