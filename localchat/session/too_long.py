"""What a session does about a prompt that is too long: leaves messages out as before, or offers choices.

Imported when a prompt was too long: most conversations never need it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from localchat.chat.conversation import Conversation
from localchat.chat.overflow import (
    Overflow,
    OverflowChoice,
    counter,
    examine,
    leave_out,
    leave_out_by_policy,
)
from localchat.engine.interface import Engine
from localchat.errors import ContextExceeded, LocalchatError, UsageError
from localchat.session.blocks import OVERFLOW_PREFIX, Offer
from localchat.session.context import ModelSetup, SetupChange
from localchat.session.outcome import SummaryResult
from localchat.session.recorder import ConversationRecorder
from localchat.session.view import SessionView

NOTICE_ID: Final = "notice/too long"


class TooLongSession(Protocol):
    """The part of a session that is needed here."""

    conversation: Conversation
    setup: ModelSetup
    recorder: ConversationRecorder
    overflow: Overflow | None
    view: SessionView

    async def engine(self) -> Engine: ...

    def show(self) -> None: ...

    def notice(
        self,
        text: str,
        kind: Literal["info", "warning", "error"],
        offers: Sequence[Offer],
        name: str = "",
    ) -> str: ...

    def show_error(self, problem: LocalchatError, offers: Sequence[Offer]) -> str: ...

    async def compact(self) -> SummaryResult: ...

    def prepare_change(self, word: str | None, changes: Mapping[str, str]) -> SetupChange: ...


async def offer_choices(session: TooLongSession, problem: LocalchatError | None) -> Overflow | None:
    """Show how to make room for the question, which was not sent."""
    assert isinstance(problem, ContextExceeded)
    try:
        engine = await session.engine()
        info = await asyncio.to_thread(engine.info)
        found = await asyncio.to_thread(
            examine,
            session.conversation,
            counter(engine),
            info,
            max_tokens=session.setup.settings.max_tokens,
            thinking=session.setup.settings.think,
            refusal=problem,
        )
    except LocalchatError:  # the engine cannot count, or is gone: its own words must do
        session.show_error(problem, (Offer("a new conversation", "new"),))
        return None
    _show_choices(session, found)
    return found


def _show_choices(session: TooLongSession, found: Overflow) -> None:
    """Show the choices below everything else, in place of earlier ones."""
    offers = [Offer(choice.label, f"{OVERFLOW_PREFIX}{choice.action}") for choice in found.choices]
    offers.append(Offer("another model", "model"))
    session.notice(found.notice, "warning", offers, NOTICE_ID)


async def leave_out_again(session: TooLongSession, problem: LocalchatError | None) -> bool:
    """Leave out the oldest messages if the user chose that before. False if it does not help."""
    assert isinstance(problem, ContextExceeded)
    settings = session.setup.settings
    try:
        engine = await session.engine()
        cut = await asyncio.to_thread(
            leave_out_by_policy,
            session.conversation,
            engine,
            problem,
            max_tokens=settings.max_tokens,
            thinking=settings.think,
        )
    except LocalchatError:
        return False  # the notice that follows explains what is wrong
    if cut is None:
        return False
    leave_out(session.conversation, cut)
    session.recorder.changed()
    session.show()
    return True


async def apply_choice(session: TooLongSession, action: str) -> SummaryResult | None:
    """Make room as a notice offered. Raises LocalchatError."""
    choice = _choice(session.overflow, action)
    session.view.remove(NOTICE_ID)
    try:
        return await _apply(session, choice)
    except LocalchatError:
        assert session.overflow is not None
        _show_choices(session, session.overflow)
        raise


async def _apply(session: TooLongSession, choice: OverflowChoice) -> SummaryResult | None:
    match choice.action:
        case "leave_out_oldest":
            assert session.overflow is not None and session.overflow.leave_out is not None
            leave_out(session.conversation, session.overflow.leave_out)
            session.recorder.changed()
            session.show()
        case "compact":
            return await session.compact()
        case _:
            session.prepare_change(None, dict(choice.settings)).apply()
    return None


def _choice(overflow: Overflow | None, action: str) -> OverflowChoice:
    name = action.removeprefix(OVERFLOW_PREFIX)
    for choice in overflow.choices if overflow else ():
        if choice.action == name:
            return choice
    raise UsageError("this offer is no longer open", hint="send the question again")
