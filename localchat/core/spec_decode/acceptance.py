"""Acceptance rates: the share of drafted tokens of a kind that the model accepts."""

from collections.abc import Sequence

_FORGET = 0.01
"""Share of the way back to the prior with each step without drafts."""
_FORGET_PER_TEXT = 0.05
"""The share by which each new text moves common rates back to their priors."""


class AcceptanceRates:
    """An exponential average for each kind of drafted token, starting at a prior.

    Recent tokens count most, so that a change of subject shows within tens of tokens.
    """

    def __init__(
        self,
        priors: Sequence[float],
        *,
        prior_tokens: float,
        memory_tokens: float,
        common: "AcceptanceRates | None" = None,
    ) -> None:
        """`prior_tokens`: weight of a prior. `memory_tokens`: length of the average.

        `common`: rates that learn from all texts, this one included.
        """
        self._priors = tuple(priors)
        self._common = common
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
        if self._common is not None:
            self._common.learn(kind, accepted)

    def of_new_text(self, *, prior_tokens: float, memory_tokens: float) -> "AcceptanceRates":
        """Return the rates of a new text, which starts with these common rates.

        Otherwise each text would try drafts again that failed in all texts before it.
        """
        self.forget(_FORGET_PER_TEXT)
        return AcceptanceRates(
            self._rates, prior_tokens=prior_tokens, memory_tokens=memory_tokens, common=self
        )

    def forget(self, share: float = _FORGET) -> None:
        """Move all rates towards their priors, by this share of the difference.

        Called for steps without drafts, so that kinds that were never right are tried again now and then.
        """
        for kind, prior in enumerate(self._priors):
            self._rates[kind] += share * (prior - self._rates[kind])
