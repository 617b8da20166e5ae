"""Replays a text against a draft planner: no clock is read, so the figures are exact."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from localchat.backend_api.interface import Capabilities, PaddedWidth, SamplingParams, StepPlan
from localchat.core.detokenizer import ChoiceOutput
from localchat.core.scheduler.step_builder import ScheduledRow, ScheduledStep
from localchat.core.sequence import RequestState, State
from localchat.core.sequence import Sequence as CoreSequence
from localchat.core.spec_decode.draft_model import DraftModel
from localchat.core.spec_decode.draft_planner import DraftPlanner
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.spec_decode.step_cost import CostModel


def planned_sequence(number: int, drafts: SequenceDrafts | None = None, known: int = 9) -> Any:
    """A sequence that decodes, with as much of its request as a planner reads."""
    state = SimpleNamespace(prompt_tokens=1, sequences=[None], seeded=False)
    sequence = CoreSequence(
        number,
        cast(RequestState, state),
        0,
        SamplingParams(),
        [1] * known,
        1 << 20,
        cast(ChoiceOutput, None),
        drafts=drafts,
        state=State.RUNNING,
        launched=known - 1,
    )
    state.sequences[0] = sequence
    return sequence


class DraftReplay:
    """One sequence after another through one planner, as the engine core has them."""

    def __init__(
        self,
        cost: CostModel,
        model: DraftModel | None = None,
        *,
        max_draft: int = 31,
        **capabilities: Any,
    ) -> None:
        self._cost = cost
        can = Capabilities(4096, 4096, 64, 64, 512, **capabilities)
        self.planner = DraftPlanner(can, cost, None, model)
        self._model = model
        self._max_draft = max_draft
        self.sequence: CoreSequence = planned_sequence(0)

    @property
    def drafts(self) -> SequenceDrafts:
        """Drafts of the text."""
        assert self.sequence.drafts is not None
        return self.sequence.drafts

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin an answer to a prompt."""
        drafts = SequenceDrafts(NgramProposer(prompt), uses_model=self._model is not None)
        self.sequence = planned_sequence(self.sequence.number + 1, drafts)
        self.sequence.tokens = list(prompt)

    def propose(self, limit: int = 0) -> tuple[int, ...]:
        """The drafts of the next step."""
        sequence = self.sequence
        sequence.launched = sequence.known - 1
        drafts = self.planner.choose(
            [sequence], [sequence], 1 + (limit or self._max_draft), admits=False
        )
        return drafts.get(sequence.number, ())

    def advance(
        self, tokens: Sequence[int], drafted: tuple[int, ...] = (), seconds: float = 0.0
    ) -> None:
        """Let the step return these tokens."""
        sequence = self.sequence
        row = ScheduledRow(sequence, sequence.launched, 1, drafted)
        step = ScheduledStep(
            cast(StepPlan, None),
            (row,),
            1 + len(drafted),
            seconds > 0,
            PaddedWidth(0, 0),
            self.planner.drafting_s if drafted else 0.0,
        )
        sequence.tokens.extend(tokens)
        self.planner.record(step, row, list(tokens), seconds)

    def step(
        self, text: Sequence[int], seconds_of: Callable[[int], float]
    ) -> tuple[int, int, float]:
        """Run a step of which `text` is what follows. Returns tokens drafted and accepted, and seconds."""
        drafted = self.propose()[: len(text)]
        accepted = 0
        while accepted < min(len(drafted), len(text) - 1) and drafted[accepted] == text[accepted]:
            accepted += 1
        seconds = seconds_of(1 + len(drafted))
        self._cost.observe(1 + len(drafted), seconds)
        self.advance(text[: accepted + 1], drafted, seconds)
        return len(drafted), accepted, seconds
