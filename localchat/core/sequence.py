"""A sequence: one choice of a request on its way through the steps, and the state of its request.

There is no prefill phase and no decode phase. A sequence counts its tokens: *known* (on the CPU), *launched* (a
step that computes their KV was launched) and *computed* (that step returned). `unknown` tokens were sampled by
launched steps and are still on the device. Each step reduces the differences between these counts.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from localchat.backend_api.interface import Enter, SamplingParams
from localchat.backend_api.media import MediaSpan
from localchat.backend_api.sampling.reference import GREEDY_BELOW
from localchat.core.detokenizer import ChoiceOutput
from localchat.core.request_timer import RequestTimer
from localchat.core.scheduler.exact_chunks import TurnCuts
from localchat.core.spec_decode.sequence_drafts import SequenceDrafts
from localchat.core.structured_output.matcher import GrammarMatcher
from localchat.core.think_budget import ThinkBudget
from localchat.core.token_bans import EndBan
from localchat.engine.events import Limit, TokenLogprob
from localchat.engine.request import GenerateRequest

_AFTER_STATE_TOKENS = 4


class State(Enum):
    """State of a sequence in the scheduler."""

    WAITING = auto()
    FORKING = auto()
    """Later choice of a request, until its prompt is computed."""
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Choice of a request.

    Size: the scheduler, the KV cache and the output processor share the counters of a sequence.
    """

    number: int
    request_state: "RequestState"
    choice: int
    sampling: SamplingParams
    tokens: list[int]
    """Known tokens, prompt included."""
    limit: int
    """Token limit, prompt included."""
    output: ChoiceOutput
    grammar_matcher: GrammarMatcher | None = None
    think_budget: ThinkBudget | None = None
    end_ban: EndBan | None = None
    """Set if the answer has a minimum length and no grammar. A grammar applies the ban itself."""
    drafts: SequenceDrafts | None = None
    """Draft sources. None: the request has no drafts."""
    draft_budget: float = 0.0
    """Plain steps that the sequence may still lose to drafts of any sequence. Negative: it owes them."""
    state: State = State.WAITING
    launched: int = 0
    computed: int = 0
    unknown: int = 0
    steps_in_flight: int = 0
    """Launched steps with a row of this sequence that have not returned."""
    new_blocks: tuple[int, ...] = ()
    """Blocks to append to the block table with the next row."""
    new_window_blocks: tuple[int, ...] = ()
    """Blocks to append to the table of the windowed layers."""
    blocked: bool = False
    """The launched row will return without a result, so no row can follow it yet."""
    recomputed: int = 0
    """Known tokens that the next row computes again, because a rejected draft reset the state."""
    loaded_s: float = 0.0
    """Expected time.perf_counter() at which the prefix is copied from host memory."""
    was_preempted: bool = False
    exact_mode: bool = False
    """Steps have fixed shapes, and reused KV has the bits of a fresh computation."""
    exact: int = 0
    """Leading prompt tokens whose launched steps had fixed shapes, in exact mode."""
    state_lost: bool = False
    """A step without memory may have changed the state or emptied the slot. All tokens are computed
    again."""
    uncommitted: bool = False
    """The KV cache manager does not know the last computed tokens (decode runs)."""
    kv_invalid: bool = False
    """The KV may be wrong, so none of it is cached."""

    @property
    def priority(self) -> int:
        """Priority of the request. Higher goes first."""
        return self.request_state.request.priority

    @property
    def pending_forks(self) -> "list[Sequence]":
        """Choices that wait for this sequence to compute their prompt."""
        if self is not self.request_state.sequences[0]:
            return []
        return [
            sequence for sequence in self.request_state.sequences if sequence.state is State.FORKING
        ]

    def entry(self, slot: int) -> Enter:
        """Build the record that introduces this sequence to the runner."""
        prompt_tokens = self.request_state.prompt_tokens
        media = self.request_state.media
        return Enter(
            self.number,
            slot,
            tuple(self.tokens),
            prompt_tokens,
            self.sampling,
            media=media,
            adapters=self.request_state.adapters,
        )

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def virtual(self) -> int:
        """Known tokens, and sampled tokens that are still on the device."""
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
        """Whether a launched step verifies drafts. Its result shows how many were accepted."""
        return self.steps_in_flight > 0 and not self.in_prompt and self.needs <= 0

    @property
    def decodes(self) -> bool:
        """Whether the next row is a decode row: one new token, and those that are recomputed."""
        return not self.in_prompt and self.needs == 1 + self.recomputed

    @property
    def free_tokens(self) -> int | None:
        """Lower bound on how many upcoming tokens are sampled rather than forced. None: no bound."""
        if self.think_budget is None:
            return None
        return self.think_budget.left

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the sampled token decides what follows it."""
        return (
            self.grammar_matcher is None
            and self.think_budget is None
            and self.end_ban is None
            and self.sampling.top_logprobs < 0
        )

    @property
    def masked(self) -> bool:
        """Whether a mask restricts the next token."""
        if self.grammar_matcher is not None:
            return True
        generated = self.virtual - self.request_state.prompt_tokens
        return self.end_ban is not None and self.end_ban.mask(generated) is not None

    def may_sample(self) -> bool:
        """Return whether one more token may follow all virtual ones."""
        return len(self.tokens) + self.unknown < self.limit


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in the engine core.

    Size: every part of the core reads the request, and reports its progress here.
    """

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
    """Source of `max_tokens`."""
    media: tuple[MediaSpan, ...] = ()
    """Pictures and recordings in the prompt."""
    adapters: tuple[float, ...] = ()
    """Scale of each LoRA adapter. Empty: none applies."""
    sequences: list[Sequence] = field(default_factory=list)
    """Sequences by choice."""
    cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    why_missed: str = ""
    read_back: int = 0
    """Cached prompt tokens that were loaded from disk."""
    read_s: float = 0.0
    disk_exact: bool = False
    """KV loaded from disk has the bits of a fresh computation."""
    disk_missed: str = ""
    """Reason why less was loaded from disk than possible."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    all_logprobs_failed: bool = False
    """Writing the file of all log probabilities failed."""
    cuts: TurnCuts | None = None
    """Cuts of the prompt in exact mode. None: its chunks have a fixed length."""
    prefill_sent: int = -1
    """Prompt tokens in the last Prefill event."""
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def deterministic(self) -> bool:
        """Whether the same request must generate the same text: it has a seed or is greedy."""
        sampling = self.sampling
        takes_likeliest = sampling.top_k == 1 or sampling.top_p <= 0
        return self.seeded or takes_likeliest or sampling.temperature < GREEDY_BELOW

    @property
    def state_at(self) -> int:
        """Prompt position at which a model that cannot rewind saves its state.

        It lies a few tokens before the end. An identical prompt computes its last token again, and templates
        end a prompt with the start of an answer (an opened or empty thought) that later prompts omit.
        """
        early = self.prompt_tokens - _AFTER_STATE_TOKENS
        if early <= 0:
            return self.prompt_tokens
        return early

    def next_state_at(self, computed: int, interval: int) -> int:
        """Return the next position after `computed` tokens that saves a state, up to `state_at`.

        `interval`: tokens between the positions before `state_at`. 0 saves only at `state_at`.
        """
        if not interval:
            return self.state_at
        return min((computed // interval + 1) * interval, self.state_at)

    @property
    def prompt_logprobs_wanted(self) -> int:
        """Number of prompt tokens whose log probabilities are reported, if the request asks for them."""
        return max(self.prompt_tokens - 1 - self.request.prompt_logprobs_from, 0)

    @property
    def wants_all(self) -> bool:
        """Whether the log probabilities of all tokens are requested, and can be written."""
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
