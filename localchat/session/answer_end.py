"""Notices below an answer that the loop guard ended, or that has no text."""

from typing import Final

import msgspec

from localchat.chat.answer_end import FREQUENCY_PENALTY, NO_TEXT
from localchat.chat.conversation import Node
from localchat.chat.prompt_messages import without_loop
from localchat.errors import UsageError
from localchat.session.blocks import END_PREFIX, Offer
from localchat.session.interface import Session

NOTICE_ID: Final = "notice/answer end"
_PENALTY: Final = f"{END_PREFIX}penalty"
_DROP: Final = f"{END_PREFIX}drop"
_GO_ON: Final = f"{END_PREFIX}go on"


def offer_ways_on(session: Session, node: Node) -> None:
    """Offer ways to continue after an answer that repeats itself."""
    if node.end is None or node.end.reason != "repetition":
        return
    offers = [Offer(f"answer again with a frequency penalty of {FREQUENCY_PENALTY}", _PENALTY)]
    if without_loop(node).content != node.message.content:
        offers.append(Offer("drop the repeats", _DROP))
    offers.append(Offer("go on", _GO_ON))
    text = "The model began to repeat itself. The repeats are not sent with your next message."
    session.notice(text, "warning", offers, NOTICE_ID)


def report_empty(session: Session, node: Node) -> None:
    """Show a notice if the model ended its answer without text and calls."""
    message = node.message
    if node.state == "whole" and not message.content.strip() and not message.tool_calls:
        session.notice(NO_TEXT, "warning")


async def take_way_on(session: Session, action: str) -> None:
    """Take an offer. Raises UsageError if the answer is no longer the last one."""
    node = session.last_answer()
    if node is None or node.end is None or node.id != session.conversation.head:
        raise UsageError("this offer is no longer open", hint="/regen answers again")
    session.view.remove(NOTICE_ID)
    if action == _PENALTY:
        change = session.prepare_change(None, {"frequency_penalty": str(FREQUENCY_PENALTY)})
        change.apply()
        await session.regenerate()
        return
    drop_repeats(session, node)
    if action == _GO_ON:
        await session.continue_answer()


def drop_repeats(session: Session, node: Node) -> Node:
    """Cut an answer before the first of its repeats. Returns the new node."""
    if node.end is None or node.end.repetition is None:
        return node
    end = msgspec.structs.replace(node.end, repetition=None)
    shorter = msgspec.structs.replace(node, message=without_loop(node), end=end)
    session.conversation.put(shorter)
    session.recorder.changed(shorter)
    session.show()
    return shorter
