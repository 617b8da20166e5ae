"""A step under construction, and the record of a launched step that explains its result."""

from collections.abc import Callable
from dataclasses import dataclass, field

from localchat.backend_api.interface import (
    LogitsPosition,
    Mask,
    PaddedWidth,
    Sample,
    StepPlan,
    StepRow,
    Widths,
)
from localchat.core.sequence import Sequence


@dataclass(slots=True)
class ScheduledRow:
    """A row as launched."""

    sequence: Sequence
    start: int
    width: int
    """Known tokens; drafts are not counted."""
    drafts: tuple[int, ...]
    recomputed: int = 0
    """Of the known tokens, those that an earlier step computed already."""
    positions: list[int] = field(default_factory=list)
    """Indices of its sampled logits positions, in order."""
    forks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Choices that sample from its last known token, each with the index of its logits position."""
    prompt_positions: list[int] = field(default_factory=list)
    """Indices of the log probabilities of the prompt's own tokens."""

    @property
    def ahead(self) -> int:
        """Tokens of its sequence in the steps that were launched behind this one."""
        return self.sequence.launched - self.start - self.width

    def accepted(self, samples: dict[int, Sample]) -> list[Sample]:
        """The samples that count: drafts that were right, and the first sample that differs."""
        accepted: list[Sample] = []
        for place, position in enumerate(self.positions):
            sample = samples.get(position)
            if sample is None:
                break
            accepted.append(sample)
            if place < len(self.drafts) and sample.token != self.drafts[place]:
                break
        return accepted


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A launched step."""

    plan: StepPlan
    rows: tuple[ScheduledRow, ...]
    width: int
    """Tokens that it computes."""
    is_decode: bool
    """No prompt is in it, so its time shows what decode rows cost."""
    padded: PaddedWidth
    """The width that the runner gives it, if it has prompts."""

    drafting_s: float = 0.0
    """Time that the draft model took for the drafts."""

    @property
    def drafts(self) -> int:
        """Drafted tokens of all rows."""
        return sum(len(row.drafts) for row in self.rows)

    @property
    def recomputed(self) -> int:
        """Tokens that an earlier step computed already."""
        return sum(row.recomputed for row in self.rows)


class StepBuilder:
    """Collects the rows of one step under a token budget."""

    def __init__(self, budget: int, min_prompt_tokens: int = 1) -> None:
        """`min_prompt_tokens`: a prompt gets at least so many tokens of the budget, or none."""
        self.tokens_left = budget
        self.min_prompt_tokens = min(min_prompt_tokens, budget)
        self.rows: list[StepRow] = []
        self.scheduled_rows: list[ScheduledRow] = []
        self.positions: list[LogitsPosition] = []
        self.masks: list[Mask] = []
        self.drafts: dict[int, tuple[int, ...]] = {}
        """Of its decode rows, by number of the sequence."""
        self.width = 0
        """Tokens of its rows, drafts included."""
        self.decode_width = 0
        """Those of its decode rows."""
        self.is_decode = True
        self.preempted_any = False
        """A sequence was preempted for this step: the step admits nobody."""

    def fits_prompt(self, needs: int) -> bool:
        """Whether a prompt would get more than a scrap of the tokens left. `needs`: its tokens."""
        return 0 < min(self.min_prompt_tokens, needs) <= self.tokens_left

    def round_to_width(
        self, widths: Widths, max_tokens: int, affords: Callable[[PaddedWidth], bool]
    ) -> None:
        """Set the tokens left so that the step comes out at an unpadded width.

        Called before prompts take what is left. It is the widest of those that `affords` allows, or else the
        nearest; then the step grows by an eighth of the budget. `max_tokens` is the most in any case. Steps
        far wider than all listed widths are not padded.
        """
        decode = widths.padded(self.width, 0).decode
        target = decode + self.tokens_left
        sizes = widths.mixed if self.width else widths.prefill
        widest = max(sizes, default=0)
        if target > widest + widest // 8:
            return
        found = [size for size in sizes if decode < size <= max_tokens]
        for size in reversed(found):
            if affords(PaddedWidth(decode, size)):
                self.tokens_left = size - decode
                return
        near = [size for size in found if size <= target + target // 8]
        if near:
            self.tokens_left = min(near, key=lambda size: abs(size - target)) - decode

    def add_position(self, position: LogitsPosition) -> int:
        """Request the logits of a position. Returns its index in the step."""
        self.positions.append(position)
        return len(self.positions) - 1

    def add_masks(
        self,
        sequence: Sequence,
        positions: list[int],
        drafts: tuple[int, ...] = (),
        *,
        generated: int = 0,
    ) -> None:
        """Add the token masks of a sequence's positions. Those of a grammar are computed while the step runs.

        generated: tokens of its answer before the first position.
        """
        if sequence.grammar_matcher is not None:
            masks = sequence.grammar_matcher.masks(drafts)
            self.masks += [Mask(at, words) for at, words in zip(positions, masks, strict=True)]
        elif sequence.end_ban is not None:
            for count, position in enumerate(positions, generated):
                words = sequence.end_ban.mask(count)
                if words is not None:
                    self.masks.append(Mask(position, words))

    def add_prompt_logprobs(self, scheduled: ScheduledRow, row: int) -> None:
        """Request the missing log probabilities of a row's prompt tokens, where they were asked."""
        sequence = scheduled.sequence
        request_state = sequence.request_state
        request = request_state.request
        top = request.prompt_logprobs
        if top is None or sequence is not request_state.sequences[0]:
            return
        for position in range(scheduled.start, scheduled.start + scheduled.width):
            first = request.prompt_logprobs_from + len(request_state.prompt_logprobs)
            if first <= position < request_state.prompt_tokens - 1:
                token = request_state.tokens[position + 1]
                offset = position - scheduled.start
                logits_position = LogitsPosition(
                    row, offset, sequence.number, "prompt", token, top, request_state.wants_all
                )
                scheduled.prompt_positions.append(self.add_position(logits_position))

    def add(self, row: StepRow, scheduled: ScheduledRow, *, is_decode: bool) -> None:
        """Append a row and charge it to the budget."""
        self.rows.append(row)
        self.scheduled_rows.append(scheduled)
        width = scheduled.width + len(scheduled.drafts)
        self.width += width
        self.tokens_left -= width
        self.decode_width += width if is_decode else 0
        self.is_decode = self.is_decode and is_decode
