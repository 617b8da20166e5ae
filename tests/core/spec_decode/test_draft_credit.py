"""What wrong drafts may cost."""

from localchat.core.spec_decode.draft_credit import (
    FIRST_CREDIT,
    MOST_CREDIT,
    PLAIN_CREDIT,
    PROBE_CREDIT,
    DraftCredit,
    DraftFund,
)


def test_all_texts_of_an_engine_spend_from_one_fund() -> None:
    """Each with a first credit of its own, a burst of short answers would cost many times as much."""
    fund, lost = DraftFund(), 0.0
    for _ in range(100):
        text = DraftCredit(fund)
        if not text.exhausted:
            text.add(-1.0)
            lost += 1.0
        fund.earn()
    assert lost <= FIRST_CREDIT + 1.0 + 100 * PLAIN_CREDIT


def test_a_text_pays_for_its_drafts_from_what_they_saved_first() -> None:
    fund = DraftFund()
    text = DraftCredit(fund)
    text.add(5.0)
    text.add(-4.0)
    assert fund.balance == FIRST_CREDIT
    text.add(-3.0)
    assert fund.balance == FIRST_CREDIT - 2.0
    assert text.exhausted
    assert not text.allows_probe


def test_what_was_borrowed_is_paid_back() -> None:
    fund = DraftFund()
    text = DraftCredit(fund)
    text.add(-2.0)
    text.add(1.5)
    assert fund.balance == FIRST_CREDIT - 0.5
    text.add(1.5)
    assert fund.balance == FIRST_CREDIT
    assert text.allows_probe


def test_plain_steps_earn_another_try_and_no_riches() -> None:
    fund = DraftFund()
    text = DraftCredit(fund)
    text.add(-FIRST_CREDIT - 0.01)
    assert text.exhausted
    for _ in range(int(PROBE_CREDIT / PLAIN_CREDIT)):
        assert not text.allows_probe
        fund.earn()
    fund.earn()
    fund.earn()
    assert text.allows_probe
    for _ in range(10_000):
        fund.earn()
    assert fund.balance == FIRST_CREDIT


def test_gains_are_not_hoarded() -> None:
    fund = DraftFund()
    text = DraftCredit(fund)
    text.add(1000.0)
    text.add(-MOST_CREDIT - FIRST_CREDIT - 0.1)
    assert text.exhausted
