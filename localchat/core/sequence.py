"""A sequence: one text on its way through the steps, and the request that it belongs to.

There is no prefill phase and no decode phase. A sequence counts its tokens: *known* (on the CPU),
*launched* (a step that computes their KV was launched), *computed* (that step came back). `unknown` tokens
were sampled by launched steps and are on the device only. A step brings the counts nearer to each other.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from localchat.backend_api.interface import Enter, SamplingParams
from localchat.core.detokenizer import ChoiceOutput
from localchat.core.request_timer import RequestTimer
from localchat.core.spec_decode.ngram_proposer import NgramProposer
from localchat.core.structured_output.matcher import GrammarMatcher
from localchat.engine.events import TokenLogprob
from localchat.engine.request import GenerateRequest


class State(Enum):
    """Where a sequence is. JOINING: a choice beyond the first, before its parent's prompt is computed."""

    WAITING = auto()
    FORKING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `limit`: tokens in all at most. `hit`: prompt tokens found in the cache at
    the last admission. `flights`: launched steps that have not come back and touch this sequence."""

    number: int
    request_state: "RequestState"
    choice: int
    sampling: SamplingParams
    tokens: list[int]
    limit: int
    output: ChoiceOutput
    grammar_matcher: GrammarMatcher | None = None
    proposer: NgramProposer | None = None
    state: State = State.WAITING
    launched: int = 0
    computed: int = 0
    unknown: int = 0
    steps_in_flight: int = 0
    new_blocks: tuple[int, ...] = ()
    draft_likely: bool = False
    """Depth 2: a draft is likely, so the next row waits until its token is known."""
    blocked: bool = False
    """Depth 2: its launched row will come back without a result, so nothing can follow it now."""
    was_preempted: bool = False
    """It ran before and was set back to the queue."""
    kv_invalid: bool = False
    """Its KV may be wrong: nothing of it is kept."""
    last_step: int = 0
    """Number of the last step that it was part of: who waited longest goes first."""

    @property
    def priority(self) -> int:
        """Of its request: higher goes first."""
        return self.request_state.request.priority

    @property
    def pending_forks(self) -> "list[Sequence]":
        """Choices that wait for this one to compute their prompt."""
        if self is not self.request_state.sequences[0]:
            return []
        return [one for one in self.request_state.sequences if one.state is State.FORKING]

    def entry(self, slot: int) -> Enter:
        """How the runner hears of it."""
        prompt_tokens = self.request_state.prompt_tokens
        return Enter(self.number, slot, tuple(self.tokens), prompt_tokens, self.sampling)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def virtual(self) -> int:
        """Known tokens and those that are sampled and still on the device."""
        return len(self.tokens) + self.unknown

    @property
    def needs(self) -> int:
        """Tokens whose computing has not been launched."""
        return self.virtual - self.launched

    @property
    def in_prompt(self) -> bool:
        """Whether part of the prompt is still to be launched."""
        return self.launched < self.request_state.prompt_tokens

    @property
    def is_text(self) -> bool:
        """Whether what it needs is to be read rather than written. Tokens that a grammar forced are written, as
        drafts are."""
        return self.in_prompt or (self.was_preempted and self.needs > 1)

    @property
    def writes(self) -> bool:
        """Whether it has begun to write."""
        return self.known > self.request_state.prompt_tokens

    def may_sample(self) -> bool:
        """Whether one more token is wanted behind all virtual ones."""
        return self.virtual < self.limit


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the loop. `tokens`: the prompt. `exact`: its steps keep to one class of row counts."""

    id: int
    request: GenerateRequest
    tokens: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    exact: bool
    timer: RequestTimer
    sequences: list[Sequence] = field(default_factory=list)
    cached: int = 0
    why_missed: str = ""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    prefill_sent: int = -1

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def ended(self) -> bool:
        return all(sequence.state is State.ENDED for sequence in self.sequences)

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.known - self.prompt_tokens for sequence in self.sequences)
