"""A step under construction, and the record of a launched step that explains its result."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

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


class ScheduledRow(msgspec.Struct):
    """A row as launched."""

    sequence: Sequence
    start: int
    width: int
    """Known tokens, without drafts."""
    drafts: tuple[int, ...]
    recomputed: int = 0
    """Known tokens that an earlier step computed already."""
    positions: list[int] = []
    """Indices of the sampled logits positions, in order."""
    is_plain: bool = False
    """A decode row of which nothing but the sampled token decides what follows."""
    forks: list[tuple[Sequence, int]] = []
    """Choices that sample from the last known token, with the indices of their logits."""
    prompt_positions: list[int] = []
    """Indices of the log probabilities of prompt tokens."""

    @property
    def ahead(self) -> int:
        """Tokens of the sequence in steps that were launched after this one."""
        return self.sequence.launched - self.start - self.width

    def accepted(self, samples: dict[int, Sample]) -> list[Sample]:
        """Return the accepted samples: the correct drafts, and the first sample that differs."""
        accepted: list[Sample] = []
        for index, position in enumerate(self.positions):
            sample = samples.get(position)
            if sample is None:
                break
            accepted.append(sample)
            if index < len(self.drafts) and sample.token != self.drafts[index]:
                break
        return accepted


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A launched step."""

    plan: StepPlan
    rows: tuple[ScheduledRow, ...]
    width: int
    """Tokens that the step computes."""
    is_decode: bool
    """The step has no prompt, so its time measures the cost of decode rows."""
    padded: PaddedWidth
    """Width to which the runner pads the step, if it has prompts."""

    drafting_s: float = 0.0
    """Time that the draft model took for the drafts."""
    request_ids: frozenset[int] = frozenset()
    """Requests with rows in the step."""

    def unmoved_rows(self) -> tuple[ScheduledRow, ...]:
        """Return the rows as launched, if they are those of an earlier step."""
        moved = self.plan.moved
        if not moved:
            return self.rows
        return tuple(replace(row, start=row.start + moved) for row in self.rows)

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
        """`min_prompt_tokens`: smallest share of a prompt, unless it gets none."""
        self.tokens_left = budget
        self.min_prompt_tokens = min(min_prompt_tokens, budget)
        self.rows: list[StepRow] = []
        self.scheduled_rows: list[ScheduledRow] = []
        self.positions: list[LogitsPosition] = []
        self.masks: list[Mask] = []
        self.drafts: dict[int, tuple[int, ...]] = {}
        """Drafts of the decode rows by number of the sequence."""
        self.width = 0
        """Tokens of all rows, drafts included."""
        self.decode_width = 0
        """Tokens of the decode rows, drafts included."""
        self.is_decode = True
        self.preempted_any = False
        """A sequence was preempted for this step, so the step admits none."""

    def fits_prompt(self, needs: int) -> bool:
        """Return whether a prompt of `needs` tokens gets a useful share of the budget."""
        return 0 < min(self.min_prompt_tokens, needs) <= self.tokens_left

    def round_to_width(
        self, widths: Widths, max_tokens: int, affords: Callable[[PaddedWidth], bool]
    ) -> None:
        """Set the tokens left so that the step ends at an unpadded width. Called before prompts are added.

        Chooses the widest width that `affords` allows, or else the nearest one, for which the step may grow by
        an eighth of the budget. `max_tokens`: absolute limit. Steps far wider than all listed widths are not
        padded.
        """
        decode = widths.padded(self.width, 0).decode
        target = decode + self.tokens_left
        sizes = widths.mixed if self.width else widths.prefill
        widest = max(sizes, default=0)
        if target > widest + widest // 8:
            return
        candidates = [size for size in sizes if decode < size <= max_tokens]
        for size in reversed(candidates):
            if affords(PaddedWidth(decode, size)):
                self.tokens_left = size - decode
                return
        near = [size for size in candidates if size <= target + target // 8]
        if near:
            self.tokens_left = min(near, key=lambda size: abs(size - target)) - decode

    def add_position(self, position: LogitsPosition) -> int:
        """Request the logits of a position. Return its index in the step."""
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
        """Add the token masks of a sequence's positions. Masks of a grammar are computed while the step runs.

        `generated`: tokens of the answer before the first position.
        """
        if sequence.grammar_matcher is not None:
            masks = sequence.grammar_matcher.masks(drafts)
            self.masks += [
                Mask(position, words) for position, words in zip(positions, masks, strict=True)
            ]
        elif sequence.end_ban is not None:
            for count, position in enumerate(positions, generated):
                words = sequence.end_ban.mask(count)
                if words is not None:
                    self.masks.append(Mask(position, words))

    def add_prompt_logprobs(self, scheduled: ScheduledRow, row: int) -> None:
        """Request the missing log probabilities of a row's prompt tokens, if the request needs them."""
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
        if is_decode:
            self.decode_width += width
        self.is_decode = self.is_decode and is_decode
