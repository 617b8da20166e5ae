"""Prepared steps: what a runner tells whose steps are slow until their kind was prepared."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DecodeRow(NamedTuple):
    """A row of a step that only decodes, as it is being planned."""

    seq: int
    start: int
    width: int
    """Its tokens, drafts included."""


class PreparingRunner(Protocol):
    """Further method of a runner whose capabilities say that it `prepares_steps`."""

    def prepared(self, rows: Sequence[DecodeRow], *, masked: bool) -> bool:
        """Whether a step of these rows is as fast as it will ever be. `masked`: it may have masks.

        Called from the thread of `launch`. What is not prepared is, in a later `warm_up_next`.
        """
        ...
