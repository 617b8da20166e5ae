"""Drafter: a small model, or prediction heads, that a backend runs beside a model to draft tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from localchat.backend_api.interface import Runner, SamplingParams
from localchat.errors import ModelInvalid

_PADDING = 512
"""Largest number of unused tokens by which vocabularies of one family differ."""


class DraftAsk(NamedTuple):
    """Request for a draft of one sequence."""

    seq: int
    tokens: Sequence[int]
    """Tokens of the sequence from position `start`. They only grow from call to call."""
    start: int
    sampling: SamplingParams
    limit: int
    """Longest draft."""
    goes_on: Callable[[float], bool]
    """Called after each token with its probability. Returns whether to draft another."""


class Draft(NamedTuple):
    """Drafted tokens, each with the draft model's probability. 1.0: not computed."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


NO_DRAFT = Draft((), ())


class Drafter(Protocol):
    """Proposes the next tokens of sequences. Called from the thread of `launch` and `collect`, between them."""

    name: str
    """Name that completes the phrase "drafts of"."""
    token_s: float
    """Seconds per drafted token, as measured at the load. With `together`, seconds for one token of each
    sequence."""
    prompt_token_s: float
    """Seconds per token of a text that the drafter reads."""
    together: bool
    """Drafts of several sequences take about as long as drafts of one."""

    active: bool
    """Set by the caller. While False, there are no drafts, and the drafter may store nothing about new tokens.
    `earliest` then moves on to the first token that it knows of again."""

    def earliest(self, seq: int, length: int) -> int:
        """Return the first position from which a sequence of `length` tokens can be read."""
        ...

    def ready(self, unread: Mapping[int, int]) -> bool:
        """Return whether drafting is prepared. Otherwise a later `warm_up_next` prepares it.

        `unread`: number of tokens to read first, by sequence.
        """
        ...

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Draft the next tokens of each text. NO_DRAFT if there is no room, or the text starts before
        `earliest`.

        Tokens are sampled with the same noise as the answer's, so that equal models draw equal tokens.
        Penalties are ignored.
        """
        ...


class DraftingRunner(Runner, Protocol):
    """Additional attribute of a runner with a draft model."""

    drafter: Drafter


def unfit(name: str, why: str) -> ModelInvalid:
    """Return the error for a file that cannot draft. `why`: rest of the sentence."""
    return ModelInvalid(
        f"{name} cannot be a draft model{why}.",
        hint="A draft model is a small model of the same family, such as Qwen3 0.6B for Qwen3 8B.",
    )


def shared_vocabulary(
    name: str,
    sizes: tuple[int, int],
    draft_text: Callable[[int], bytes],
    model_text: Callable[[int], bytes],
) -> int:
    """Return how many tokens a draft model shares with its model. Raises ModelInvalid if their numbers differ.

    `sizes`: tokens of both. The others return the text of a token.
    """
    if abs(sizes[0] - sizes[1]) > _PADDING:
        counts = f"it has {sizes[0]:,} tokens, and the model has {sizes[1]:,}"
        raise unfit(name, f" for this one: {counts}")
    for token in range(min(sizes)):
        own = draft_text(token)
        other = model_text(token)
        if own != other:
            texts = f"its token {token} is {_shown(own)}, and the model's is {_shown(other)}"
            raise unfit(name, f" for this one: {texts}")
    return min(sizes)


def _shown(piece: bytes) -> str:
    """Return the start of a token's text for a message."""
    return repr(piece.decode("utf-8", "replace")[:20])
