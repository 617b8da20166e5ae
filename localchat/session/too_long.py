"""Makes room for a prompt that is too long: leaves out messages as before, or offers choices.

Imported only when a prompt is too long, because most conversations never need it.
"""

import asyncio
from typing import Final

from localchat.chat.overflow import (
    Overflow,
    OverflowChoice,
    counter,
    examine,
    leave_out,
    leave_out_again,
)
from localchat.errors import ContextExceeded, LocalchatError, UsageError
from localchat.session.blocks import OVERFLOW_PREFIX, Offer
from localchat.session.interface import Session

NOTICE_ID: Final = "notice/too long"


async def offer_choices(session: Session, problem: LocalchatError | None) -> Overflow | None:
    """Offer ways to make room for the question, which was not sent."""
    assert isinstance(problem, ContextExceeded)
    try:
        engine = await session.engine()
        info = await asyncio.to_thread(engine.info)
        overflow = await asyncio.to_thread(
            examine,
            session.conversation,
            counter(engine),
            info,
            max_tokens=session.setup.settings.max_tokens,
            thinking=session.setup.settings.think,
            refusal=problem,
        )
    except LocalchatError:
        # The engine cannot count tokens or has exited, so show its own error.
        session.show_error(problem, (Offer("a new conversation", "new"),))
        return None
    _show_choices(session, overflow)
    return overflow


def _show_choices(session: Session, overflow: Overflow) -> None:
    """Show the choices at the end of the conversation, instead of earlier ones."""
    offers = [
        Offer(choice.label, f"{OVERFLOW_PREFIX}{choice.action}") for choice in overflow.choices
    ]
    if not offers:
        offers.append(Offer("another model", "model"))
    session.notice(overflow.notice, "warning", offers, NOTICE_ID)


async def make_room_by_policy(session: Session, problem: LocalchatError | None) -> bool:
    """Leave out the oldest messages if the user chose that before. Return False if it does not help."""
    assert isinstance(problem, ContextExceeded)
    settings = session.setup.settings
    try:
        engine = await session.engine()
    except LocalchatError:
        return False  # The notice that follows shows the error.
    plan = await asyncio.to_thread(
        leave_out_again,
        session.conversation,
        engine,
        problem,
        max_tokens=settings.max_tokens,
        thinking=settings.think,
    )
    if plan is None:
        return False
    session.recorder.changed()
    session.show()
    return True


async def apply_choice(session: Session, action: str) -> None:
    """Make room by an offer of a notice, without sending. Raises LocalchatError."""
    choice = _choice(session.overflow, action)
    session.view.remove(NOTICE_ID)
    try:
        await _apply(session, choice)
    except LocalchatError:
        assert session.overflow is not None
        _show_choices(session, session.overflow)
        raise


async def _apply(session: Session, choice: OverflowChoice) -> None:
    match choice.action:
        case "leave_out_oldest":
            assert session.overflow is not None and session.overflow.leave_out is not None
            leave_out(session.conversation, session.overflow.leave_out)
            session.recorder.changed()
            session.show()
        case "compact":
            await session.compact()
        case _:
            session.prepare_change(None, dict(choice.settings)).apply()


def _choice(overflow: Overflow | None, action: str) -> OverflowChoice:
    name = action.removeprefix(OVERFLOW_PREFIX)
    if overflow:
        for choice in overflow.choices:
            if choice.action == name:
                return choice
    raise UsageError("this offer is no longer open", hint="send the question again")
