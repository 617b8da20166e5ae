"""Choices for a conversation that outgrows the context, each with its cost.

Nothing is cut silently. If an engine raises ContextExceeded, the front end shows these choices, and the
conversation's policy stores the user's choice. Whole exchanges are left out, the oldest first. Many are left
out at once, because each time the prompt moves and misses the prefix cache.
"""

from bisect import bisect_left
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from localchat.chat.compaction import Compaction
from localchat.chat.conversation import Conversation, Policy
from localchat.chat.prompt_messages import (
    Count,
    Exchange,
    as_sent,
    exchanges,
    left_out,
    sent_nodes,
)
from localchat.chat.prompt_steps import prompt_steps
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import Message, Messages, ReasoningChoice
from localchat.errors import ContextExceeded, LocalchatError, UsageError
from localchat.fit.steps import StepName
from localchat.units import counted, tokens

Action: TypeAlias = Literal["leave_out_oldest", "compact", "longer_context"]
_LOADS: Final[tuple[StepName, ...]] = ("context", "kv_type")
"""Steps that load the model again, in order of their cost."""
_LOAD_LABELS: Final[dict[StepName, str]] = {
    "context": "load a context of {change}",
    "kv_type": "load again with the {change}",
}
_UNKNOWN_TOKENS: Final = 1 << 40
"""Length of a prompt that is too long to count."""


def counter(engine: Engine) -> Count:
    """Return a counter that uses the engine's template and tokenizer."""

    def count(messages: Messages) -> int:
        try:
            return len(engine.prompt_tokens(messages))
        except ContextExceeded as problem:
            prompt_tokens = problem.details.get("prompt_tokens")
            if isinstance(prompt_tokens, int):
                return prompt_tokens
            return _UNKNOWN_TOKENS

    return count


def reserve_tokens(context_tokens: int, max_tokens: int | None = None) -> int:
    """Return the tokens to keep free for the answer and the next questions.

    A quarter of the context, or more if a longer answer is allowed, but at most half.
    """
    return max(context_tokens // 4, min(max_tokens or 0, context_tokens // 2))


class LeaveOutPlan(NamedTuple):
    """Messages to leave out so that the prompt fits."""

    nodes: tuple[str, ...]
    """Ids of the messages, without those left out before."""
    messages: int
    """Number of messages not sent, with those left out before."""
    tokens: int
    """Tokens of the messages not sent."""
    prompt_tokens: int
    """Tokens of the remaining prompt."""


class OverflowChoice(NamedTuple):
    """Choice that makes room."""

    action: Action
    label: str
    """Sentence with the cost."""
    tokens: int
    """Tokens not sent, read for a summary, or of the longer context."""
    settings: tuple[tuple[str, str], ...] = ()
    """Settings of another load: keys and values."""
    flags: str = ""
    """Command-line flags for the same settings."""


class Overflow(NamedTuple):
    """A conversation that does not fit the context."""

    prompt_tokens: int
    context_tokens: int
    leave_out: LeaveOutPlan | None
    """Messages to leave out. None if the last question alone is too long."""
    choices: tuple[OverflowChoice, ...]

    @property
    def notice(self) -> str:
        """The sentence as a notice."""
        return f"{self.sentence[0].upper()}{self.sentence[1:]}."

    @property
    def sentence(self) -> str:
        """Sentence for the user, with both token counts."""
        alone = ""
        if self.leave_out is None:
            alone = "; the last question alone is too long"
        return (
            f"the conversation has {tokens(self.prompt_tokens)} and the context holds "
            f"{self.context_tokens:,}; nothing was sent{alone}"
        )


def examine(
    conversation: Conversation,
    count: Count,
    info: EngineInfo,
    *,
    max_tokens: int | None = None,
    thinking: ReasoningChoice = "auto",
    refusal: ContextExceeded | None = None,
) -> Overflow:
    """Find the choices for a conversation whose next prompt is too long.

    `refusal` is the engine's error. It knows the context if the `info` of a remote engine does not. Raises
    what `count` raises; UsageError if the length of the context is unknown.
    """
    refused_context = _context_of(refusal)
    if refused_context > 0:
        info = msgspec.structs.replace(info, context_tokens=refused_context)
    if info.context_tokens < 1:
        raise UsageError("the length of the context is unknown: the server does not report it")
    reserve = reserve_tokens(info.context_tokens, max_tokens)
    search = LeaveOutSearch(conversation, count, thinking)
    prompt_tokens = search.measured(0)
    if refusal is not None and prompt_tokens < info.context_tokens:
        raise UsageError("the engine refused the conversation, but by its own numbers it fits")
    plan = search.plan(info.context_tokens - reserve)
    if plan is None:
        # Without the reserve, at least one token can be generated.
        plan = search.plan(info.context_tokens - 1)
    choices = tuple(_choices(search, prompt_tokens, plan, info))
    return Overflow(prompt_tokens, info.context_tokens, plan, choices)


def _context_of(refusal: ContextExceeded | None) -> int:
    """Return the context in tokens that an engine's error reports. 0 if unknown."""
    if refusal is None:
        return 0
    context_tokens = refusal.details.get("context_tokens")
    if not isinstance(context_tokens, int):
        return 0
    return context_tokens


def known_context(info: EngineInfo, overflow: Overflow | None) -> int:
    """Return the smaller of the reported context and the one of the last refusal.

    0 if both are unknown: a remote server may not know its own context.
    """
    contexts = [info.context_tokens]
    if overflow is not None:
        contexts.append(overflow.context_tokens)
    return min((context for context in contexts if context > 0), default=0)


def leave_out(conversation: Conversation, plan: LeaveOutPlan) -> None:
    """Apply a plan, and leave out the oldest again whenever the conversation outgrows the context."""
    nodes = (*conversation.policy.left_out, *plan.nodes)
    conversation.policy = Policy("leave_out_oldest", nodes, plan.tokens)


def unsent_sentence(messages: int, unsent_tokens: int) -> str:
    """Return `14 messages, 6,210 tokens not sent`."""
    return f"{counted(messages, 'message')}, {tokens(unsent_tokens)} not sent"


class LeaveOutSearch:
    """Searches for the number of exchanges to leave out. Counts each candidate once."""

    def __init__(
        self, conversation: Conversation, count: Count, thinking: ReasoningChoice = "auto"
    ) -> None:
        self._conversation = conversation
        self._count = count
        self._thinking = thinking
        self._left_out = left_out(conversation)
        self.exchanges: tuple[Exchange, ...] = exchanges(sent_nodes(conversation))
        self._counts: dict[int, int] = {}

    @property
    def max_dropped(self) -> int:
        """Number of exchanges that can be left out: all but the last."""
        return max(len(self.exchanges) - 1, 0)

    def measured(self, dropped: int) -> int:
        """Return the tokens of the prompt without the oldest `dropped` exchanges."""
        if dropped not in self._counts:
            nodes = tuple(node for exchange in self.exchanges[dropped:] for node in exchange)
            self._counts[dropped] = self._counted(as_sent(self._conversation, nodes))
        return self._counts[dropped]

    def _counted(self, messages: tuple[Message, ...]) -> int:
        return self._count(Messages(messages, thinking=self._thinking))

    def can_be_summarized(self, context_tokens: int) -> bool:
        """Whether there is something to summarize, and the context has room for the request."""
        try:
            Compaction(self._conversation, self._count, context_tokens)
        except (ContextExceeded, UsageError):
            return False
        return True

    def plan(self, allowed: int) -> LeaveOutPlan | None:
        """Plan to leave out as few of the oldest exchanges as `allowed` tokens permit.

        Instructions, a summary and the last question always stay. Returns None if they alone are too long, and
        an empty plan if everything fits. Raises what `count` raises.
        """
        dropped = bisect_left(
            range(self.max_dropped + 1), True, key=lambda number: self.measured(number) <= allowed
        )
        if dropped > self.max_dropped:
            return None
        nodes = [node for exchange in self.exchanges[:dropped] for node in exchange]
        all_tokens = self.measured(0)
        if self._left_out:
            all_tokens = self._all_tokens()
        return LeaveOutPlan(
            tuple(node.id for node in nodes),
            len(nodes) + len(self._left_out),
            max(all_tokens - self.measured(dropped), 0),
            self.measured(dropped),
        )

    def _all_tokens(self) -> int:
        sent = (node for exchange in self.exchanges for node in exchange)
        return self._counted(as_sent(self._conversation, (*self._left_out, *sent)))


def _choices(
    search: LeaveOutSearch, prompt_tokens: int, plan: LeaveOutPlan | None, info: EngineInfo
) -> list[OverflowChoice]:
    choices: list[OverflowChoice] = []
    if plan is not None and plan.nodes:
        number = len(plan.nodes)
        oldest = f"{number:,} messages"
        if number == 1:
            oldest = "message"
        label = f"leave out the oldest {oldest} ({tokens(plan.tokens)} not sent)"
        choices.append(OverflowChoice("leave_out_oldest", label, plan.tokens))
    # Without a plan, the last question alone is too long, and a summary cannot change that.
    if plan is not None and search.can_be_summarized(info.context_tokens):
        read = max(prompt_tokens - search.measured(search.max_dropped), 0)
        label = f"let the model summarize the older part (it reads {tokens(read)})"
        choices.append(OverflowChoice("compact", label, read))
    # The memory of a remote server is not this user's to plan.
    if info.backend != "remote":
        longer = longer_context(prompt_tokens, info)
        if longer is not None:
            choices.append(longer)
    return choices


def longer_context(prompt_tokens: int, info: EngineInfo) -> OverflowChoice | None:
    """Return the cheapest load in which the conversation can double. None if no load makes room.

    Prefers the KV type in use to a smaller one.
    """
    steps = {step.name: step for step in prompt_steps(prompt_tokens, info, growth=prompt_tokens)}
    for name in _LOADS:
        step = steps.get(name)
        if step is not None and step.suffices:
            label = _LOAD_LABELS[name].format(change=step.change)
            context = int(dict(step.settings)["context_length"])
            return OverflowChoice("longer_context", label, context, step.settings, step.flag)
    return None


def leave_out_again(
    conversation: Conversation,
    engine: Engine,
    refusal: ContextExceeded,
    *,
    max_tokens: int | None = None,
    thinking: ReasoningChoice = "auto",
) -> LeaveOutPlan | None:
    """Leave out more of the oldest messages, and return the plan.

    Returns None if the policy does not allow that, if it does not help, or if the engine cannot count tokens.
    Report the refusal then. The context in `refusal` overrides that of the engine's `info`.
    """
    if conversation.policy.kind != "leave_out_oldest":
        return None
    try:
        context = _context_of(refusal) or engine.info().context_tokens
        search = LeaveOutSearch(conversation, counter(engine), thinking)
        plan = search.plan(context - reserve_tokens(context, max_tokens))
    except LocalchatError:
        return None
    if plan is None or not plan.nodes:
        return None
    leave_out(conversation, plan)
    return plan
