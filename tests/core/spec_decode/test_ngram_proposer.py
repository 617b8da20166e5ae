"""Drafts, by replaying texts against a table of step costs: no clock is read, the figures are exact."""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.core.spec_decode.ngram_index import LONGEST, SPAN, NgramIndex
from localchat.core.spec_decode.ngram_proposer import (
    NgramProposer,
    _votes,
    common_rates,
    match_kind,
    match_rates,
)
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel
from tests.support.draft_replay import DraftReplay

# Cost of a step by its tokens, relative to one: llama.cpp on two cores, and a GPU bound by memory.
CPU = {1: 1.0, 2: 1.25, 4: 1.7, 8: 3.0, 16: 4.8, 32: 9.3}
SLOW_ROWS = {1: 1.0, 2: 2.05, 4: 2.7, 8: 4.8, 12: 5.9, 16: 6.2, 17: 6.9, 32: 11.0}
GPU = {1: 1.0, 8: 1.02, 16: 1.05, 32: 1.2}


def cost(table: dict[int, float], rows: int) -> float:
    sizes = sorted(table)
    low = max(s for s in sizes if s <= rows)
    high = min(s for s in sizes if s >= rows)
    part = (rows - low) / (high - low) if high > low else 0.0
    return table[low] + (table[high] - table[low]) * part


class Replay(NamedTuple):
    speedup: float
    steps: int
    drafts: SequenceDrafts
    history: list[tuple[int, int, int]]
    """(tokens said before, drafted, accepted) of each step."""


def replay(
    prompt: Sequence[int],
    text: Sequence[int],
    table: dict[int, float],
    limit: int,
) -> Replay:
    """The text is said, whatever is drafted; time is counted by the table, with the tremble of a machine."""
    model, jitter = CostModel(), random.Random(7)
    model.observe(1, cost(table, 1))
    answer = DraftReplay(model, max_draft=limit)
    answer.begin(prompt)
    answer.advance(text[:1])
    said, spent, history = 1, cost(table, 1), []
    while said < len(text):
        drafted, accepted, seconds = answer.step(
            text[said:], lambda rows: cost(table, rows) * jitter.uniform(0.96, 1.04)
        )
        assert drafted <= limit
        spent += seconds
        history.append((said, drafted, accepted))
        said += accepted + 1
    return Replay(len(text) / spent, len(history), answer.drafts, history)


def proposal(tokens: Sequence[int], model: CostModel, limit: int) -> tuple[int, ...]:
    """What is drafted first after a prompt."""
    answer = DraftReplay(model, max_draft=limit)
    answer.begin(tokens)
    return answer.propose() if limit else ()


def words(count: int, seed: int, vocabulary: int = 800) -> list[int]:
    """Tokens with the frequencies of a language and no memory."""
    weights = [1 / (rank + 1) for rank in range(vocabulary)]
    return random.Random(seed).choices(range(vocabulary), weights, k=count)


def edited(source: list[int], gap: int, seed: int) -> list[int]:
    """A copy with a replacement, an insertion or a deletion every `gap` tokens."""
    dice, out, at = random.Random(seed), list[int](), 0
    while at < len(source):
        kept = dice.randint(gap // 2, gap * 3 // 2)
        out += source[at : at + kept]
        at += kept
        new, gone = dice.choice([(1, 1), (3, 2), (5, 0), (0, 6)])
        out += [dice.randrange(1000, 5000) for _ in range(new)]
        at += gone
    return out


SOURCE = words(1500, 1)


@pytest.mark.parametrize(
    ("table", "limit", "least"), [(CPU, 31, 2.4), (CPU, 6, 2.4), (GPU, 31, 10.0)]
)
def test_a_file_edit_is_more_than_twice_as_fast(
    table: dict[int, float], limit: int, least: float
) -> None:
    assert replay(SOURCE, edited(SOURCE, 200, 2), table, limit).speedup > least


def test_a_copy_gets_what_the_costs_allow() -> None:
    assert replay(SOURCE, SOURCE, CPU, 31).speedup > 3.2
    assert replay(SOURCE, SOURCE, GPU, 31).speedup > 20


@pytest.mark.parametrize("vocabulary", [12, 60, 800, 50_000])
@pytest.mark.parametrize("table", [CPU, SLOW_ROWS, GPU])
def test_random_text_is_at_most_two_percent_slower(
    table: dict[int, float], vocabulary: int
) -> None:
    for seed in range(3):
        text = words(256, 10 + seed, vocabulary)
        assert replay(words(1000, 20 + seed, vocabulary), text, table, 31).speedup > 0.98


def test_drafts_are_long_again_right_after_an_edit() -> None:
    changed = 700
    text = [*SOURCE[:changed], 4000, *SOURCE[changed + 1 :]]
    steps = replay(SOURCE, text, GPU, 31).history
    behind = [(drafted, taken) for said, drafted, taken in steps if said > changed]
    assert behind[0][1] > 0, "the copy goes on behind a replaced token at once"
    assert max(taken for _, taken in behind[:3]) >= 16


def test_one_wide_draft_lost_at_an_edit_does_not_end_drafting_where_rows_are_dear() -> None:
    text = random.Random(2).sample(range(1000, 100_000), 240)
    for edit in range(100, 134):
        file = [*text[:edit], 7, *text[edit + 1 :]]
        result = replay([*file, *text[:3]], text[3:], SLOW_ROWS, 16)
        assert not result.drafts.off
        assert result.speedup > 1.7


def test_a_period_goes_on_beyond_the_end_of_the_text() -> None:
    model = CostModel()
    model.observe(1, 1.0)
    model.observe(16, 1.01)
    assert proposal([9, 1, 2, 3, 1, 2, 3], model, 8)[:5] == (1, 2, 3, 1, 2)


def test_the_majority_of_equal_places_is_drafted() -> None:
    tokens = [1, 2, 3, 7, 0, 1, 2, 3, 7, 4, 1, 2, 3, 8, 5, 1, 2, 3]
    assert proposal(tokens, CostModel(), 1) == (7,)


def test_nothing_is_proposed_without_a_match_or_a_limit() -> None:
    assert proposal(range(50), CostModel(), 8) == ()
    assert proposal([1], CostModel(), 8) == ()
    assert NgramProposer([5] * 20).chances(0) == []


def test_where_every_row_costs_as_much_as_the_first_nothing_is_drafted() -> None:
    model = CostModel()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        model.observe(rows, rows * 0.01)
    assert proposal([5] * 20, model, 8) == ()


def test_a_copy_is_drafted_in_steps_of_32_rows_where_16_rows_cost_more_each() -> None:
    """Q4_K of a 1.5B model on a CPU: 16 rows take as long as 12 plain steps, and 32 as long as 21."""
    model = CostModel()
    for rows, seconds in ((1, 1.0), (4, 3.5), (8, 9.0), (16, 12.0), (32, 21.0)):
        model.observe(rows, seconds)
        model.observe(rows, seconds)
    replay = DraftReplay(model, max_draft=63)
    replay.begin([*range(40), 9, *range(40)])
    for _ in range(40):
        # A copy that was right so far.
        for kind in range(20):
            replay.drafts.ngrams._rates.learn(kind, accepted=True)
    assert len(replay.propose()) == 31


def test_drafts_fill_the_width_that_a_step_is_padded_to() -> None:
    padded = CostModel((1, 4, 8))
    for rows, seconds in ((1, 1.0), (3, 1.2), (8, 4.0)):
        padded.observe(rows, seconds)
    widths = [padded.seconds(rows) for rows in range(1, 9)]
    assert widths == pytest.approx([1.0, *[1.2] * 3, *[4.0] * 4])
    assert len(proposal([1, 2, 3, 4, 9, 1, 2, 3], padded, 7)) == 3


def test_tokens_that_were_only_appended_are_copied_from_later() -> None:
    drafts = NgramProposer([1, 2, 3])
    drafts.append([4, 5, 6, 7, 8, 9] * 3)
    drafts.advance([4])
    drafts.advance([5, 6])
    assert taken(drafts, 1) == (7,)


def taken(drafts: NgramProposer, count: int) -> tuple[int, ...]:
    """So many tokens of a proposal, whatever steps cost."""
    drafts.chances(count)
    return drafts.take(count)


def hopeless(steps: int) -> tuple[DraftReplay, float]:
    """An answer of which no draft was ever right, and what these cost in plain steps."""
    model, lost = CostModel(), 0.0
    for rows, seconds in CPU.items():
        model.observe(rows, seconds)
    answer = DraftReplay(model, max_draft=4)
    answer.begin(SOURCE)
    for step in range(steps):
        start = step * 37 % 1000
        answer.drafts.ngrams.append(SOURCE[start : start + 8])
        _, _, seconds = answer.step([4999 - step], lambda rows: cost(CPU, rows))
        lost += seconds - 1
    return answer, lost


def test_drafts_that_do_not_pay_are_switched_off_with_a_reason_and_tried_again() -> None:
    answer, _ = hopeless(20)
    drafts = answer.drafts
    assert drafts.accepted == 0
    assert re.fullmatch(
        r"drafts cost more than they save on this text: 0 of \d+ tokens accepted", drafts.off
    )
    assert drafts.speedup is not None
    assert drafts.speedup < 1
    drafts.ngrams.append(SOURCE[300:340])
    assert answer.propose(8) == ()
    at = 340
    while not (probe := answer.propose(8)):
        answer.advance(SOURCE[at : at + 1], seconds=1.0)
        at += 1
    assert at < 340 + 200
    answer.advance(SOURCE[at : at + 1 + len(probe)], probe, 1.0)
    assert drafts.off == ""


def test_what_hopeless_drafts_cost_is_bounded_by_the_budget() -> None:
    steps = 400
    _, lost = hopeless(steps)
    assert 0 < lost < cost(CPU, 5) + 0.02 * steps


def test_a_fork_continues_independently_from_the_same_text() -> None:
    drafts = NgramProposer([1, 2, 3, 4, 5, 6])
    drafts.index()
    twin = drafts.fork()
    drafts.advance([1, 2, 3])
    twin.advance([2, 3, 4])
    assert taken(drafts, 1) == (4,)
    assert taken(twin, 1) == (5,)


def test_a_long_prompt_is_taken_in_slices_and_loses_no_token() -> None:
    prompt = words(20_000, 3)
    drafts = NgramProposer(prompt)
    assert not drafts.index()
    drafts.advance(prompt[7000:7010])
    drafts.advance(prompt[7010:7020])
    while not drafts.index():
        assert drafts.chances(0) == []
    assert taken(drafts, 4) == tuple(prompt[7020:7024])


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=12), text=st.lists(st.integers(0, 3), max_size=40)
)
def test_may_propose_misses_no_proposal(prompt: list[int], text: list[int]) -> None:
    proposer = NgramProposer(prompt)
    for token in text:
        possible = proposer.may_propose()
        proposed = bool(proposer.chances(8))
        assert possible or not proposed
        if possible and proposer._lost_copy is None:
            assert proposed
        proposer.advance([token])


@given(
    prompt=st.lists(st.integers(0, 3), max_size=20),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 8)),
        max_size=20,
    ),
)
def test_any_sequence_of_steps_keeps_the_counters_consistent(
    prompt: list[int], steps: list[tuple[list[int], int]]
) -> None:
    answer = DraftReplay(CostModel())
    answer.begin(prompt or [0])
    drafted = accepted = 0
    for tokens, limit in steps:
        proposed = answer.propose(limit) if limit else ()
        assert len(proposed) <= limit
        assert all(0 <= token <= 3 for token in proposed)
        said = [t for t, p in zip(tokens, proposed, strict=False) if t == p]
        answer.advance([*said, tokens[-1]], proposed, 0.01)
        drafted, accepted = drafted + len(proposed), accepted + len(said)
    assert (answer.drafts.drafted, answer.drafts.accepted) == (drafted, accepted)
    assert (answer.drafts.speedup is None) == (drafted == 0)


# ------------------------------------------------------------------ where tokens stood before


@settings(max_examples=150)
@given(text=st.lists(st.integers(0, 2), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_every_earlier_occurrence_is_found_however_the_text_came(
    text: list[int], cuts: list[int]
) -> None:
    index, begin = NgramIndex(), 0
    for cut in [*sorted(cuts), len(text)]:
        index.extend(text[begin:cut])
        begin = max(begin, cut)
    found = list(index.find(text, 100))
    last = text[-SPAN:]
    everywhere = [p for p in range(SPAN - 1, len(text) - 1) if text[p - SPAN + 1 : p + 1] == last]
    assert found == (everywhere[::-1] if len(text) >= SPAN else [])
    for position in found:
        length = index.match_length(text, position)
        assert text[position - length + 1 : position + 1] == text[len(text) - length :]
        longer = min(position + 1, LONGEST) > length
        assert not longer or text[position - length] != text[-1 - length]
    assert list(index.find(text, 1)) == found[:1]


def test_a_copied_index_is_independent() -> None:
    index = NgramIndex([1, 2, 3, 4])
    twin = index.copy()
    twin.extend([1, 2, 3])
    assert list(twin.find([1, 2, 3], 9)) == [2]
    assert len(index) == 4
    assert list(index.find([1, 2, 3], 9)) == [2]


# ------------------------------------------------------------------ what steps cost


def test_costs_are_learned_interpolated_and_follow_the_machine() -> None:
    model = CostModel()
    assert not model.has_samples()
    for _ in range(5):
        for rows in (1, 4, 16):
            model.observe(rows, 0.1 * cost(CPU, rows))
    assert model.seconds(4) == pytest.approx(0.17)
    assert 0.17 < model.seconds(8) < 0.48
    assert model.seconds(32) > 0.48
    assert model.seconds(2) == pytest.approx(0.1 + 0.07 / 3)
    for _ in range(60):
        model.observe(16, 0.96)
    assert model.seconds(16) == pytest.approx(0.96, rel=0.02)
    assert model.seconds(1) > 0.1, "what slows one size slows the others"


def test_one_slow_step_is_not_believed_at_once() -> None:
    model = CostModel()
    model.observe(1, 0.1)
    model.observe(1, 9.0)
    assert model.seconds(1) < 0.13


def test_steps_nobody_measured_are_ignored() -> None:
    model = CostModel()
    model.observe(1, 0.0)
    assert not model.has_samples()
    assert model.seconds(1) < model.seconds(2)


def test_acceptance_is_learned_for_each_length_and_forgets() -> None:
    rates = match_rates(common_rates())
    weak, strong = match_kind(SPAN, near=False), match_kind(LONGEST, near=False)
    assert rates.rate(weak) < rates.rate(strong)
    for _ in range(100):
        rates.learn(strong, False)
    assert rates.rate(strong) < 0.05
    for _ in range(40):
        rates.learn(strong, True)
    assert rates.rate(strong) > 0.6
    assert rates.rate(weak) == match_rates(common_rates()).rate(weak)
    assert match_kind(SPAN, near=True) != weak


def test_proposals_that_were_not_drafted_show_which_matches_are_right() -> None:
    drafts = NgramProposer([1, 2, 3, 4])
    drafts.append([1, 2, 3])
    (first,) = drafts.chances(1)
    for other in range(100, 120):
        drafts.advance([other])
        drafts.append([1, 2, 3])
        wrong = drafts.chances(1)[0]
    assert wrong < first / 4
    for _ in range(10):
        drafts.advance([119])
        drafts.append([1, 2, 3])
        right = drafts.chances(1)[0]
    assert right > 2 * wrong


def test_a_proposal_is_not_compared_with_tokens_behind_forced_ones() -> None:
    rates = common_rates()
    kind = match_kind(SPAN, near=False)
    prior = rates.rate(kind)
    drafts = NgramProposer([1, 2, 3, 4, 1, 2, 3], rates)
    assert drafts.chances(1) == [prior]
    drafts.append([4, 1, 2])
    drafts.advance([3])
    assert rates.rate(kind) == prior


def test_a_new_text_starts_with_what_earlier_texts_have_shown() -> None:
    common = common_rates()
    kind = match_kind(SPAN, near=False)
    prior = common.rate(kind)
    for _ in range(20):
        rates = match_rates(common)
        rates.learn(kind, False)
        rates.learn(kind, False)
    assert match_rates(common).rate(kind) < prior / 2


def _counted(runs: list[list[int]]) -> list[tuple[int, float]]:
    """Votes of runs, token by token."""
    found, at = [], 0
    while voters := [run for run in runs if len(run) > at]:
        tokens = [run[at] for run in voters]
        token = max(dict.fromkeys(tokens), key=tokens.count)
        found.append((token, tokens.count(token) / len(tokens)))
        runs = [run for run in voters if run[at] == token]
        at += 1
    return found


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6))
def test_runs_vote_as_their_tokens_would_one_by_one(runs: list[list[int]]) -> None:
    assert list(_votes(runs)) == _counted(runs)


def test_a_run_that_is_outvoted_has_no_vote_from_there_on() -> None:
    runs = [[1, 9, 9], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5]]
    assert list(_votes(runs)) == [(1, 1.0), (2, 0.75), (4, 2 / 3), (5, 1.0)]
