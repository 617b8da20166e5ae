"""Decisions of a load that depend on stored numbers.

Tensors on the `meta` device have a shape and a type but no numbers. Compiling ahead loads such tensors, and for
them each decision has a fixed result.
"""

import torch


def all_true(condition: torch.Tensor, *, on_meta: bool) -> bool:
    """Return True if a condition holds everywhere. `on_meta`: the result for a tensor without numbers."""
    return on_meta if condition.is_meta else bool(condition.all())


def number_of(tensor: torch.Tensor, *, on_meta: float) -> float:
    """Return the number of a tensor of one element. `on_meta`: the result for a tensor without numbers."""
    return on_meta if tensor.is_meta else float(tensor)
