"""Drafter: a small model that a backend keeps beside the one that answers, and that guesses ahead for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from localchat.backend_api.interface import Runner, SamplingParams


class Draft(NamedTuple):
    """Guessed tokens, each with the probability that the draft model gave it."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


class Drafter(Protocol):
    """Proposes the next tokens of sequences. Called from the thread of `launch` and `collect`, between them."""

    token_s: float
    """Seconds of one drafted token, as measured at the load."""
    prompt_token_s: float
    """The same for a token of a text that it reads."""

    def draft(
        self,
        seq: int,
        tokens: Sequence[int],
        start: int,
        sampling: SamplingParams,
        limit: int,
        goes_on: Callable[[float], bool],
    ) -> Draft:
        """Guess what follows `tokens`, `limit` tokens at most; nothing where there is no room.

        `tokens` begin at position `start` of the sequence, and only grow from call to call. They are drawn as
        the answer's are: with the sampling's own noise, so that equal models draw equal tokens. Penalties are
        left out. `goes_on`: asked after each token with its probability.
        """
        ...


class DraftingRunner(Runner, Protocol):
    """Further attribute of a runner whose capabilities have a draft model."""

    drafter: Drafter
