"""What a draft model costs or saves, replayed on a clock that only the replay moves."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from localchat.backend_api.drafter import Draft, DraftAsk
from localchat.backend_api.interface import Capabilities
from localchat.core.scheduler.step_builder import ScheduledStep
from localchat.core.spec_decode import draft_planner
from localchat.core.spec_decode.draft_model import WINDOW_TOKENS, DraftModel
from localchat.core.spec_decode.draft_planner import DraftPlanner
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel
from tests.support.draft_replay import DraftReplay, planned_sequence

PLAIN_S = 0.05


class Clock:
    """Seconds that the replay has spent."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class ReplayedDrafter:
    """Guesses from a list; each token guessed or read takes its time on the clock."""

    def __init__(self, clock: Clock, token_s: float, begin_s: float) -> None:
        """`begin_s`: what reading many tokens takes beside the time of each."""
        self.token_s, self.prompt_token_s = token_s, token_s / 8
        self._clock, self._begin_s = clock, begin_s
        self._read = 0
        self.guesses: Callable[[int], int] = lambda _place: 0

    name = "the draft model"
    together = False
    active = True

    def earliest(self, seq: int, length: int) -> int:
        return 0

    def ready(self, unread: Mapping[int, int]) -> bool:
        return True

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        (ask,) = asks
        end = ask.start + len(ask.tokens)
        read = end - max(self._read, ask.start)
        self._clock.now_s += read * self.prompt_token_s + self._begin_s * (read >= WINDOW_TOKENS)
        self._read = end
        found: list[int] = []
        while len(found) < ask.limit:
            found.append(self.guesses(end + len(found)))
            self._clock.now_s += self.token_s
            if not ask.goes_on(0.5):
                break
        return [Draft(tuple(found), (0.5,) * len(found))]


class Replay:
    """An engine's steps for one answer after another, by a table of costs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        token: float = 0.1,
        row: float = 0.15,
        begin: float = 0,
    ) -> None:
        """token: time of a drafted token, row: of a further row of a step, begin: that which reading many
        tokens takes beside the time of each, in plain steps."""
        self.clock, self._row = Clock(), row
        monkeypatch.setattr(draft_planner, "time", self.clock)
        self.costs = CostModel()
        self.drafter = ReplayedDrafter(self.clock, token * PLAIN_S, begin * PLAIN_S)
        self.model = DraftModel(self.drafter, self.costs)
        self.replay = DraftReplay(self.costs, self.model, max_draft=16)
        self._random = random.Random(1)

    def answer(self, count: int, share: float) -> float:
        """Seconds of an answer of `count` tokens, `share` of which are guessed, over those of plain steps."""
        text = [self._random.randrange(1, 2**20) for _ in range(90 + count + 32)]
        right = [self._random.random() < share for _ in text]
        self.drafter.guesses = lambda place: text[place] if right[place] else 0
        self.drafter._read = 0
        self.replay.begin(text[:90])
        started_s, at = self.clock.now_s, 90
        while at < 90 + count:
            _, accepted, seconds = self.replay.step(
                text[at:], lambda rows: PLAIN_S * (1 + self._row * (rows - 1))
            )
            self.clock.now_s += seconds
            at += accepted + 1
        return (self.clock.now_s - started_s) / (count * PLAIN_S)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("row", [0.02, 0.15, 0.5])
@pytest.mark.parametrize("token", [0.05, 0.1, 0.3, 0.6])
def test_useless_drafts_cost_at_most_two_percent(
    monkeypatch: pytest.MonkeyPatch, token: float, row: float, begin: float
) -> None:
    replay = Replay(monkeypatch, token=token, row=row, begin=begin)
    ratios = [replay.answer(300, 0.0) for _ in range(10)]
    assert sum(ratios) / len(ratios) < 1.02
    assert replay.model.accepted == 0


@pytest.mark.parametrize(("share", "most"), [(0.5, 0.9), (0.8, 0.7)])
def test_useful_drafts_keep_their_gain_in_later_answers(
    monkeypatch: pytest.MonkeyPatch, share: float, most: float
) -> None:
    replay = Replay(monkeypatch)
    for _ in range(4):
        assert replay.answer(300, share) < most


@pytest.mark.parametrize("begin", [1, 3, 8])
def test_a_slow_first_reading_does_not_end_useful_drafts(
    monkeypatch: pytest.MonkeyPatch, begin: float
) -> None:
    """A GPU is given the step that reads a text kernel by kernel, which takes as long as several others."""
    replay = Replay(monkeypatch, token=0.16, row=0.03, begin=begin)
    for _ in range(4):
        assert replay.answer(300, 0.8) < 0.75


def test_drafts_that_became_useful_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(monkeypatch)
    for _ in range(4):
        replay.answer(300, 0.0)
    assert "cost more than they save: 0 of" in replay.model.off
    replay.answer(300, 0.8)
    assert replay.answer(300, 0.8) < 0.7
    assert not replay.model.off


def test_a_draft_model_that_does_not_pay_is_tried_rarely_and_only_after_it_saw_a_window_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch)
    replay.answer(300, 0.0)
    drafter = replay.drafter
    active: list[bool] = []
    tries: list[list[bool]] = []
    earn = replay.model.earn
    draft = drafter.draft

    def counted_earn(step: ScheduledStep) -> None:
        earn(step)
        active.append(drafter.active)

    def counted_draft(asks: Sequence[DraftAsk]) -> list[Draft]:
        if active:
            tries.append(active[-WINDOW_TOKENS:])
        return draft(asks)

    replay.model.earn = counted_earn  # type: ignore[method-assign]
    drafter.draft = counted_draft  # type: ignore[method-assign]
    for _ in range(10):
        replay.answer(300, 0.0)
    assert 0 < len(tries) <= 3 * 3000 / 200
    assert all(len(before) == WINDOW_TOKENS and all(before) for before in tries)
    assert sum(active) < 0.1 * len(active)


def test_several_rows_for_which_drafts_are_too_wide_do_not_pause_the_draft_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch)
    replay.answer(300, 0.9)
    replay.costs.seconds = lambda rows: 0.2 + 0.8 * rows  # type: ignore[method-assign]
    replay.model.token_s = 0.4
    planner = DraftPlanner(Capabilities(1000, 1000, 4, 4, 512), replay.costs, None, replay.model)
    for count, paused in ((4, False), (1, True)):
        sequences = [
            planned_sequence(n, SequenceDrafts(NgramProposer([1] * 9), uses_model=True), known=9)
            for n in range(count)
        ]
        for sequence in sequences:
            sequence.drafts.ngrams.chances = lambda limit: []
        assert planner.choose(sequences, sequences, 16, admits=False) == {}
        assert replay.model.paused is paused


def test_a_draft_model_that_cannot_save_time_is_never_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch, token=1.0)
    assert replay.answer(300, 1.0) == pytest.approx(1.0)
    assert not replay.model.drafted


def test_a_text_without_drafts_waits_for_a_draft_model_as_long_as_its_budget_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch)
    replay.answer(300, 1.0)
    can = Capabilities(1000, 1000, 2, 2, 512, depth=2)
    planner = DraftPlanner(can, replay.costs, None, replay.model)
    drafting = planned_sequence(0, SequenceDrafts(NgramProposer([1] * 9), uses_model=True), known=9)
    other = planned_sequence(1)
    both = [drafting, other]
    drafting.drafts.ngrams.chances = lambda limit: []
    other.draft_budget = 0.0
    assert planner.choose(both, both, 16, admits=False) == {}
    other.draft_budget = 1.5
    replay.drafter._read = 0
    assert set(planner.choose(both, both, 16, admits=False)) == {0}
