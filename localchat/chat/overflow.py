"""Choices for a conversation that outgrows the context, each with its cost.

Nothing is cut silently: when an engine raises ContextExceeded, the front end shows these choices, and the
conversation's policy keeps the one taken. Whole exchanges are left out, the oldest first, and many at once,
because each time the whole prompt moves and the prefix cache is lost.
"""

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from localchat.chat.conversation import Conversation, Policy
from localchat.chat.prompt_messages import Exchange, as_sent, exchanges, left_out, sent_nodes
from localchat.chat.prompt_steps import prompt_steps
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import Message, Messages, ReasoningChoice
from localchat.errors import ContextExceeded, UsageError
from localchat.fit.kv_types import smaller_kv_type
from localchat.fit.steps import MemoryStep
from localchat.units import size, tokens

Count: TypeAlias = Callable[[Messages], int]
"""Counts the tokens of a prompt. May raise ContextExceeded for one too long to count."""

Action: TypeAlias = Literal[
    "leave_out_oldest", "compact", "longer_context", "smaller_kv", "gpu_layers"
]
_BLOCK_TOKENS: Final = 1024
_FRAME_CHARACTERS: Final = 16
"""Rough length of a template's text around a message; only for estimates."""


def counter(engine: Engine) -> Count:
    """A counter with the engine's template and tokenizer."""
    return lambda messages: len(engine.prompt_tokens(messages))


def reserve_tokens(context_tokens: int, max_tokens: int | None = None) -> int:
    """Tokens kept free for the answer and the next questions: a quarter of the context.

    More where a longer answer is allowed, at most half.
    """
    return max(context_tokens // 4, min(max_tokens or 0, context_tokens // 2))


class LeaveOutPlan(NamedTuple):
    """Messages to leave out so that the prompt fits."""

    nodes: tuple[str, ...]
    """Their ids, without those left out before."""
    messages: int
    """Messages not sent then, with those left out before."""
    tokens: int
    """Tokens of those messages."""
    prompt_tokens: int
    """Tokens of the prompt that is left."""


class OverflowChoice(NamedTuple):
    """One thing to do about an overflow."""

    action: Action
    label: str
    """A sentence with its cost."""
    tokens: int
    """Tokens not sent, read for a summary, or of the longer context."""
    extra_bytes: int = 0
    """Memory; negative where some becomes free."""
    kv_type: str = ""
    """Of a smaller cache."""
    settings: tuple[tuple[str, str], ...] = ()
    """Of another load: keys and values."""
    flags: str = ""
    """The same on the command line."""


class Overflow(NamedTuple):
    """A conversation that does not fit the context."""

    prompt_tokens: int
    context_tokens: int
    leave_out: LeaveOutPlan | None
    """None where the last question alone is too long."""
    choices: tuple[OverflowChoice, ...]

    @property
    def notice(self) -> str:
        """Return the sentence as a notice."""
        return f"{self.sentence[0].upper()}{self.sentence[1:]}."

    @property
    def sentence(self) -> str:
        """A sentence for the user, with both numbers."""
        alone = "; the last question alone is too long" if self.leave_out is None else ""
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

    `refusal`: the engine's own, which knows the context where a remote engine's `info` does not. Raises what
    `count` raises, apart from ContextExceeded; UsageError where the length of the context is unknown.
    """
    known = refusal.details.get("context_tokens") if refusal is not None else None
    if isinstance(known, int) and known > 0:
        info = msgspec.structs.replace(info, context_tokens=known)
    if info.context_tokens < 1:
        raise UsageError("the length of the context is unknown: the server does not report it")
    reserve = reserve_tokens(info.context_tokens, max_tokens)
    search = _LeaveOutSearch(conversation, count, thinking)
    prompt = search.measured(0)
    if refusal is not None and prompt < info.context_tokens:
        raise UsageError("the engine refused the conversation, but by its own numbers it fits")
    plan = search.plan(info.context_tokens - reserve)
    # Without the reserve at least one token can be written.
    plan = plan or search.plan(info.context_tokens - 1)
    steps = prompt_steps(prompt, info)
    choices = (*_choices(search, prompt, plan, info), *_fewer_layers(steps))
    return Overflow(prompt, info.context_tokens, plan, choices)


def _fewer_layers(steps: tuple[MemoryStep, ...]) -> "Iterator[OverflowChoice]":
    """The choice to move layers off a full GPU, where that makes room."""
    for step in steps:
        if step.name == "gpu_layers" and step.can_be_taken:
            label = step.sentence(with_flag=False)
            settings, context = step.settings, int(dict(step.settings)["context_length"])
            yield OverflowChoice(
                "gpu_layers",
                label,
                context,
                -step.gained_bytes,
                settings=settings,
                flags=step.flag,
            )


def known_context(info: EngineInfo, overflow: Overflow | None) -> int:
    """The smaller of the context that the engine reports and the one it refused by; 0 where neither is known.

    A server on another machine may not know its own.
    """
    stated = (info.context_tokens, overflow.context_tokens if overflow is not None else 0)
    return min((each for each in stated if each > 0), default=0)


def plan_leave_out(
    conversation: Conversation,
    count: Count,
    context_tokens: int,
    reserve: int,
    *,
    thinking: ReasoningChoice = "auto",
) -> LeaveOutPlan | None:
    """The fewest of the oldest exchanges without which the prompt and `reserve` tokens fit.

    Instructions, a summary and the last question always stay; None where they alone are too long. An empty
    plan where everything fits. Raises what `count` raises, apart from ContextExceeded.
    """
    return _LeaveOutSearch(conversation, count, thinking).plan(context_tokens - reserve)


def leave_out(conversation: Conversation, plan: LeaveOutPlan) -> None:
    """Apply a plan, and leave out the oldest again whenever the conversation outgrows the context."""
    gone = (*conversation.policy.left_out, *plan.nodes)
    conversation.policy = Policy("leave_out_oldest", gone, plan.tokens)


def send_everything(conversation: Conversation) -> None:
    """Reset the policy: all messages are sent again."""
    conversation.policy = Policy()


def unsent_sentence(messages: int, unsent_tokens: int) -> str:
    """`14 messages, 6,210 tokens not sent`."""
    plural = "" if messages == 1 else "s"
    return f"{messages:,} message{plural}, {tokens(unsent_tokens)} not sent"


class _LeaveOutSearch:
    """Searches for the number of exchanges to drop; counts each candidate once."""

    def __init__(self, conversation: Conversation, count: Count, thinking: ReasoningChoice) -> None:
        self._conversation = conversation
        self._count = count
        self._thinking = thinking
        self._before = left_out(conversation)
        self.groups: tuple[Exchange, ...] = exchanges(sent_nodes(conversation))
        self._known: dict[int, int] = {}

    @property
    def most(self) -> int:
        """Exchanges that can go: all but the last."""
        return max(len(self.groups) - 1, 0)

    def measured(self, dropped: int) -> int:
        """Tokens of the prompt without the oldest `dropped` exchanges."""
        if dropped not in self._known:
            nodes = tuple(node for group in self.groups[dropped:] for node in group)
            self._known[dropped] = self._counted(as_sent(self._conversation, nodes))
        return self._known[dropped]

    def _counted(self, messages: tuple[Message, ...]) -> int:
        try:
            return self._count(Messages(messages, thinking=self._thinking))
        except ContextExceeded as problem:
            known = problem.details.get("prompt_tokens")
            return known if isinstance(known, int) else 1 << 40

    def plan(self, allowed: int) -> LeaveOutPlan | None:
        """The smallest plan that leaves at most `allowed` tokens."""
        if self.measured(0) <= allowed:
            dropped = 0
        elif not self.most or self.measured(self.most) > allowed:
            return None
        else:
            dropped = self._smallest(allowed)
        nodes = [node for group in self.groups[:dropped] for node in group]
        everything = self._all_tokens() if self._before else self.measured(0)
        return LeaveOutPlan(
            tuple(node.id for node in nodes),
            len(nodes) + len(self._before),
            max(everything - self.measured(dropped), 0),
            self.measured(dropped),
        )

    def _all_tokens(self) -> int:
        nodes = (*self._before, *(node for group in self.groups for node in group))
        return self._counted(as_sent(self._conversation, nodes))

    def _smallest(self, allowed: int) -> int:
        """The smallest number that is enough. Guesses by characters, nearly always right or off by one, and
        bisects every third time."""
        low = 0
        high = self.most
        tries = 0
        while high - low > 1:
            tries += 1
            at = self._guess(low, high, allowed) if tries % 3 else (low + high) // 2
            low, high = (low, at) if self.measured(at) <= allowed else (at, high)
        return high

    def _guess(self, low: int, high: int, allowed: int) -> int:
        """Strictly between the two."""
        lengths = [
            sum(len(node.message.content) + _FRAME_CHARACTERS for node in group)
            for group in self.groups[low:high]
        ]
        span = max(self.measured(low) - self.measured(high), 1)
        excess = sum(lengths) * (self.measured(low) - allowed) / span
        at = low
        while excess > 0 and at < high:
            excess -= lengths[at - low]
            at += 1
        return min(max(at, low + 1), high - 1)


def _choices(
    search: _LeaveOutSearch, prompt: int, plan: LeaveOutPlan | None, info: EngineInfo
) -> "list[OverflowChoice]":
    found: list[OverflowChoice] = []
    if plan is not None and plan.nodes:
        number = len(plan.nodes)
        oldest = "message" if number == 1 else f"{number:,} messages"
        label = f"leave out the oldest {oldest} ({tokens(plan.tokens)} not sent)"
        found.append(OverflowChoice("leave_out_oldest", label, plan.tokens))
    # Without a plan the last question alone is too long, which no summary changes.
    if search.most and plan is not None:
        read = max(prompt - search.measured(search.most), 0)
        label = f"let the model summarize what came before (it reads {tokens(read)})"
        found.append(OverflowChoice("compact", label, read))
    # The memory of a remote server is not this user's to plan.
    if info.backend != "remote":
        found += memory_choices(prompt, info)
    return found


def memory_choices(prompt: int, info: EngineInfo) -> "list[OverflowChoice]":
    """A longer context, with the same and with a smaller KV cache, up to what the model was trained for.

    Costs are in proportion to the loaded cache, which holds for layers without a sliding window.
    """
    goal = -(-(prompt + _BLOCK_TOKENS) // _BLOCK_TOKENS) * _BLOCK_TOKENS
    goal = min(max(goal, info.context_tokens), info.context_train)
    if goal <= prompt:
        return []
    parts = info.actual or info.predicted
    kv_bytes = parts.kv_bytes if parts is not None and parts.kv_bytes > 0 else 0
    now = kv_bytes / max(info.context_tokens, 1)
    found = []
    goal = max(goal, _comfortable_context(now, info))
    extra = round(now * goal) - kv_bytes
    if goal > info.context_tokens:
        name = "the model's full context" if goal == info.context_train else "a context"
        label = f"{name} of {tokens(goal)}{_memory(extra, kv_bytes, info)}"
        found.append(
            OverflowChoice(
                "longer_context",
                label,
                goal,
                extra,
                settings=(("context_length", str(goal)),),
                flags=f"--ctx {goal}",
            )
        )
    if small := smaller_kv_type(info.kv_type, info.kv_types):
        extra = round(now * small.share * goal) - kv_bytes
        memory = _memory(extra, kv_bytes, info)
        label = f"the KV cache in {small.kv_type} and {tokens(goal)}{memory}"
        found.append(
            OverflowChoice(
                "smaller_kv",
                label,
                goal,
                extra,
                small.kv_type,
                (("context_length", str(goal)), ("kv_cache_type", small.kv_type)),
                f"--kv-type {small.kv_type} --ctx {goal}",
            )
        )
    return found


def _comfortable_context(token_bytes: float, info: EngineInfo) -> int:
    """Return the longest context that needs at most half of the free memory; 0 if that is unknown."""
    loaded = info.actual_bytes or info.predicted_bytes
    if not token_bytes or not info.free_bytes or info.free_bytes <= loaded:
        return 0
    more_tokens = int((info.free_bytes - loaded) / 2 / token_bytes)
    longest = (info.context_tokens + more_tokens) // _BLOCK_TOKENS * _BLOCK_TOKENS
    return min(longest, info.context_train)


def _memory(extra: int, kv_bytes: int, info: EngineInfo) -> str:
    if not kv_bytes:
        return ""
    word = f"{size(extra)} more" if extra >= 0 else f"{size(-extra)} less"
    short = (
        info.free_bytes and (info.actual_bytes or info.predicted_bytes) + extra > info.free_bytes
    )
    return f" ({word} memory{', which does not fit now' if short else ''})"


def leave_out_by_policy(
    conversation: Conversation,
    engine: Engine,
    refusal: ContextExceeded,
    *,
    max_tokens: int | None = None,
    thinking: ReasoningChoice = "auto",
) -> LeaveOutPlan | None:
    """The plan by a policy of leaving out the oldest messages; None if it is another policy or does not help.

    `refusal` may know the context better than `info` of a remote engine does. Raises LocalchatError if the
    engine cannot count.
    """
    if conversation.policy.kind != "leave_out_oldest":
        return None
    known = refusal.details.get("context_tokens")
    context = (known if isinstance(known, int) else 0) or engine.info().context_tokens
    reserve = reserve_tokens(context, max_tokens)
    plan = plan_leave_out(conversation, counter(engine), context, reserve, thinking=thinking)
    return plan if plan is not None and plan.nodes else None
