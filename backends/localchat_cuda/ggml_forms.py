"""ggml's block formats that the kernels read, and their size once repacked. Imports no torch.

8-bit integers of a checkpoint become Q8_0. With zeros they become a format of our own. NVFP4 is repacked in the
same way.

Letters: N output and K input features.
"""

from typing import NamedTuple

from localchat.model_files.ggml_types import NUMBER_FORMATS

BLOCK = 256
"""Columns of a column block once repacked, and of a block of the K formats."""
ROWS = 16
"""Output features of a row tile of the repacked form."""


class GgmlForm(NamedTuple):
    """Layout of a number format."""

    bits: int
    """Bits of a code."""
    group: int
    """Columns that share a scale: 16 or 32."""
    offset: int = 0
    """Number subtracted from a code."""
    factors: bool = False
    """The scale of a group is an integer times a number for 256 columns."""
    minimum: bool = False
    """Groups also have a minimum, stored like the scale."""
    table: bool = False
    """A table maps codes to values."""
    floats: bool = False
    """Codes are e2m1 numbers. A scale is an e4m3 number times an fp32 number of the row."""
    block: int = BLOCK
    """Columns of a stored block."""
    block_bytes: int = 0

    @property
    def planes(self) -> tuple[int, int]:
        """Bits of the two planes of a code. The second may have none."""
        return {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}[self.bits]


_FORMS: dict[str, GgmlForm] = {
    "Q4_0": GgmlForm(4, 32, 8),
    "Q4_1": GgmlForm(4, 32, minimum=True),
    "Q5_0": GgmlForm(5, 32, 16),
    "Q5_1": GgmlForm(5, 32, minimum=True),
    "Q8_0": GgmlForm(8, 32, 128),
    "Q2_K": GgmlForm(2, 16, factors=True, minimum=True),
    "Q3_K": GgmlForm(3, 16, 4, factors=True),
    "Q4_K": GgmlForm(4, 32, factors=True, minimum=True),
    "Q5_K": GgmlForm(5, 32, factors=True, minimum=True),
    "Q6_K": GgmlForm(6, 16, 32, factors=True),
    "IQ4_NL": GgmlForm(4, 32, table=True),
    "IQ4_XS": GgmlForm(4, 32, factors=True, table=True),
}
INT8 = "Q8_0"
INT8_ZEROS = "INT8_ZEROS"
"""Formats of 8-bit integers, without and with zeros."""
NVFP4 = "NVFP4"
"""Format of NVFP4 checkpoints."""
_STORED = {stored.name: stored for stored in NUMBER_FORMATS.values()}

GGUF_FORMS: dict[str, GgmlForm] = {
    name: form._replace(block=_STORED[name].block, block_bytes=_STORED[name].block_bytes)
    for name, form in _FORMS.items()
}
"""Layouts by ggml's name of the format."""
FORMS = {
    **GGUF_FORMS,
    INT8_ZEROS: GgmlForm(8, 32, 128, minimum=True),
    NVFP4: GgmlForm(4, 16, floats=True),
}
"""All layouts, including those of checkpoints."""


def packed_bytes(type_: str, n: int, k: int) -> int:
    """Return the bytes of a repacked weight of N x K."""
    form = FORMS[type_]
    rows = -(-n // ROWS) * ROWS
    row_blocks = rows * -(-k // BLOCK)
    groups = BLOCK // form.group
    if form.floats:
        return row_blocks * (BLOCK * form.bits // 8 + groups) + 4 * rows
    # A scale, and a minimum if the format has one.
    numbers = 2 if form.minimum else 1
    side_bytes = 2 * groups * numbers
    if form.factors:
        # In groups of 16, a factor of the scale and one of the minimum share a byte.
        side_bytes = 4 + groups * (numbers if form.group == 32 else 1)
    return row_blocks * (BLOCK * form.bits // 8 + side_bytes)
