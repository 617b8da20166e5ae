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
from typing import Final, Literal, NamedTuple

from localchat.chat.compaction import Compaction
from localchat.chat.conversation import Conversation, Inclusion, Node
from localchat.chat.overflow import (
    Choice,
    Overflow,
    counter,
    examine,
    known_context,
    leave_out,
    reserve_tokens,
    what_to_leave_out,
)
from localchat.chat.prompt_messages import sent_messages
from localchat.engine.events import Event, MetricsSnapshot, Reasoning, Text
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded, EngineClosed, LocalchatError, UsageError
from localchat.models.resolve import GUIDE
from localchat.session.answer_builder import SAVE_EVERY_S, AnswerBuilder, joined
from localchat.session.blocks import NoticeBlock, Offer
from localchat.session.context import ModelSetup, SessionContext
from localchat.session.engine_holder import EngineHolder
from localchat.session.engine_status import EngineStatus
from localchat.session.recorder import ConversationRecorder
from localchat.session.view import SessionView, node_blocks, transcript_blocks

# When a conversation outgrows the context: nothing is sent, the ways on are offered, and one is taken.


PREFIX: Final = "overflow/"


class Outgrown:
    """Of one session. `found`: what was offered last."""

    def __init__(self, session: "ChatSession") -> None:
        self._session = session
        self.found: Overflow | None = None

    async def offer(self, problem: ContextExceeded) -> None:
        """Say that nothing was sent, and what can be done; where the person chose to leave out the oldest
        before, that is done again. Returns with `found` set."""
        session = self._session
        try:
            engine = await session.engine()
            info = await asyncio.to_thread(engine.info)
            self.found = await asyncio.to_thread(
                examine,
                session.conversation,
                counter(engine),
                info,
                max_tokens=session.settled.settings.max_tokens,
                thinking=session.settled.settings.think,
                refusal=problem,
            )
        except LocalchatError:  # an engine that cannot count, or is gone: its own words must do
            session.complain(problem, (Offer("a new conversation", "new"),))
            return
        offers = [Offer(each.label, f"{PREFIX}{each.action}") for each in self.found.choices]
        offers.append(Offer("another model", "model"))
        sentence = self.found.sentence
        session.notice(f"{sentence[0].upper()}{sentence[1:]}.", "warning", offers)

    async def again(self, problem: ContextExceeded) -> bool:
        """The choice made before, made again: leave out what is too old by now. False where nothing was
        chosen, or where it does not help. `problem`: the refusal, which may know the context better than the
        engine's `info`."""
        session = self._session
        if session.conversation.policy.kind != "leave_out_oldest":
            return False
        engine = await session.engine()
        known = problem.details.get("context_tokens")
        context = known if isinstance(known, int) else 0
        context = context or (await asyncio.to_thread(engine.info)).context_tokens
        settings = session.settled.settings
        cut = await asyncio.to_thread(
            what_to_leave_out,
            session.conversation,
            counter(engine),
            context,
            reserve_tokens(context, settings.max_tokens),
            thinking=settings.think,
        )
        if cut is None or not cut.nodes:
            return False
        leave_out(session.conversation, cut)
        session.keeper.changed()
        session.show()
        return True

    async def take(self, action: str) -> None:
        """Do what a notice offered, and send the question. Raises LocalchatError."""
        choice = self._choice(action)
        session = self._session
        match choice.action:
            case "leave_out_oldest":
                assert self.found is not None and self.found.cut is not None
                leave_out(session.conversation, self.found.cut)
                session.keeper.changed()
                session.show()
            case "compact":
                await self.compact()
            case "longer_context":
                session.use(None, {"context_length": str(choice.tokens)}).apply()
            case "smaller_kv":
                changes = {"context_length": str(choice.tokens), "kv_cache_type": choice.kv_type}
                session.use(None, changes).apply()
        await session.retry()

    def _choice(self, action: str) -> Choice:
        name = action.removeprefix(PREFIX)
        for choice in self.found.choices if self.found else ():
            if choice.action == name:
                return choice
        raise UsageError("this offer is no longer open", hint="send the question again")

    async def compact(self) -> None:
        """Let the model sum up the older part; the summary is sent in its place. Raises LocalchatError, and
        then nothing has changed."""
        session = self._session
        with session.occupied("summing up"):
            engine = await session.engine()
            info = await asyncio.to_thread(engine.info)
            count = counter(engine)
            context = known_context(info, self.found)
            run = await asyncio.to_thread(Compaction, session.conversation, count, context)
            while (request := await asyncio.to_thread(run.request)) is not None:
                pieces: list[str] = []
                session.working(f"summing up {run.progress * 100:.0f} %")
                with session.streaming(await asyncio.to_thread(engine.generate, request)) as stream:
                    async for event in stream:
                        session.watch(event)
                        if isinstance(event, Text):
                            pieces.append(event.text)
                run.take("".join(pieces))
            for node in run.finish():
                session.keeper.changed(node)
            session.keeper.changed()
        session.show()


# The conversation as the page shows it: its last messages, its versions. Nothing is asked here.


class Shown:
    """See the module. `live`: figures, which another conversation does not take over. `settled`: the model and
    the settings that a new one begins with."""

    def __init__(
        self,
        conversation: Conversation,
        page: SessionView,
        keeper: ConversationRecorder,
        settled: ModelSetup,
    ) -> None:
        self.conversation = conversation
        self.keeper = keeper
        self.settled = settled
        self.live = EngineStatus(model=settled.model.name)
        self._page = page
        keeper.hold(conversation)

    def show(self) -> None:
        """The whole conversation anew."""
        self._page.show(transcript_blocks(self.conversation))
        self._page.figures_changed()

    def _show_new(self, node: Node) -> None:
        for block in node_blocks(self.conversation, node):
            self._page.put(block)
        self.keeper.changed(node)

    def last_question(self) -> Node | None:
        """The last message of the user on the shown path."""
        return self._last("user")

    def last_answer(self) -> Node | None:
        """The last message of a model on the shown path."""
        return self._last("assistant")

    def _last(self, role: str) -> Node | None:
        path = self.conversation.path()
        return next((node for node in reversed(path) if node.message.role == role), None)

    def undo(self) -> Node:
        """Take the last question and what followed it off the path. Raises UsageError."""
        question = self.last_question()
        if question is None:
            raise UsageError("there is nothing to undo")
        self.conversation.back_to(question.parent)
        self.keeper.changed()
        self.show()
        return question

    def walk(self, id_: str, step: int) -> str | None:
        """Show the next (1) or the previous (-1) version of a message; returns its id, None where there is
        no other."""
        siblings = self.conversation.siblings(id_)
        at = next(n for n, node in enumerate(siblings) if node.id == id_) + step
        if not 0 <= at < len(siblings):
            return None
        self.conversation.show(siblings[at].id)
        self.keeper.changed()
        self.show()
        return siblings[at].id

    def begin(self, *, system: str | None = None) -> None:
        """A new, empty conversation."""
        self.resume(
            Conversation(
                model=self.settled.model.word,
                system=(self.settled.settings.system or "") if system is None else system,
            )
        )

    def resume(self, conversation: Conversation) -> None:
        """Go on with another conversation."""
        self.keeper.hold(conversation)
        self.conversation = conversation
        self.live.done = self.live.figures = self.live.prefill = None
        self.show()

    def instruct(self, text: str) -> None:
        """Set the instructions that come first."""
        self.conversation.system = text
        self.keeper.changed()


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


class ChatSession(Shown):
    """See the module. `conversation`, `live` and `settled` are read by the screen, never changed by it."""

    def __init__(
        self,
        workplace: SessionContext,
        engines: EngineHolder,
        settled: ModelSetup,
        page: SessionView,
        keeper: ConversationRecorder,
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
                answering = AnswerBuilder(self.conversation, self._page, parent, prolonged)
                outgrown = await self._attempt(answering, prolong=prolonged is not None)
                if outgrown is None or not await self._cut_again(outgrown):
                    break
        if outgrown is not None:
            await self.outgrown.offer(outgrown)
        elif answering.whole:
            await self._remember()

    async def _attempt(self, answering: AnswerBuilder, *, prolong: bool) -> ContextExceeded | None:
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

    async def _consume(self, answering: AnswerBuilder, messages: Messages) -> None:
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

    async def _save(self, answering: AnswerBuilder) -> None:
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
            self._show_figures(_FIGURES_EVERY_S if isinstance(event, MetricsSnapshot) else 0.0)

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

    def _ended(self, answering: AnswerBuilder, problem: LocalchatError | None) -> None:
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
