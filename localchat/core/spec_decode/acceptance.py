"""Acceptance rates: the share of drafted tokens of a kind that the model accepts."""

from collections.abc import Sequence


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
        self._common = common
        self._rates = list(priors)
        self._weights = [prior_tokens] * len(priors)
        self._memory_tokens = memory_tokens

    def rate(self, kind: int) -> float:
        """Return the probability that the next drafted token of a kind is accepted."""
        return self._rates[kind]

    def learn(self, kind: int, accepted: bool) -> None:
        """Record whether one proposed token was the model's."""
        self._weights[kind] = min(self._weights[kind] + 1, self._memory_tokens)
        self._rates[kind] += (accepted - self._rates[kind]) / self._weights[kind]
        if self._common is not None:
            self._common.learn(kind, accepted)

    def of_new_text(self, *, prior_tokens: float, memory_tokens: float) -> "AcceptanceRates":
        """Return the rates of a new text, which starts with these common rates.

        Otherwise each text would try drafts again that failed in all texts before it.
        """
        return AcceptanceRates(
            self._rates, prior_tokens=prior_tokens, memory_tokens=memory_tokens, common=self
        )
