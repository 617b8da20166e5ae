"""Pages of windowed layers that are apart from those of the others: how many a load has. Imports no torch.

A sequence keeps its window in them, however long it is, and the steps in flight write to them. There are pages
for both at any time, so that no sequence is preempted for the lack of one: as many run at once as there are
windows. vLLM's hybrid KV cache manager reckons with a window and a step for each.
"""

from collections.abc import Callable

from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig

STEPS = 2
"""In flight."""
_LEAST_STEP = 512
_STEP_SHARE = 8
"""The steps in flight take an eighth of the memory for weights and KV at most, or steps have fewer tokens."""


def window_of(config: ModelConfig) -> int:
    """Keys that a query of the widest window sees; 0: no layer has one."""
    return max((0, *config.windows))


def sequence_pages(config: ModelConfig) -> int:
    """Pages of a sequence's window, one before it, and one that it grows into."""
    return (window_of(config) - 2) // PAGE_TOKENS + 4


def step_pages(step: int) -> int:
    """Pages of the steps in flight."""
    return STEPS * -(-step // PAGE_TOKENS)


def rows(config: ModelConfig, pages: int, step: int, slots: int) -> int:
    """Sequences that run at once with so many pages; with none, all layers have the same ones."""
    if not pages:
        return slots
    return max(1, min(slots, (pages - step_pages(step)) // sequence_pages(config)))


def most_pages(config: ModelConfig, step: int, slots: int, fits: Callable[[int], bool]) -> int:
    """Pages for as many sequences as fit, for one at least."""
    own = sequence_pages(config)
    steps = step_pages(step)
    counts = (n * own + steps for n in range(slots, 0, -1))
    return next((pages for pages in counts if fits(pages)), own + steps)


def step_tokens(step: int, room_bytes: int, page_bytes: int) -> int:
    """Tokens of a step for which the pages of those in flight take a fair share of the room."""
    while step > _LEAST_STEP and step_pages(step) * page_bytes > room_bytes // _STEP_SHARE:
        step //= 2
    return step
