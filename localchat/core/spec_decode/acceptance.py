"""Acceptance rates: the share of drafted tokens of a kind that the model accepts."""

from collections.abc import Sequence

_FORGET = 0.01
"""Share of the way back to the prior with each step without drafts."""


class AcceptanceRates:
    """An exponential average for each kind of drafted token, starting at a prior.

    Recent tokens count most, so that a change of subject shows within tens of tokens.
    """

    def __init__(
        self, priors: Sequence[float], *, prior_tokens: float, memory_tokens: float
    ) -> None:
        """`prior_tokens`: weight of a prior. `memory_tokens`: length of the average."""
        self._priors = tuple(priors)
        self._rates = list(priors)
        self._weights = [prior_tokens] * len(priors)
        self._memory_tokens = memory_tokens

    def rate(self, kind: int) -> float:
        """Return the probability that the next drafted token of a kind is accepted."""
        return self._rates[kind]

    def learn(self, kind: int, accepted: bool) -> None:
        """Record whether one drafted token was accepted."""
        self._weights[kind] = min(self._weights[kind] + 1, self._memory_tokens)
        self._rates[kind] += (accepted - self._rates[kind]) / self._weights[kind]

    def forget(self) -> None:
        """Move all rates a little towards their priors.

        Called for steps without drafts, so that kinds that were never right are tried again now and then.
        """
        for kind, prior in enumerate(self._priors):
            self._rates[kind] += _FORGET * (prior - self._rates[kind])
