"""Shared by tests: PAGE, close, numbers, scene."""

import torch

from localchat_cuda.kernels.attention.reference import AttentionBatch
from tests.support.seeded import seeded

PAGE = 64


def numbers(*extents: int, seed: int = 0) -> torch.Tensor:
    generator = seeded(seed + sum(extents))
    return torch.randn(*extents, generator=generator)


def scene(
    work: list[tuple[int, int]], h: int, j: int, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """(new tokens, length) per sequence, pages in a shuffled order, NaN wherever nothing was
    written."""
    width = 1 + max(-(-length // PAGE) for _, length in work)
    total = sum(-(-length // PAGE) for _, length in work)
    pool = torch.full((total + 1, 2, j, PAGE, d), float("nan"), dtype=torch.float16)
    free = torch.randperm(total, generator=seeded(1)).tolist()
    tables = torch.full((len(work) + 1, width), total, dtype=torch.int32)
    starts, taken = [], 0
    for i, (count, length) in enumerate(work):
        for n in range(-(-length // PAGE)):
            page = free.pop()
            tables[i + 1, n] = page
            held = min(PAGE, length - n * PAGE)
            pool[page, :, :, :held] = numbers(2, j, held, d, seed=page).half()
        starts.append(taken)
        taken += count
    whole = torch.int32
    batch = AttentionBatch(
        torch.tensor(starts, dtype=whole),
        torch.tensor([c for c, _ in work], dtype=whole),
        torch.tensor([n for _, n in work], dtype=whole),
        torch.arange(1, len(work) + 1, dtype=whole),
        tables,
    )
    return numbers(taken, h, d).half(), pool[:, 0], pool[:, 1], batch


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.float() - wanted).norm() / wanted.norm())
    assert error < 2e-3, error
