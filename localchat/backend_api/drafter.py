"""Drafter: a small model, or prediction heads, that a backend keeps beside a model and that guess ahead."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from localchat.backend_api.interface import Runner, SamplingParams


class DraftAsk(NamedTuple):
    """What to guess for one sequence."""

    seq: int
    tokens: Sequence[int]
    """They begin at position `start` of the sequence, and only grow from call to call."""
    start: int
    sampling: SamplingParams
    limit: int
    """Most tokens."""
    goes_on: Callable[[float], bool]
    """Asked after each token with its probability, by drafters that know it before the next one."""


class Draft(NamedTuple):
    """Guessed tokens, each with the probability that the draft model gave it; 1.0: it was not computed."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


NO_DRAFT = Draft((), ())


class Drafter(Protocol):
    """Proposes the next tokens of sequences. Called from the thread of `launch` and `collect`, between them."""

    name: str
    """What it is, as the end of a sentence that begins with "drafts of"."""
    token_s: float
    """Seconds of one drafted token, as measured at the load; of one for each sequence where it drafts
    `together`."""
    prompt_token_s: float
    """The same for a token of a text that it reads."""
    together: bool
    """Drafts of several sequences take about as long as those of one."""

    def earliest(self, seq: int, length: int) -> int:
        """The first position from which it can read a sequence of `length` tokens, or go on with it."""
        ...

    def ready(self, unread: Mapping[int, int]) -> bool:
        """Whether drafting is as fast as it will ever be; what is not will be, after a later `warm_up_next`.

        `unread`: of each sequence, the tokens that come first.
        """
        ...

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Guess what follows each text; NO_DRAFT where there is no room, or where it begins before `earliest`.

        Tokens are drawn as the answer's are: with the sampling's own noise, so that equal models draw equal
        tokens. Penalties are left out.
        """
        ...


class DraftingRunner(Runner, Protocol):
    """Further attribute of a runner whose capabilities have a draft model."""

    drafter: Drafter
