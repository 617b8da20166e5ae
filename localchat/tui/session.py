"""The chat without a screen: a conversation, an engine, and a page to show them on.

Everything here runs on the event loop. What may block (opening an engine, asking it what it is) runs in a
thread. One answer is under way at a time; a question that comes meanwhile is refused by `busy`, which the
screen asks first.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from localchat.chat.conversation import Conversation, Inclusion, Node
from localchat.chat.prompt_messages import sent_messages
from localchat.engine.events import Event, Figures, Reasoning, Text
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded, EngineClosed, LocalchatError, UsageError
from localchat.models.resolve import GUIDE
from localchat.tui.answering import SAVE_EVERY_S, Answering, joined
from localchat.tui.blocks import NoticeBlock, Offer
from localchat.tui.engines import Engines
from localchat.tui.keeping import Keeper
from localchat.tui.outgrown import Outgrown
from localchat.tui.page import Page
from localchat.tui.shown import Shown
from localchat.tui.workplace import Settled, Workplace

Kind = Literal["info", "warning", "error"]
RETRY = "retry"
_BATCH_S = 0.05
"""As long as a drawing waits for the one before, so that text and figures are drawn together. Waking for every
token takes the cores from an engine that computes on all of them."""

_FIGURES_EVERY_S = 0.15


class Change(NamedTuple):
    """Another model, or other parameters. `reload`: the engine is opened anew."""

    apply: Callable[[], None]
    reload: bool


class Session(Shown):
    """See the module. `conversation`, `live` and `settled` are read by the screen, never changed by it."""

    def __init__(
        self,
        workplace: Workplace,
        engines: Engines,
        settled: Settled,
        page: Page,
        keeper: Keeper,
        conversation: Conversation,
    ) -> None:
        super().__init__(conversation, page, keeper, settled)
        self.workplace = workplace
        self.changes: dict[str, str] = {}
        self.outgrown = Outgrown(self)
        self._engines = engines
        self._stream: Stream | None = None
        self._stopping = False
        self._running = False
        self._told: set[str] = set()
        self._numbers = itertools.count(1)
        self._due, self._figured_s = False, float("-inf")

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._running

    async def engine(self) -> Engine:
        """The engine, once it is there. Raises LocalchatError."""
        return await self._engines.engine()

    def notice(self, text: str, kind: Kind = "info", offers: Sequence[Offer] = ()) -> str:
        """A word of the program in the transcript; returns the id of its block."""
        id_ = f"notice/{next(self._numbers)}"
        self._page.put(NoticeBlock(id_, text, kind, tuple(offers)))
        return id_

    def complain(self, problem: LocalchatError, offers: Sequence[Offer] = ()) -> None:
        """An error with what to do, as a notice."""
        self.notice(str(problem), "error", offers)

    async def get_ready(self) -> None:
        """Wait for the engine and say what a user should know of it. Never raises for the engine's sake."""
        try:
            engine = await self._engines.engine()
            info = await asyncio.to_thread(engine.info)
        except EngineClosed:
            return  # another model was chosen meanwhile
        except LocalchatError as problem:
            if not self._running:
                self.live.rest(broken=True)
                self.complain(problem, self._other_models())
                self._page.figures_changed()
            return
        self._know(info)
        if not self._running:
            self.live.rest()
        self._page.figures_changed()

    def _other_models(self) -> tuple[Offer, ...]:
        choose = Offer("choose another model", "model")
        guide = Offer("go on with the built-in guide", f"model {GUIDE}")
        return (choose,) if self.settled.model.word == GUIDE else (choose, guide)

    def _know(self, info: EngineInfo) -> None:
        self.live.info = info
        for sentence in (*info.notes, *((info.warning,) if info.warning else ())):
            self._tell_once(sentence, "warning" if sentence == info.warning else "info")

    # ------------------------------------------------------------------ asking

    async def ask(self, text: str, inclusions: Sequence[Inclusion] = ()) -> None:
        """Send a question after the shown path, and answer it. Raises UsageError during another answer."""
        self._refuse_second()
        node = self.conversation.add(
            Message("user", text), parent=self.conversation.head, inclusions=inclusions
        )
        self._show_new(node)
        await self.answer(node.id)

    async def edit(self, id_: str, text: str, inclusions: Sequence[Inclusion] = ()) -> None:
        """Send another version of a question; the first one stays as a branch."""
        self._refuse_second()
        parent = self.conversation.nodes[id_].parent
        node = self.conversation.add(Message("user", text), parent=parent, inclusions=inclusions)
        self.keeper.changed(node)
        self.show()
        await self.answer(node.id)

    async def regenerate(self, id_: str | None = None) -> None:
        """Answer a question again, the last one where none is named; the answer before stays as a branch.
        Raises UsageError."""
        question = self.conversation.nodes[id_] if id_ else self.last_question()
        if question is None:
            raise UsageError("there is no question to answer again")
        self.conversation.back_to(question.id)
        self.show()
        await self.answer(question.id)

    async def go_on(self) -> None:
        """Prolong an answer that was stopped or broke off. Raises UsageError."""
        node = self.last_answer()
        if node is None or node.id != self.conversation.head or node.parent is None:
            raise UsageError("there is no answer to continue")
        if not node.message.content:
            await self.regenerate()
            return
        await self.answer(node.parent, prolonged=node)

    async def answer(self, parent: str, *, prolonged: Node | None = None) -> None:
        """Answer the message `parent`, whatever stands in the way being shown as a notice."""
        outgrown: ContextExceeded | None = None
        with self.occupied():
            for _ in range(2):
                answering = Answering(self.conversation, self._page, parent, prolonged)
                outgrown = await self._attempt(answering, prolong=prolonged is not None)
                if outgrown is None or not await self._cut_again(outgrown):
                    break
        if outgrown is not None:
            await self.outgrown.offer(outgrown)
        elif answering.whole:
            await self._remember()

    async def _attempt(self, answering: Answering, *, prolong: bool) -> ContextExceeded | None:
        """Ask once. What is returned was not sent: it is too long."""
        messages = Messages(
            sent_messages(self.conversation),
            thinking=self.settled.settings.think,
            continue_last=prolong,
        )
        try:
            await self._consume(answering, messages)
            self._ended(answering, None)
        except ContextExceeded as problem:
            if answering.node is None or prolong:
                return problem
            self._ended(answering, problem)
        except LocalchatError as problem:
            self._ended(answering, problem)
        return None

    async def _cut_again(self, problem: ContextExceeded) -> bool:
        try:
            return await self.outgrown.again(problem)
        except LocalchatError:
            return False  # the notice that follows tells what is wrong

    async def _consume(self, answering: Answering, messages: Messages) -> None:
        engine = await self._engines.engine()
        request = self.workplace.request(self.settled.settings, messages)
        saving = asyncio.create_task(self._save(answering))
        try:
            # Handing over a long prompt waits until the engine's process has read it.
            with self.streaming(await asyncio.to_thread(engine.generate, request)) as stream:
                async for batch in stream.batches():
                    for event in joined(batch):
                        self.watch(event)
                        answering.take(event)
                    writing = any(isinstance(event, Text | Reasoning) for event in batch)
                    if self.live.info is None and writing:
                        self._know(await asyncio.to_thread(engine.info))
                    if writing and not stream.ended:
                        await asyncio.sleep(_BATCH_S)
        finally:
            saving.cancel()

    async def _save(self, answering: Answering) -> None:
        """Keep what has come, by the clock and not by events: a model that falls silent in mid-answer must not
        hold back its last words, nor its last figures."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self._show_figures(SAVE_EVERY_S)
            node = answering.grown()
            if node is not None:
                self.keeper.changed(node)

    @contextmanager
    def occupied(self, what: str = "") -> Iterator[None]:
        """One thing is under way. Raises UsageError where another one is."""
        self._refuse_second()
        self._running, self._stopping = True, False
        self.live.begin()
        self.working(what)
        try:
            yield
        finally:
            if self.live.busy:
                self.live.rest()
            self._running = False
            self.working("")

    def _refuse_second(self) -> None:
        if self._running:
            raise UsageError("an answer is under way", hint="Esc stops it")

    @contextmanager
    def streaming(self, stream: Stream) -> Iterator[Stream]:
        """The stream that `stop` closes."""
        self._stream = stream
        try:
            with stream:
                if self._stopping:
                    raise EngineClosed("stopped")
                yield stream
        finally:
            self._stream = None

    def watch(self, event: Event) -> None:
        """Note the figures of an event. Those that come ten times a second are shown half as often: nobody
        reads them faster, and drawing them costs the cores that make them."""
        if self.live.take(event):
            self._due = True
            self._show_figures(_FIGURES_EVERY_S if isinstance(event, Figures) else 0.0)

    def _show_figures(self, gap_s: float) -> None:
        """Show what is due, unless figures were shown less than `gap_s` seconds ago."""
        now_s = time.monotonic()
        if self._due and now_s - self._figured_s >= gap_s:
            self._due, self._figured_s = False, now_s
            self._page.figures_changed()

    def working(self, what: str) -> None:
        """What is done besides answering, for the status line."""
        self.live.task = what
        self._page.figures_changed()

    def _ended(self, answering: Answering, problem: LocalchatError | None) -> None:
        """Keep what was said, and say why it ended where it did not end by itself."""
        info = self.live.info
        node: Node | None
        if problem is None:
            node = answering.end(info)
        elif isinstance(problem, EngineClosed) and self._stopping:
            self.live.rest()
            node = answering.end(info, "stopped") if answering.node else None
            if node is None:
                self.notice("stopped before the first word", "info", (Offer("ask again", RETRY),))
        else:
            node = answering.end(info, "failed", problem.message) if answering.node else None
            self._failed(problem)
        if node is not None:
            self.keeper.changed(node)

    async def _remember(self) -> None:
        """The model answered, at this pace. Written by a thread while the next question may come already."""
        model, info, done = self.settled.model, self.live.info, self.live.done
        try:
            await asyncio.to_thread(self.workplace.remember, model, info, done)
        except (OSError, LocalchatError) as problem:
            self._tell_once(f"what this answer showed cannot be remembered: {problem}", "warning")

    def _tell_once(self, sentence: str, kind: Kind) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self.notice(sentence, kind)

    def _failed(self, problem: LocalchatError) -> None:
        broken = problem.code == "engine_died"
        self.live.rest(broken=broken)
        if broken:
            self.live.info = None
        self.complain(problem, (Offer("try again", RETRY),))

    def stop(self) -> bool:
        """Stop the answer that is under way; what was said stays. False where there is none."""
        if not self._running:
            return False
        self._stopping = True
        if self._stream is not None:
            self._stream.close()
        return True

    async def retry(self) -> None:
        """What a notice offers after a failure: the last question again, on the same branch."""
        question = self.last_question()
        if question is None:
            await self.get_ready()
            return
        self.conversation.back_to(question.id)
        self.show()
        await self.answer(question.id)

    # ------------------------------------------------------------------ models and parameters

    def use(self, word: str | None, changes: Mapping[str, str]) -> Change:
        """Settle another model, or the same one under other parameters. Nothing is different before what is
        returned is applied; where it reloads, nothing may be under way then. Raises LocalchatError."""
        wanted = {**self.changes, **changes}
        settled = self.workplace.settle(word or self.settled.model.word, wanted)
        reload = settled.options != self.settled.options

        def apply() -> None:
            self.changes, self.settled = wanted, settled
            self.conversation.model = settled.model.word
            self.live.model = settled.model.name
            self.keeper.changed()
            if reload:
                self.live.info = None
                self.live.state = "starting"
                self._engines.open(settled.open_engine)
            self._page.figures_changed()

        return Change(apply, reload)
