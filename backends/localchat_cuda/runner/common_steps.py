"""Steps whose graphs are captured while nothing runs, the likeliest first.

A shape's first steps are launched kernel by kernel, 30 ms of the host each, and a burst of requests would meet
a dozen new ones. vLLM captures its shapes before it serves; here a request need not wait for that.
"""

from collections.abc import Iterator
from itertools import product

from localchat.backend_api.interface import Capabilities
from localchat_cuda.kernels.attention.decode import WIDEST
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    MIXED_BUCKETS,
    MIXED_DECODE_BUCKETS,
    PREFILL_BUCKETS,
    TokenSpan,
)

_HISTORIES = (40, 100, 200, 300, 700, 1500, 3000, 6000, 12_000, 24_000)
"""Lengths of texts: how many ranges a history is cut into depends on the longest."""
_MIXED_HISTORIES = (100, 300, 1500)
DRAFT_ROWS = 8
DRAFT_STEP_TOKENS = 64
"""Most rows and tokens of a step with drafts. Such steps come in so many shapes that one of them would be
launched kernel by kernel for every few that replay a graph, and cost more than its drafts save."""
_DRAFT_PARTS = (1, 2, 4, 8, 16)
"""Sequences of such a step: rows, those of padding among them, and the halves of long drafts."""
_MIXED_TOKENS = 1024
_PREFILL_TOKENS = 2048
"""Wider steps take so long that a launch kernel by kernel ends before they do."""


def common_steps(capabilities: Capabilities, scratch: int) -> Iterator[list[TokenSpan]]:
    """Steps of padding in the slot `scratch`. Several may have the same shape."""
    room = capabilities.context_tokens - 1
    widest = min(capabilities.max_step_tokens, room)
    histories = [each for each in _HISTORIES if each < room] or [1]
    rows = [each for each in DECODE_BUCKETS if each < 2 * capabilities.max_slots]
    for sequences in rows:
        for history in histories:
            yield [TokenSpan(scratch, history, 1)] * sequences
    for tokens in PREFILL_BUCKETS:
        if tokens <= min(_PREFILL_TOKENS, widest):
            yield [TokenSpan(scratch, 0, tokens)]
    decoding = [each for each in MIXED_DECODE_BUCKETS[1:] if each < 4 * capabilities.max_slots]
    for sequences, tokens, history in product(decoding, MIXED_BUCKETS, _MIXED_HISTORIES):
        chunk = tokens - sequences
        if tokens <= min(_MIXED_TOKENS, widest) and chunk > 0 and history < room:
            yield [*[TokenSpan(scratch, history, 1)] * sequences, TokenSpan(scratch, 0, chunk)]
    if capabilities.rewind == "checkpoint" and not capabilities.saved_states:
        return  # no drafts
    for parts, tokens, history in product(_DRAFT_PARTS, DECODE_BUCKETS, histories):
        widths = _draft_widths(parts, tokens)
        if widths and tokens <= DRAFT_STEP_TOKENS and history + max(widths) < room:
            yield [TokenSpan(scratch, history, width) for width in widths]


def steps_of_drafts(capabilities: Capabilities, scratch: int) -> Iterator[list[TokenSpan]]:
    """The same of a runner that drafts: few rows, each with what its text got since, or one token."""
    room = min(capabilities.context_tokens, capabilities.kv_tokens) - 1
    histories = [each for each in _HISTORIES if each < room - WIDEST] or [1]
    for sequences, width, history in product((1, 2, 4, DRAFT_ROWS), (1, 2, 4, 8), histories):
        if sequences <= capabilities.max_slots and history + width < room:
            yield [TokenSpan(scratch, history, width)] * sequences


def _draft_widths(parts: int, tokens: int) -> list[int]:
    """Widths of rows that make a step of `tokens` in so many parts; none where no drafts can."""
    if parts < tokens <= WIDEST * parts:
        return [tokens // parts] * parts
    return [2] + [1] * (parts - 2) if parts == tokens >= 4 else []
