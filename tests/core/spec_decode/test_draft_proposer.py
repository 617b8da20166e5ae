"""What a draft model costs or saves, replayed on a clock that only the replay moves."""

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from localchat.backend_api.drafter import Draft, DraftAsk
from localchat.backend_api.interface import Capabilities, SamplingParams
from localchat.core import sequence
from localchat.core.spec_decode import draft_planner
from localchat.core.spec_decode.draft_planner import DraftPlanner
from localchat.core.spec_decode.draft_proposer import WINDOW, DraftModel, DraftProposer
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.spec_decode.step_cost import CostModel

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

    def earliest(self, seq: int, length: int) -> int:
        return 0

    def ready(self, unread: Mapping[int, int]) -> bool:
        return True

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        (ask,) = asks
        end = ask.start + len(ask.tokens)
        read = end - max(self._read, ask.start)
        self._clock.now_s += read * self.prompt_token_s + self._begin_s * (read >= WINDOW)
        self._read = end
        found: list[int] = []
        while len(found) < ask.limit:
            found.append(self.guesses(end + len(found)))
            self._clock.now_s += self.token_s
            if not ask.goes_on(0.5):
                break
        return [Draft(tuple(found), (0.5,) * len(found))]


def _sequence(number: int) -> sequence.Sequence:
    unseeded = SimpleNamespace(seeded=False)
    plain = SimpleNamespace(number=number, recomputed=0, request_state=unseeded)
    return cast(sequence.Sequence, plain)


class Replay:
    """An engine's steps for one answer after another, by a table of costs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, token: float = 0.1, row: float = 0.15, begin: float = 0
    ) -> None:  # fmt: skip
        """token: time of a drafted token, row: of a further row of a step, begin: that which reading many
        tokens takes beside the time of each, in plain steps."""
        self.clock, self._row = Clock(), row
        monkeypatch.setattr(draft_planner, "time", self.clock)
        self.costs = CostModel()
        self.drafter = ReplayedDrafter(self.clock, token * PLAIN_S, begin * PLAIN_S)
        self.model = DraftModel(self.drafter, self.costs)
        can = Capabilities(1000, 1000, 1, 1, 512)
        self._planner = DraftPlanner(can, self.costs, None, self.model)
        self._random = random.Random(1)

    def answer(self, count: int, share: float) -> float:
        """Seconds of an answer of `count` tokens, `share` of which are guessed, over those of plain steps."""
        text = [self._random.randrange(1, 2**20) for _ in range(90 + count + 32)]
        right = [self._random.random() < share for _ in text]
        self.drafter.guesses = lambda place: text[place] if right[place] else 0
        proposer = DraftProposer(
            0, text[:90], SamplingParams(), self.model, NgramProposer(text[:90], self.costs)
        )
        self.drafter._read = 0
        started_s, at = self.clock.now_s, 90
        while at < 90 + count:
            draft = self._draft(proposer)
            seconds = PLAIN_S * (1 + self._row * len(draft))
            accepted = 0
            while accepted < len(draft) and draft[accepted] == text[at + accepted]:
                accepted += 1
            self.clock.now_s += seconds
            self.costs.observe(1 + len(draft), seconds)
            given = text[at : at + accepted + 1]
            proposer.advance(given, len(draft), 1 + len(draft), seconds)
            at += len(given)
        return (self.clock.now_s - started_s) / (count * PLAIN_S)

    def _draft(self, proposer: DraftProposer) -> tuple[int, ...]:
        """The draft of a step with this text alone, as the planner finds it."""
        one = _sequence(0)
        places = [draft_planner._DraftPlace(one, proposer, 16)]
        lengths, rate = self._planner._by_ngrams([one], places, 1, 16, 0)
        asked, count = self._planner._by_model([one], places, 1, 16, 0, rate)
        if count:
            return self._planner._draft(asked, 1, 0, count)[0]
        return draft_planner._taken(places, lengths).get(0, ())


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


def test_a_draft_model_that_cannot_save_time_is_never_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch, token=1.0)
    assert replay.answer(300, 1.0) == pytest.approx(1.0)
    assert not replay.model.drafted


def test_a_text_without_drafts_waits_for_a_draft_model_as_long_as_its_patience_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch)
    replay.answer(300, 1.0)
    can = Capabilities(1000, 1000, 2, 2, 512, depth=2)
    planner = DraftPlanner(can, replay.costs, None, replay.model)
    both = [_sequence(number) for number in (0, 1)]
    proposer = DraftProposer(
        0, [1] * 9, SamplingParams(), replay.model, NgramProposer([1] * 9, replay.costs)
    )
    places = [draft_planner._DraftPlace(both[0], proposer, 16)]
    assert planner._by_model(both, places, 2, 16, 0, 0.0) == ({}, 0)
    for _ in range(400):
        planner._patience.earn((0, 1))
    asked, count = planner._by_model(both, places, 2, 16, 0, 0.0)
    assert set(asked) == {0}
    assert count > 0
