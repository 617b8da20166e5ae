"""Draft credit: what wrong drafts may cost, counted in tokens of all streams.

What the drafts of a text save is that text's own, and pays for its next ones. Everything else comes from one
fund of the engine: a small first amount, and a hundredth of what plain steps give. So however many texts are
written at once, and however often each defeats its drafts, they cost a hundredth in the long run.

Right drafts cost, too: the other texts of the step, which wait for it. Patience limits what each of them loses.
"""

from collections.abc import Iterable, Mapping

FIRST_CREDIT = 1.5
PLAIN_CREDIT = 0.01
"""What each token of a plain step adds to the fund."""
PROBE_CREDIT = 0.5
"""Drafts that were switched off are tried again from this much in the fund on."""
MOST_CREDIT = 16.0
"""Two wide drafts that are rejected whole: where 16 rows cost 7 plain steps, one at an edit is bad luck,
and without drafts it would take hundreds of plain steps to earn another try."""
_PATIENCE = 0.015
_MOST_PATIENCE = 4.0
"""Plain steps that a text may lose to the drafts of others: earned with each plain step, and at most."""


class DraftFund:
    """The engine's part, shared by all of its texts."""

    def __init__(self) -> None:
        self.balance = FIRST_CREDIT

    def earn(self) -> None:
        """Add what a token of a plain step earns."""
        self.balance = max(self.balance, min(self.balance + PLAIN_CREDIT, FIRST_CREDIT))


class DraftCredit:
    """The credit of one text."""

    def __init__(self, fund: DraftFund) -> None:
        self.fund = fund
        self._own = 0.0
        self._borrowed = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether the next wrong draft could not be paid."""
        return self._own <= 0 and self.fund.balance < 0

    @property
    def allows_probe(self) -> bool:
        """Whether a short draft may be tried although earlier ones did not pay."""
        return self._own > 0 or self.fund.balance >= PROBE_CREDIT

    def add(self, net: float) -> None:
        """Count the tokens that a draft saved, less those that all streams lost by it."""
        if net >= 0:
            repaid = min(net, self._borrowed)
            self._borrowed -= repaid
            self.fund.balance += repaid
            self._own = min(self._own + net - repaid, MOST_CREDIT)
            return
        self._own += net
        if self._own < 0:
            self._borrowed -= self._own
            self.fund.balance += self._own
            self._own = 0.0


class Patience:
    """How much longer each text of a step may still wait for the drafts of others, in plain steps.

    By number of the sequence. However much others gain, none becomes slower by more than a fiftieth.
    """

    def __init__(self) -> None:
        self._left: dict[int, float] = {}

    def left(self, number: int) -> float:
        """What a text may still lose."""
        return self._left.get(number, 0.0)

    def bears(self, losses: Mapping[int, float]) -> bool:
        """Whether every text may lose so much."""
        return all(lost <= self.left(number) for number, lost in losses.items())

    def spend(self, losses: Mapping[int, float]) -> None:
        """Count what the texts of a step lose; below 0: they gain."""
        for number, lost in losses.items():
            self._left[number] = self.left(number) - max(lost, 0.0)

    def earn(self, numbers: Iterable[int]) -> None:
        """Count a plain step of these texts, and forget all others."""
        self._left = {one: min(self.left(one) + _PATIENCE, _MOST_PATIENCE) for one in numbers}
