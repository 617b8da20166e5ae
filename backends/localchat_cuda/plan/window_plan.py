"""Plans the KV pages of sliding-window layers, which have a page pool of their own. Imports no torch.

The pool stores a window per running sequence, however long the sequence is, and the tokens of the steps in
flight. It always has pages for both, so no sequence is preempted for the lack of one: as many run at once as
there are windows. vLLM's hybrid KV cache manager plans a window and a step for each sequence.
"""

from collections.abc import Callable

from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig

STEPS = 2
"""Steps in flight."""
_MIN_STEP = 512
_STEP_SHARE = 8
"""Limit on the steps in flight: an eighth of the memory for weights and KV. Otherwise steps are shorter."""


def window_of(config: ModelConfig) -> int:
    """Return the keys that a query of the widest window sees. 0 without windows."""
    return max((0, *config.windows))


def sequence_pages(config: ModelConfig) -> int:
    """Return the pages of a sequence's window, one before it, and one that it grows into."""
    return (window_of(config) - 2) // PAGE_TOKENS + 4


def step_pages(step: int) -> int:
    """Return the pages of the steps in flight."""
    return STEPS * -(-step // PAGE_TOKENS)


def rows(config: ModelConfig, pages: int, step: int, slots: int) -> int:
    """Return the sequences that run at once with this many pages. 0 pages: one pool for all layers."""
    if not pages:
        return slots
    return max(1, min(slots, (pages - step_pages(step)) // sequence_pages(config)))


def most_pages(config: ModelConfig, step: int, slots: int, fits: Callable[[int], bool]) -> int:
    """Return the pages for as many sequences as fit, at least one."""
    own = sequence_pages(config)
    steps = step_pages(step)
    counts = (n * own + steps for n in range(slots, 0, -1))
    return next((pages for pages in counts if fits(pages)), own + steps)


def step_tokens(step: int, room_bytes: int, page_bytes: int) -> int:
    """Return the tokens of a step whose pages take a fair share of the room."""
    while step > _MIN_STEP and step_pages(step) * page_bytes > room_bytes // _STEP_SHARE:
        step //= 2
    return step
