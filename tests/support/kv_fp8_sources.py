"""Shared by tests: sources_of."""

import torch

from localchat_cuda.kernels.attention.reference import AttentionBatch
from tests.support.attention_scenes import PAGE


def sources_of(batch: AttentionBatch, room: int) -> torch.Tensor:
    """All pages of a batch, sequence by sequence."""
    each = zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True)
    sources = [(slot, n) for slot, length in each for n in range(-(-length // PAGE))]
    sources += [(-1, 0)] * (room - len(sources))
    return torch.tensor(sources, dtype=torch.int32, device=batch.slots.device)
