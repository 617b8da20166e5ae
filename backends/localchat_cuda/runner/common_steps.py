"""Steps whose graphs are captured while the engine is idle, the likeliest first.

The first steps of a shape are launched kernel by kernel, which takes the host 30 ms each, and a burst of
requests needs a dozen new shapes. vLLM captures its shapes before it serves. Here requests do not wait for
that.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from localchat.backend_api.interface import Capabilities
from localchat_cuda.kernels.attention.decode import WIDEST
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    DRAFT_STEP_TOKENS,
    MIXED_BUCKETS,
    MIXED_DECODE_BUCKETS,
    PREFILL_BUCKETS,
    TokenSpan,
)

_HISTORIES = (40, 100, 200, 300, 700, 1500, 3000, 6000, 12_000, 24_000)
"""Lengths of texts. The longest decides into how many ranges attention divides a history."""
_MIXED_HISTORIES = (100, 300, 1500)
_COVERING_STEPS = (
    (64, (0, 1024, 2048)),
    (8, (0, 512, 1024)),
    (16, (0,)),
    (128, (0, 1024, 2048)),
)
"""Rows that decode, and numbers of tokens in the step; 0: no prompt chunk."""
_COVERING_PROMPTS = 8
"""Prompt chunks of such a step. A graph has room for 7 chunks or for 63, and 8 get the larger one."""
_COVERING_HISTORY = 300
"""Length of texts in the steps that cover others. Their graphs also run longer and shorter texts."""
DRAFT_ROWS = 8
"""Row limit of a step with drafts."""
_DRAFT_PARTS = (1, 2, 4, 8, 16)
"""Parts of a step with drafts: rows, including padding, and halves of long drafts."""
_MIXED_TOKENS = 1024
_PREFILL_TOKENS = 2048
"""Largest prompt step to capture. Wider steps take longer than their launch kernel by kernel."""


def common_steps(capabilities: Capabilities, scratch: int) -> Iterator[list[TokenSpan]]:
    """Yield steps of padding in the slot `scratch`. Several may have the same shape."""
    room = capabilities.context_tokens - 1
    widest = min(capabilities.max_step_tokens, room)
    histories = [history for history in _HISTORIES if history < room] or [1]
    rows = [bucket for bucket in DECODE_BUCKETS if bucket < 2 * capabilities.max_slots]
    for sequences in rows:
        for history in histories:
            yield [TokenSpan(scratch, history, 1)] * sequences
    for tokens in PREFILL_BUCKETS:
        if tokens <= min(_PREFILL_TOKENS, widest):
            yield [TokenSpan(scratch, 0, tokens)]
    decoding = [rows for rows in MIXED_DECODE_BUCKETS[1:] if rows < 4 * capabilities.max_slots]
    for sequences, tokens, history in product(decoding, MIXED_BUCKETS, _MIXED_HISTORIES):
        chunk = tokens - sequences
        if tokens <= min(_MIXED_TOKENS, widest) and chunk > 0 and history < room:
            yield [*[TokenSpan(scratch, history, 1)] * sequences, TokenSpan(scratch, 0, chunk)]
    if capabilities.rewind == "checkpoint" and not capabilities.saved_states:
        # Without saved states, a state cannot rewind, so the model has no drafts.
        return
    for parts, tokens, history in product(_DRAFT_PARTS, DECODE_BUCKETS, histories):
        widths = _draft_widths(parts, tokens)
        if widths and tokens <= DRAFT_STEP_TOKENS and history + max(widths) < room:
            yield [TokenSpan(scratch, history, width) for width in widths]


def covering_steps(capabilities: Capabilities, scratch: int) -> Iterator[list[TokenSpan]]:
    """Yield few steps whose graphs run most steps of a burst, with padding (StepShape.may_cover)."""
    room = min(capabilities.context_tokens, capabilities.max_step_tokens) - 1
    history = min(_COVERING_HISTORY, room)
    for sequences, sizes in _COVERING_STEPS:
        if sequences > capabilities.max_slots:
            continue
        decoding = [TokenSpan(scratch, history, 1)] * sequences
        for tokens in sizes:
            if not tokens:
                yield decoding
            elif tokens - sequences < room:
                chunk = (tokens - sequences) // _COVERING_PROMPTS
                yield [*decoding, *[TokenSpan(scratch, 0, chunk)] * _COVERING_PROMPTS]


def steps_of_drafts(
    capabilities: Capabilities, scratch: int, widths: Sequence[int] = (1, 2, 4, 8)
) -> Iterator[list[TokenSpan]]:
    """Yield the steps of a drafter: few rows of one token, or of the tokens accepted since."""
    room = min(capabilities.context_tokens, capabilities.kv_tokens) - 1
    histories = [history for history in _HISTORIES if history < room - WIDEST] or [1]
    for sequences, width, history in product((1, 2, 4, DRAFT_ROWS), widths, histories):
        if sequences <= capabilities.max_slots and history + width < room:
            yield [TokenSpan(scratch, history, width)] * sequences


def _draft_widths(parts: int, tokens: int) -> list[int]:
    """Return the widths of `parts` rows in a step of `tokens`. Empty: no drafts."""
    if parts < tokens <= WIDEST * parts:
        return [tokens // parts] * parts
    if parts == tokens >= 4:
        return [2] + [1] * (parts - 2)
    return []
