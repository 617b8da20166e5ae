"""Draft planner: chooses the drafts of a step for all its sequences together.

All of them wait for the step, so a draft of one is worth what it brings beside what the others lose. Where a
runner takes two steps at once, a step with drafts has nothing behind it, and the one before it must have come
back: drafts are made only where they are expected to save more than the runner waits for them, and none of the
others loses more than a fiftieth of its speed (Patience). And where a runner prepares its steps, only those
have drafts that are prepared: launched kernel by kernel, one of them costs a GPU what ten others take.

A step has drafts of one source: by n-grams, each sequence as many as bring most, or by the draft model, all
sequences as many.

Requests with a seed or at temperature 0 have no proposer. A row has other last bits in a wider step, which
change a token every few hundred.
"""

import time
from typing import NamedTuple, TypeAlias

from localchat.backend_api.interface import Capabilities
from localchat.backend_api.prepared_steps import DecodeRow, PreparingRunner
from localchat.core.sequence import Sequence, State
from localchat.core.spec_decode.draft_credit import Patience
from localchat.core.spec_decode.draft_lengths import best_lengths, could_pay
from localchat.core.spec_decode.draft_proposer import (
    DraftedStep,
    DraftModel,
    DraftProposer,
    Proposer,
)
from localchat.core.spec_decode.step_cost import CostModel

_SLOW_STEP_S = 0.25
_DRAFTS_SLOW = 15
_DRAFTS_FAST = 31
"""Most drafts of a sequence, by the cost of a wide step: a CPU computes its tokens one after the other."""

Drafts: TypeAlias = dict[int, tuple[int, ...]]
"""By number of the sequence."""


class _DraftPlace(NamedTuple):
    """A decode row that may have drafts."""

    sequence: Sequence
    proposer: Proposer
    room: int
    """Most drafted tokens."""


class DraftPlanner:
    """Used by the engine core's thread alone."""

    def __init__(
        self,
        capabilities: Capabilities,
        cost: CostModel,
        preparing: PreparingRunner | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`preparing`: the runner, if it prepares its steps."""
        self._can = capabilities
        self._cost = cost
        self._preparing = preparing
        self._draft_model = draft_model
        self.drafting_s = 0.0
        """Time that the draft model took for the last step."""
        self._ahead = capabilities.depth > 1
        self._rewinds = capabilities.rewind != "checkpoint"
        slow = capabilities.step_target_s >= _SLOW_STEP_S
        self._most_drafts = _DRAFTS_SLOW if slow else _DRAFTS_FAST
        self._waited: list[Proposer] = []
        """Whose drafts the runner waits for."""
        self._patience = Patience()
        self._looks_left_out = 0
        """How often drafts of several sequences are not looked for, as there were none the last time."""
        self._losses: dict[int, float] = {}
        """What the sequences lose by the drafts chosen last."""

    # ------------------------------------------------------------------------ before a step

    def waits(self, running: list[Sequence]) -> bool:
        """Whether the next step of a runner that is ahead waits for the tokens of the one in flight.

        Never while a prompt is computed: its steps are long enough.
        """
        if not self._ahead or not 0 < len(running) <= self._can.draft_rows:
            return False
        if any(one.in_prompt or one.needs > 1 for one in running):
            return False
        if any(one.verifies for one in running):
            return True  # those without drafts, too: half of the rows take as long as all of them
        if not any(one.steps_in_flight for one in running):
            return False
        # A grammar asks for the token in flight: left out of every other step, a text has half its speed.
        left_out = sum(one.grammar_matcher is not None and one.unknown > 0 for one in running)
        rows = len(running)
        cost = self._cost
        if left_out and rows * cost.wait_s < left_out / 2 * (cost.seconds(rows) + cost.wait_s):
            return True
        return self._worth_waiting([one for one in running if one.may_sample()])

    def _worth_waiting(self, following: list[Sequence]) -> bool:
        """Whether drafts that follow the tokens in flight are expected to pay for the wait.

        `following`: the sequences of the next step. The first token that a proposer expects is in flight.
        """
        places = self._places(following)
        cost = self._cost
        if not places or not cost.has_samples():
            return False
        rows = len(following)
        most = self._can.draft_step_tokens - rows
        asked, count = self._by_model(following, places, rows, most, 0, 0.0)
        if count and self._prepared(following, dict.fromkeys(asked, count)):
            return True
        if not could_pay(rows, cost, most, wait_s=cost.wait_s):
            return False
        lengths, _ = self._lengths(following, places, rows, most, in_flight=1)
        wanted = {
            place.sequence.number: length
            for place, length in zip(places, lengths, strict=True)
            if length
        }
        if not wanted or not self._prepared(following, wanted):
            return False
        self._waited = [place.proposer for place in places if place.sequence.number in wanted]
        return True

    # ------------------------------------------------------------------------ a step's drafts

    def choose(
        self, running: list[Sequence], ready: list[Sequence], tokens_left: int, *, admits: bool
    ) -> Drafts:
        """Drafts of a step that has room for `tokens_left`.

        `ready`: those of `running` that could be in the step; all that decode must go into it. `admits`: the
        step may begin another prompt.
        """
        waited = self._waited
        self._waited = []
        self.drafting_s = 0.0
        if len(running) > self._can.draft_rows:
            return {}
        decoding = [one for one in ready if one.decodes and one.state is State.RUNNING]
        apart = admits or len(decoding) < len(ready)
        if self._ahead and (apart or any(one.steps_in_flight for one in running)):
            drafts: Drafts = {}  # a prompt's steps are long, and a row that leaves one out waits twice
        else:
            drafts = self._drafts(decoding, waited, tokens_left)
        if drafts:
            self._patience.spend(self._losses)
        else:
            self._patience.earn(one.number for one in decoding)
        return drafts

    def _drafts(self, decoding: list[Sequence], waited: list[Proposer], tokens_left: int) -> Drafts:
        """Drafts of a step of these sequences. `waited`: whose drafts the runner waited for."""
        places = self._places([one for one in decoding if not one.unknown])
        rows = sum(one.needs for one in decoding)
        most = min(tokens_left, self._can.draft_step_tokens) - rows
        if not places or most <= 0:
            return {}
        again = sum(place.sequence.recomputed for place in places)
        lengths, rate = self._by_ngrams(decoding, places, rows, most, again)
        asked, count = self._by_model(decoding, places, rows, most, again, rate)
        if count and self._prepared(decoding, dict.fromkeys(asked, count)):
            self._losses = self._lost_to_model(decoding, asked, rows, count)
            return _allowed(places, self._draft(asked, rows, again, count))
        drafts = _allowed(places, _taken(places, lengths))
        if drafts and self._prepared(decoding, {at: len(each) for at, each in drafts.items()}):
            return drafts
        self._charge(waited, rows, self._cost)
        return {}

    def _places(self, sequences: list[Sequence]) -> list[_DraftPlace]:
        places: list[_DraftPlace] = []
        for one in sequences:
            # A fork begins with all that its parent has committed, which must be the prompt alone.
            if one.proposer is None or one.blocked or one.pending_forks:
                continue
            room = min(self._most_drafts, one.limit - one.virtual - 1)
            if one.free_tokens is not None:
                room = min(room, one.free_tokens - one.unknown - 1)
            if room > 0:
                places.append(_DraftPlace(one, one.proposer, room))
        return places

    def _by_ngrams(
        self, sequences: list[Sequence], places: list[_DraftPlace], rows: int, most: int, again: int
    ) -> tuple[list[int], float]:
        """The lengths with which all are expected to go on fastest, and their tokens a second; 0: none are."""
        cost = self._cost
        if not could_pay(rows, cost, most, again=again, wait_s=cost.wait_s):
            return [0] * len(places), 0.0
        return self._lengths(sequences, places, rows, most, again=again)

    def _by_model(
        self,
        sequences: list[Sequence],
        places: list[_DraftPlace],
        rows: int,
        most: int,
        again: int,
        rate: float,
    ) -> tuple[dict[int, DraftProposer], int]:
        """The sequences that the draft model is asked for, by their numbers, and how many tokens of each.

        None where plain steps, or n-grams at `rate` tokens a second, are expected to bring as much, or where
        others of the step would lose too much.
        """
        model = self._draft_model
        if model is None or not self._cost.has_samples():
            return {}, 0
        asked = {
            place.sequence.number: place.proposer
            for place in places
            if isinstance(place.proposer, DraftProposer)
        }
        if not asked:
            return {}, 0
        own_s = self._cost.seconds(rows) / max(rows - again, 1)
        unread = sum(one.unread(own_s) for one in asked.values())
        limit = min(place.room for place in places if place.sequence.number in asked)
        step = DraftedStep(rows, again, len(asked), min(limit, most // len(asked)), unread, rate)
        count = model.worth(step)
        if not count or not model.drafter.ready({at: one.behind for at, one in asked.items()}):
            return {}, 0
        bears = self._patience.bears(self._lost_to_model(sequences, asked, rows, count))
        return (asked, count) if bears else ({}, 0)

    def _lost_to_model(
        self, sequences: list[Sequence], asked: dict[int, DraftProposer], rows: int, count: int
    ) -> dict[int, float]:
        """What sequences that the draft model is not asked for lose by its drafts."""
        model = self._draft_model
        if model is None or not self._ahead:
            return {}
        drafted_s = count * model.token_s_of(len(asked))
        lost = self._longer(rows, count * len(asked)) + drafted_s / self._cost.seconds(rows)
        return {one.number: lost for one in sequences if one.number not in asked}

    def _draft(self, asked: dict[int, DraftProposer], rows: int, again: int, count: int) -> Drafts:
        """Drafts of the draft model. Notes what they took."""
        model = self._draft_model
        assert model is not None
        read = sum(one.behind for one in asked.values())
        asks = [one.ask(rows, again, count) for one in asked.values()]
        started_s = time.perf_counter()
        drafts = model.drafter.draft(asks)
        self.drafting_s = seconds = time.perf_counter() - started_s
        lengths = [len(draft.tokens) for draft in drafts]
        drafted = max(lengths) if model.drafter.together else sum(lengths)
        model.observe(read, drafted, seconds)
        return {
            number: proposer.answer(draft, seconds, seconds / len(drafts))
            for (number, proposer), draft in zip(asked.items(), drafts, strict=True)
        }

    def _lengths(
        self,
        sequences: list[Sequence],
        places: list[_DraftPlace],
        rows: int,
        most: int,
        *,
        again: int = 0,
        in_flight: int = 0,
    ) -> tuple[list[int], float]:
        """Length of each place's draft in a step of `sequences`, and their tokens a second; 0: none have one.

        `in_flight`: tokens that come before it."""
        none: tuple[list[int], float] = ([0] * len(places), 0.0)
        cost = self._cost
        spares = self._ahead
        if spares and self._looks_left_out:
            self._looks_left_out -= 1
            return none
        chances = self._chances(sequences, places, rows, most, in_flight, spares=spares)
        if spares:
            most = self._most_borne(sequences, places, chances, rows, most)
        if most <= 0 or not any(chances):
            self._looks_left_out = len(places) - 1 if spares else 0
            return none
        lengths, rate = best_lengths(
            chances,
            rows,
            cost,
            most,
            again=again,
            rewinds=self._rewinds,
            wait_s=cost.wait_s,
            fair=spares,
        )
        if not any(lengths):
            self._looks_left_out = len(places) - 1 if spares else 0
            return none
        self._losses = {}
        if not spares:
            return lengths, rate
        self._losses = dict.fromkeys(
            (one.number for one in sequences), self._longer(rows, sum(lengths))
        )
        for place, found, length in zip(places, chances, lengths, strict=True):
            self._losses[place.sequence.number] -= sum(found[:length])
        if self._patience.bears(self._losses):
            return (lengths, rate)
        return none

    def _chances(
        self,
        sequences: list[Sequence],
        places: list[_DraftPlace],
        rows: int,
        most: int,
        in_flight: int,
        *,
        spares: bool,
    ) -> list[list[float]]:
        """Chances of each place's tokens; none where a sequence that is out of patience has none.

        So most steps of several texts look for the drafts of one.
        """
        found: list[list[float]] = [[] for _ in places]
        least = self._longer(rows, 1) if spares else 0.0
        hurried = {one.number for one in sequences if self._patience.left(one.number) < least}
        if not hurried <= {place.sequence.number for place in places}:
            return found
        at_first = sorted(enumerate(places), key=lambda at: at[1].sequence.number not in hurried)
        for at, (sequence, proposer, room) in at_first:
            found[at] = proposer.chances(min(room, max(most, 0)) + in_flight)[in_flight:]
            if not found[at] and sequence.number in hurried:
                return [[] for _ in places]
        return found

    def _most_borne(
        self,
        sequences: list[Sequence],
        places: list[_DraftPlace],
        chances: list[list[float]],
        rows: int,
        most: int,
    ) -> int:
        """Most drafted tokens that those without a draft can wait for."""
        drafting = {
            place.sequence.number for place, found in zip(places, chances, strict=True) if found
        }
        waiting = (one.number for one in sequences if one.number not in drafting)
        left = min(map(self._patience.left, waiting), default=float("inf"))
        most = min(most, sum(map(len, chances)))
        while most > 0 and self._longer(rows, most) > left:
            most = self._cost.narrower(rows + most) - rows
        return most

    def _longer(self, rows: int, drafted: int) -> float:
        """How much longer a step takes with so many drafted tokens, in plain steps."""
        cost = self._cost
        return (cost.seconds(rows + drafted) + cost.wait_s) / cost.seconds(rows) - 1

    def _prepared(self, sequences: list[Sequence], lengths: dict[int, int]) -> bool:
        """Whether a step of these sequences is prepared. `lengths`: of the drafts."""
        if self._preparing is None:
            return True
        rows = [
            DecodeRow(one.number, one.launched, one.needs + lengths.get(one.number, 0))
            for one in sequences
        ]
        masked = any(sequence.masked for sequence in sequences)
        return self._preparing.prepared(rows, masked=masked)

    def _charge(self, waited: list[Proposer], rows: int, cost: CostModel) -> None:
        """Count a wait for drafts that were not made after all."""
        for proposer in waited:
            proposer.charge(rows * cost.wait_s / cost.seconds(rows) / len(waited))


def _taken(places: list[_DraftPlace], lengths: list[int]) -> Drafts:
    """Drafts by n-grams, of which the chances were asked."""
    return {
        place.sequence.number: place.proposer.take(length)
        for place, length in zip(places, lengths, strict=True)
        if length
    }


def _allowed(places: list[_DraftPlace], drafts: Drafts) -> Drafts:
    """The drafts up to where the grammars of their sequences allow them, none of them empty."""
    for sequence, _, _ in places:
        draft = drafts.get(sequence.number, ())
        if draft and sequence.grammar_matcher is not None:
            drafts[sequence.number] = sequence.grammar_matcher.allowed_drafts(draft)
    return {number: draft for number, draft in drafts.items() if draft}
