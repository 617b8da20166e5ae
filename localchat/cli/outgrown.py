"""A conversation that outgrew the context, in words: what is offered, and what was chosen before."""

from collections.abc import Iterator

from localchat.chat.conversation import Conversation
from localchat.chat.overflow import (
    Choice,
    Overflow,
    counter,
    leave_out,
    reserve_tokens,
    unsent_sentence,
    what_to_leave_out,
)
from localchat.chat.prompt_messages import sent_messages
from localchat.cli.render_answer import Answer, Display, take
from localchat.cli.resolve import request_for
from localchat.config.settings import Settings
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Grammar, Messages
from localchat.errors import ContextExceeded, LocalchatError


def take_fitting(
    engine: Engine,
    conversation: Conversation,
    settings: Settings,
    display: Display,
    answer: Answer,
    form: Grammar | None = None,
) -> Answer:
    """Send the conversation and take the answer. Where it is too long and its policy leaves out the oldest
    messages, that is done and said. Raises what an engine raises."""
    try:
        return take(engine.generate(_request(conversation, settings, form)), display, answer)
    except ContextExceeded as refusal:
        if not _made_room(engine, conversation, settings, display, refusal):
            raise
    return take(engine.generate(_request(conversation, settings, form)), display, answer)


def offer_lines(overflow: Overflow) -> Iterator[str]:
    """What happened and what can be done, numbered."""
    yield f"localchat: {overflow.sentence}; the question is kept. Type a number, or go on otherwise:"
    for number, choice in enumerate(overflow.choices, start=1):
        yield f"  {number}. {choice.label}{_how(choice)}"
    yield "  or begin anew: /clear"


def _how(choice: Choice) -> str:
    """Choices that need another load name the flag; the conversation goes on there."""
    match choice.action:
        case "longer_context":
            return f": leave, then localchat -c --ctx {choice.tokens}"
        case "smaller_kv":
            return f": leave, then localchat -c --kv-type {choice.kv_type} --ctx {choice.tokens}"
        case _:
            return ""


def _request(
    conversation: Conversation, settings: Settings, form: Grammar | None
) -> GenerateRequest:
    prompt = Messages(sent_messages(conversation), thinking=settings.think)
    return request_for(settings, prompt, form)


def _made_room(
    engine: Engine,
    conversation: Conversation,
    settings: Settings,
    display: Display,
    refusal: ContextExceeded,
) -> bool:
    if conversation.policy.kind != "leave_out_oldest":
        return False
    context = refusal.details.get("context_tokens") or engine.info().context_tokens
    assert isinstance(context, int)
    try:
        cut = what_to_leave_out(
            conversation,
            counter(engine),
            context,
            reserve_tokens(context, settings.max_tokens),
            thinking=settings.think,
        )
    except LocalchatError:  # an engine that cannot count: its refusal stands
        return False
    if cut is None or not cut.nodes:
        return False
    leave_out(conversation, cut)
    display.terminal.insist(f"localchat: {unsent_sentence(cut.messages, cut.tokens)}", dim=True)
    return True
