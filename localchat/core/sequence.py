"""A sequence: one choice of a request on its way through the steps, and the state of its request.

There is no prefill phase and no decode phase. A sequence counts its tokens: *known* (on the CPU),
*launched* (a step that computes their KV was launched) and *computed* (that step came back). `unknown`
tokens were sampled by launched steps and are still on the device only. Each step brings these counts nearer
to each other.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from localchat.backend_api.interface import Enter, SamplingParams
from localchat.backend_api.sampling.reference import GREEDY_BELOW
from localchat.core.detokenizer import ChoiceOutput
from localchat.core.request_timer import RequestTimer
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.structured_output.matcher import GrammarMatcher
from localchat.core.think_budget import ThinkBudget
from localchat.core.token_bans import EndBan
from localchat.engine.events import Limit, TokenLogprob
from localchat.engine.request import GenerateRequest

_AFTER_STATE_TOKENS = 4


class State(Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = auto()
    FORKING = auto()
    """A choice beyond the first, until its parent's prompt is computed."""
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request."""

    number: int
    request_state: "RequestState"
    choice: int
    sampling: SamplingParams
    tokens: list[int]
    """The known tokens, prompt included."""
    limit: int
    """Most tokens, prompt included."""
    output: ChoiceOutput
    grammar_matcher: GrammarMatcher | None = None
    think_budget: ThinkBudget | None = None
    end_ban: EndBan | None = None
    """Set if the answer has a minimum length and no grammar, which would apply the ban itself."""
    drafts: SequenceDrafts | None = None
    """None: the request has no drafts."""
    draft_budget: float = 0.0
    """Plain steps that the sequence may still lose to drafts, its own and those of others. Negative: it owes
    them."""
    state: State = State.WAITING
    launched: int = 0
    computed: int = 0
    unknown: int = 0
    steps_in_flight: int = 0
    """Launched steps that have a row of this sequence and have not come back."""
    new_blocks: tuple[int, ...] = ()
    """Blocks that the next row appends to the block table."""
    new_window_blocks: tuple[int, ...] = ()
    """The same of the windowed layers' table."""
    blocked: bool = False
    """Depth 2: its launched row will come back without a result, so nothing can follow it now."""
    recomputed: int = 0
    """Known tokens that the next row computes again, because a rejected draft took the state back."""
    loaded_s: float = 0.0
    """When its prefix is expected to have been copied from host memory, by time.perf_counter()."""
    was_preempted: bool = False
    exact_mode: bool = False
    """Its steps have fixed shapes, and it reuses only KV with the bits of a fresh computation."""
    exact: int = 0
    """In exact mode, leading prompt tokens whose launched steps had those shapes."""
    state_lost: bool = False
    """A step without memory may have changed its state in part, or left its slot empty: all of it is computed
    again."""
    kv_invalid: bool = False
    """Its KV may be wrong: none of it is kept."""
    last_step: int = 0
    """Number of the last step with a row of this sequence: who waited longest goes first."""

    @property
    def priority(self) -> int:
        """Priority of its request: higher goes first."""
        return self.request_state.request.priority

    @property
    def pending_forks(self) -> "list[Sequence]":
        """Choices that wait for this sequence to compute their prompt."""
        if self is not self.request_state.sequences[0]:
            return []
        return [one for one in self.request_state.sequences if one.state is State.FORKING]

    def entry(self, slot: int) -> Enter:
        """Build the record that introduces this sequence to the runner."""
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
        """Tokens whose computation has not been launched."""
        return len(self.tokens) + self.unknown - self.launched

    @property
    def in_prompt(self) -> bool:
        """Whether part of the prompt is still to be launched."""
        return self.launched < self.request_state.prompt_tokens

    @property
    def verifies(self) -> bool:
        """Whether a launched step verifies its drafts: how many of them count is known with its result."""
        return self.steps_in_flight > 0 and not self.in_prompt and self.needs <= 0

    @property
    def is_prefill(self) -> bool:
        """Whether its next tokens are prefill: the prompt, or what it had before a preemption.

        Tokens that a grammar forced count as decode, as drafts do.
        """
        return self.in_prompt or (self.was_preempted and self.needs > 1)

    @property
    def decodes(self) -> bool:
        """Whether its next row is a decode row: one token, and those that are computed again."""
        return not self.in_prompt and self.needs == 1 + self.recomputed

    @property
    def free_tokens(self) -> int | None:
        """Tokens after the known ones that the engine certainly does not replace by a forced one, at least.

        None: as many as there will be.
        """
        if self.think_budget is None:
            return None
        return self.think_budget.left

    @property
    def masked(self) -> bool:
        """Whether masks restrict its next token."""
        if self.grammar_matcher is not None:
            return True
        generated = self.virtual - self.request_state.prompt_tokens
        return self.end_ban is not None and self.end_ban.mask(generated) is not None

    def may_sample(self) -> bool:
        """Whether one more token is wanted after all virtual ones."""
        return len(self.tokens) + self.unknown < self.limit


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the engine core."""

    id: int
    request: GenerateRequest
    tokens: tuple[int, ...]
    """The prompt."""
    sampling: SamplingParams
    max_tokens: int
    seeded: bool
    """The request has a seed."""
    timer: RequestTimer
    limit: Limit = "context"
    """What `max_tokens` comes from."""
    sequences: list[Sequence] = field(default_factory=list)
    """One for each choice."""
    cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    why_missed: str = ""
    read_back: int = 0
    """Of the cached tokens those that the disk had."""
    read_s: float = 0.0
    disk_exact: bool = False
    """The KV read from disk has the bits of a fresh computation."""
    disk_missed: str = ""
    """Why the disk helped less than it could have."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    all_logprobs_failed: bool = False
    """The file of all log probabilities cannot be written."""
    prefill_sent: int = -1
    """Prompt tokens that the last Prefill event reported."""
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def deterministic(self) -> bool:
        """Whether the same request must give the same text: it has a seed or temperature 0."""
        return self.seeded or self.sampling.temperature < GREEDY_BELOW

    @property
    def state_at(self) -> int:
        """Prompt tokens after which the state of a model that cannot rewind is saved.

        A few before the end: an identical prompt computes its last token again, and templates end a prompt
        with the beginning of an answer (an opened or empty thought) that later prompts leave out.
        """
        early = self.prompt_tokens - _AFTER_STATE_TOKENS
        return early if early > 0 else self.prompt_tokens

    def next_state_at(self, computed: int, interval: int) -> int:
        """The first place after `computed` tokens where a state is saved; `state_at` where there is none.

        interval: tokens between such places before `state_at`; 0: there are none.
        """
        following = (computed // interval + 1) * interval if interval else self.state_at
        return min(following, self.state_at)

    @property
    def prompt_logprobs_wanted(self) -> int:
        """Prompt tokens whose log probabilities a request that wants them gets."""
        return max(self.prompt_tokens - 1 - self.request.prompt_logprobs_from, 0)

    @property
    def wants_all(self) -> bool:
        """Whether the log probabilities of all tokens are wanted, and can be written."""
        return bool(self.request.prompt_logprobs_file) and not self.all_logprobs_failed

    @property
    def ended(self) -> bool:
        return all(sequence.state is State.ENDED for sequence in self.sequences)

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.known - self.prompt_tokens for sequence in self.sequences)

    @property
    def reasoning_tokens(self) -> int:
        return sum(sequence.output.reasoning_tokens for sequence in self.sequences)
