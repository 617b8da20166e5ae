"""A step as the loop remembers it: what was launched for whom, so that its result can be understood."""

from dataclasses import dataclass, field

from localchat.backend_api.interface import LogitsPosition, Mask, Sample, StepPlan, StepRow, Widths
from localchat.core.sequence import Sequence


@dataclass(slots=True)
class ScheduledRow:
    """A row as launched. `width`: known tokens, drafts not counted. `points`: numbers of its sampled points,
    in order; `forks`: choices that sample from its last known token, each with its point; `prompt_points`:
    log probabilities of the prompt's own tokens."""

    sequence: Sequence
    start: int
    width: int
    drafts: tuple[int, ...]
    points: list[int] = field(default_factory=list)
    forks: list[tuple[Sequence, int]] = field(default_factory=list)
    prompt_points: list[int] = field(default_factory=list)

    def accepted(self, samples: dict[int, Sample]) -> list[Sample]:
        """The sampled tokens that count: drafts that were right, and the first that was not theirs."""
        drawn: list[Sample] = []
        for place, point in enumerate(self.points):
            sample = samples.get(point)
            if sample is None:
                break
            drawn.append(sample)
            if place < len(self.drafts) and sample.token != self.drafts[place]:
                break
        return drawn


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A launched step of `width` tokens. `decoding`: no prompt in it, so its time teaches what rows cost."""

    plan: StepPlan
    rows: tuple[ScheduledRow, ...]
    width: int
    decoding: bool


class StepBuilder:
    """A step being planned. `left`: tokens of the budget; `least`: of them, that a prompt is given at least."""

    def __init__(self, budget: int, least: int = 1) -> None:
        self.left = budget
        self.least = min(least, budget)
        self.rows: list[StepRow] = []
        self.scheduled_rows: list[ScheduledRow] = []
        self.points: list[LogitsPosition] = []
        self.masks: list[Mask] = []
        self.decoding = True
        self.pad_to = 0
        self.preempted_any = False
        """Somebody was set back for this step: nobody is admitted by it."""

    @property
    def width(self) -> int:
        return sum(row.width for row in self.rows)

    def takes(self, needs: int) -> bool:
        """Whether a prompt that needs so many tokens gets more than a scrap of those left."""
        return 0 < min(self.least, needs) <= self.left

    def fill(self, widths: Widths, most: int) -> None:
        """Before prompts take what is left: let the whole come out at a width that the runner does not pad,
        the nearest. An eighth more than the budget at most, and `most` tokens. Steps far wider than all of
        these are not padded."""
        written = self.width
        own = next((size for size in widths.beside if written <= size), written)
        wanted = own + self.left
        sizes = widths.mixed if written else widths.prompts
        widest = max(sizes, default=0)
        if wanted > widest + widest // 8:
            return
        found = [size for size in sizes if own < size <= min(most, wanted + wanted // 8)]
        if found:
            self.left = min(found, key=lambda size: abs(size - wanted)) - own

    def point(self, point: LogitsPosition) -> int:
        """Want the logits at `point`; its number."""
        self.points.append(point)
        return len(self.points) - 1

    def mask(self, sequence: Sequence, points: list[int], drafts: tuple[int, ...] = ()) -> None:
        """Where a grammar binds the sequence: what may be sampled at its points, computed while the step
        runs."""
        if sequence.grammar_matcher is not None:
            masks = sequence.grammar_matcher.masks(drafts)
            self.masks += [Mask(point, words) for point, words in zip(points, masks, strict=True)]

    def want_prompt(self, scheduled_row: ScheduledRow, row: int) -> None:
        """Want the log probabilities of the prompt's own tokens in a row, where they were asked and are not
        known yet."""
        sequence = scheduled_row.sequence
        request_state = sequence.request_state
        top = request_state.request.prompt_logprobs
        if top is None or sequence is not request_state.sequences[0]:
            return
        for position in range(scheduled_row.start, scheduled_row.start + scheduled_row.width):
            if len(request_state.prompt_logprobs) < position + 1 < request_state.prompt_tokens:
                token = request_state.tokens[position + 1]
                offset = position - scheduled_row.start
                point = LogitsPosition(row, offset, sequence.number, "prompt", token, top)
                scheduled_row.prompt_points.append(self.point(point))

    def add(self, row: StepRow, scheduled_row: ScheduledRow, *, decoding: bool) -> None:
        self.rows.append(row)
        self.scheduled_rows.append(scheduled_row)
        self.left -= row.width
        self.decoding = self.decoding and decoding
