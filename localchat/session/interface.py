"""The session as its helpers see it. ChatSession imports them, so they cannot import it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from localchat.chat.conversation import Conversation, Node
from localchat.engine.interface import Engine
from localchat.errors import LocalchatError
from localchat.session.blocks import Offer
from localchat.session.context import ModelSetup, SessionContext, SetupChange
from localchat.session.engine_status import EngineStatus
from localchat.session.outcome import Outcome, SummaryResult
from localchat.session.recorder import ConversationRecorder
from localchat.session.remarks import NoticeKind
from localchat.session.view import SessionView

# Imported late: only a prompt that is too long needs it.
if TYPE_CHECKING:
    from localchat.chat.overflow import Overflow


class Session(Protocol):
    """See ChatSession, which documents the methods."""

    context: SessionContext
    setup: ModelSetup
    conversation: Conversation
    recorder: ConversationRecorder
    status: EngineStatus
    view: SessionView
    overflow: "Overflow | None"

    async def engine(self) -> Engine: ...

    def show(self) -> None: ...

    def notice(
        self, text: str, kind: NoticeKind = ..., offers: Sequence[Offer] = ..., name: str = ...
    ) -> str: ...

    def show_error(self, problem: LocalchatError, offers: Sequence[Offer] = ...) -> str: ...

    def remark(self, sentence: str, kind: NoticeKind = ..., *, passing: bool = ...) -> None: ...

    def last_answer(self) -> Node | None: ...

    def set_instructions(self, text: str) -> None: ...

    def prepare_change(self, model_name: str | None, changes: Mapping[str, str]) -> SetupChange: ...

    async def regenerate(self) -> Outcome: ...

    async def continue_answer(self) -> None: ...

    async def compact(self) -> SummaryResult: ...
