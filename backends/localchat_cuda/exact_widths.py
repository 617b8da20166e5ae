"""Measures which prompt steps compute the same bits as several narrower ones.

Each row of a prompt is computed by itself, but a library may sum a row of a wider matrix in another order.
Where it does not, the engine may compute whole chunks of a deterministic request in one step, which takes a GPU
less time: a first token after 4,509 tokens of a 7B in AWQ comes after 88 ms on an H200, and 98 in steps of 512.
"""

import torch

from localchat.backend_api.interface import Enter, SamplingParams, StepPlan, StepRow
from localchat_cuda.runner.runner import CudaRunner

_CHUNKS = (2, 4)
"""Numbers of chunks that are tried. Wider steps gain little, and a new request waits longer for them."""


def exact_widths(runner: CudaRunner) -> tuple[int, ...]:
    """Return the tokens of such steps. Run a prompt of random tokens in each, in pages without an owner.

    Keys and values of the last layer depend on all that is computed before, so they are compared."""
    can = runner.capabilities
    chunk = can.exact_chunk_tokens
    room = min(can.context_tokens, can.kv_tokens) - 1
    widths = [chunk * count for count in _CHUNKS if chunk * count <= min(can.max_step_tokens, room)]
    # Sums of several GPUs and pages of windows are not covered, and states have no chunks.
    if not widths or can.window_blocks or can.rewind != "any" or runner.model.collective:
        return ()
    generator = torch.Generator().manual_seed(1)
    vocabulary = runner.model.config.vocabulary
    tokens = torch.randint(vocabulary, (widths[-1],), generator=generator).tolist()
    kv_of_chunks = _keys_and_values(runner, tokens, chunk)

    def computes_the_same(width: int) -> bool:
        kv_of_step = _keys_and_values(runner, tokens[:width], width)
        with runner.on_stream():
            return all(
                torch.equal(joined, in_chunks[:, : joined.shape[1]])
                for joined, in_chunks in zip(kv_of_step, kv_of_chunks, strict=True)
            )

    return tuple(filter(computes_the_same, widths))


def _keys_and_values(runner: CudaRunner, tokens: list[int], width: int) -> list[torch.Tensor]:
    """Run a prompt in steps of `width` tokens. Return a copy of its pages, as far as they are full."""
    pages = runner.model.pages
    count = -(-len(tokens) // pages.page_tokens)
    with runner.on_stream():
        for stored in (*pages.pools, *pages.exponents):
            stored[:, :count] = 0
    enter: tuple[Enter, ...] = (
        Enter(-1, 0, tuple(tokens), len(tokens), SamplingParams(temperature=0.0)),
    )
    blocks = tuple(range(count + 1))
    for start in range(0, len(tokens), width):
        row = StepRow(-1, 0, start, tuple(tokens[start : start + width]), (), blocks)
        runner.launch(StepPlan(0, (row,), (), (), enter))
        runner.collect()
        enter = ()
        blocks = ()
    runner.launch(StepPlan(0, leave=(-1,)))
    runner.collect()
    with runner.on_stream():
        return [stored[:, :count].clone() for stored in (*pages.pools, *pages.exponents)]
