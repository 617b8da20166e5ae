"""Shared by tests: HALVES, logs_of."""

from typing import Any

import torch

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def logs_of(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log probabilities of each token behind the first."""
    ids = torch.tensor([tokens], device=model.device)
    with torch.no_grad():
        logs = model(ids).logits[0].float().log_softmax(-1)
    found: torch.Tensor = logs[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()
    return found
