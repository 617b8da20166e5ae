"""The frame of the chat: what stands on it, and how it follows the session. What is done stands in chat.py."""

import asyncio
from functools import cached_property

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from localchat.chat.titles import title_for
from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.tui.blocks import NoticeBlock
from localchat.tui.chips import Written
from localchat.tui.keys import keys_of
from localchat.tui.screens.chat_page import TranscriptPage
from localchat.tui.screens.talk import Talk
from localchat.tui.session import Session
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.finder import Finder
from localchat.tui.widgets.panel import Panel
from localchat.tui.widgets.status import StatusLine
from localchat.tui.widgets.welcome import Welcome

_STATS_EVERY_S = 0.5
_HINT_S = 2.5


class ChatFrame(Screen[None]):
    """Draws; asks the session for figures and nothing else. `session` is handed in by the app. While a sent
    message is being changed, `_editing` names it, and what was written before is laid aside."""

    # The figures stand beside the conversation where that is wide, below it where there is room, and else in
    # its place: nobody can read half a line.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (76, "-middle"), (110, "-wide")]  # noqa: RUF012 - textual's own form
    AUTO_FOCUS = "#editor"

    def __init__(self) -> None:
        super().__init__()
        self.page = TranscriptPage(self)
        self.session: Session
        self._editing: str | None = None
        self._aside = Written()
        self._asking_stats = False
        self._hinting: Timer | None = None
        self._said: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        with Horizontal(id="heading"):
            yield Static("", id="title", markup=False)
            yield Static("", id="model", markup=False)
        with Horizontal(id="body"):
            with Vertical(id="talk"):
                yield Finder(id="finder")
                yield Welcome(id="welcome")
                yield Talk(id="transcript")
            yield Panel(self.session.live, id="panel")
        yield Static("", id="banner", markup=False)
        yield Composer(id="composer")
        yield StatusLine(self.session.live, id="status")

    def on_mount(self) -> None:
        self.set_interval(_STATS_EVERY_S, self._watch_stats)
        self.composer.hindered = lambda: self.session.busy
        self.figures_changed()

    @cached_property
    def transcript(self) -> Talk:
        return self.query_one(Talk)

    @cached_property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @cached_property
    def status(self) -> StatusLine:
        return self.query_one(StatusLine)

    @cached_property
    def panel(self) -> Panel:
        return self.query_one(Panel)

    # ------------------------------------------------------------------ what the session shows

    def figures_changed(self) -> None:
        """State, figures or title are other ones. Before the screen stands and after it, nothing is drawn."""
        if self._nodes._get_by_id("status") is None:  # `query` would look at every widget
            return
        session = self.session
        urgent = "Esc stops" if session.busy else self._hint_of_offers() or self._hint_of_rest()
        self.status.urgent = bool(urgent)
        self.status.hint = urgent or ("Esc closes" if self.is_covered else "^O figures  F1 help")
        self.status.changed()
        self.panel.changed()
        title = sanitize_line(title_for(session.conversation)) or "New conversation"
        self._say_once("#title", title)
        think = session.settled.settings.think
        thinking = "" if think == "auto" else f" · think {think}"
        self._say_once("#model", f"{sanitize_line(session.live.model)}{thinking}")

    def _hint_of_offers(self) -> str:
        blocks = self.transcript.blocks
        last = blocks[-1] if blocks else None
        if isinstance(last, NoticeBlock) and last.offers:
            return "Alt+1 takes it" if len(last.offers) == 1 else f"Alt+1…{len(last.offers)} choose"
        return ""

    def _hint_of_rest(self) -> str:
        conversation = self.session.conversation
        last = conversation.nodes.get(conversation.head or "")
        if last is None or last.message.role != "assistant" or last.state == "whole":
            return ""
        return f"{keys_of('chat.continue', self.session.workplace.keys)} goes on with it"

    def _say_once(self, where: str, text: str) -> None:
        if self._said.get(where) != text:
            self._said[where] = text
            self.query_one(where, Static).update(Content(text))

    @property
    def is_covered(self) -> bool:
        """Whether the figures stand in the place of the conversation."""
        beside = self.has_class("-wide") or (
            self.has_class("-middle") and not self.has_class("-short")
        )
        return self.panel.display and not beside

    @property
    def is_welcoming(self) -> bool:
        """Whether nobody has said anything yet."""
        return self.query_one(Welcome).display

    def blocks_changed(self) -> None:
        """The transcript holds something, or nothing any more. A notice alone, of a load for instance, does not
        hide who answers and what one can do."""
        blocks = self.transcript.blocks
        notices = [one for one in blocks if isinstance(one, NoticeBlock)]
        welcome = self.query_one(Welcome)
        welcome.display = len(notices) == len(blocks)
        welcome.outbid(any(one.offers for one in notices))
        self.transcript.display = bool(blocks)

    def _watch_stats(self) -> None:
        live = self.session.live
        trouble = self.session.keeper.trouble
        if trouble is not None:
            self.hint(trouble.message)
        if live.info is None or self._asking_stats or not self.panel.display:
            return
        self._asking_stats = True
        self.run_worker(self._fetch_stats(), group="stats")

    async def _fetch_stats(self) -> None:
        try:
            engine = await self.session.engine()
            self.session.live.stats = await asyncio.to_thread(engine.stats)
            for panel in self.query(Panel):  # none where the screen was taken down meanwhile
                panel.changed()
        except LocalchatError:
            self.session.live.stats = None  # the engine is gone; the next question starts another
        finally:
            self._asking_stats = False

    # ------------------------------------------------------------------ words above the composer

    def hint(self, text: str) -> None:
        """A word above the composer that goes away by itself."""
        self._banner(text)
        if self._hinting is not None:
            self._hinting.stop()  # the time of this word begins now
        self._hinting = self.set_timer(_HINT_S, self._restore_banner)

    def _banner(self, text: str) -> None:
        line = self.query_one("#banner", Static)
        line.display = bool(text)
        line.update(Content(text))

    def _restore_banner(self) -> None:
        editing = (
            "Changing a sent message: Enter sends it as a new branch, Esc leaves it as it was."
        )
        self._banner(editing if self._editing else "")

    # ------------------------------------------------------------------ size

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < 16, "-low")
        self.set_class(event.size.height < 20, "-short")
