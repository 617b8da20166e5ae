"""Draft credit: what wrong drafts may cost, counted in tokens of all streams.

What the drafts of a text save is that text's own, and pays for its next ones. Everything else comes from one
fund of the engine: a small first amount, and a hundredth of what plain steps give. So however many texts are
written at once, and however often each defeats its drafts, they cost a hundredth in the long run.
"""

FIRST_CREDIT = 1.5
PLAIN_CREDIT = 0.01
"""What each token of a plain step adds to the fund."""
PROBE_CREDIT = 0.5
"""Drafts that were switched off are tried again from this much in the fund on."""
MOST_CREDIT = 16.0
"""Two wide drafts that are rejected whole: where 16 rows cost 7 plain steps, one at an edit is bad luck,
and without drafts it would take hundreds of plain steps to earn another try."""


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
