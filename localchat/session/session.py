"""Chat session without a screen: a conversation, its engine, and a view that shows both.

Everything runs on one event loop. Calls that may block, such as opening an engine or counting tokens, run in
threads. One answer is generated at a time, and a question during another one raises UsageError.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from localchat.chat.conversation import Conversation, Node, Policy, Question
from localchat.engine.events import Event, MetricsSnapshot, Reasoning, Text
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import Grammar, Messages
from localchat.engine.stream import Stream
from localchat.errors import (
    ContextExceeded,
    DoesNotFit,
    EngineClosed,
    HistoryUnusable,
    LocalchatError,
    UsageError,
)
from localchat.session.answer_end import drop_repeats, offer_ways_on, report_empty
from localchat.session.blocks import RETRY, Block, NoticeBlock, Offer, SummaryBlock
from localchat.session.context import ModelSetup, SessionContext, SetupChange
from localchat.session.engine_holder import EngineHolder
from localchat.session.engine_status import EngineStatus
from localchat.session.outcome import AnswerUnderWay, Outcome, SummaryResult
from localchat.session.recorder import SAVE_EVERY_S, ConversationRecorder
from localchat.session.remarks import NoticeKind, Remark, Remarks
from localchat.session.tool_calls import SessionTools
from localchat.session.view import SessionView, error_id, node_blocks, transcript_blocks

# Imported late, when an answer begins: the first frame of the screen must not wait for it.
if TYPE_CHECKING:
    from localchat.chat.overflow import Overflow
    from localchat.session.answer_builder import AnswerBuilder
    from localchat.tools.loop import ToolTurn

BATCH_S: Final = 0.05
"""Time of a few frames, so that text and metrics are drawn together. Waking up for every token would take CPU
time from an engine that computes on all cores."""
_METRICS_EVERY_S: Final = 0.15
_STOP_POLL_S: Final = 0.01
_OTHER_WINDOW: Final = (
    "Another window added messages to this conversation. Open it again to see them; what you ask from here "
    "is a branch of its own."
)


class ChatSession:
    """Asks, shows and records one conversation after another.

    The public attributes are for reading. Only the methods change them.

    Size: the operations share one conversation, one stream and one status.
    """

    def __init__(
        self,
        context: SessionContext,
        engines: EngineHolder,
        setup: ModelSetup,
        view: SessionView,
        recorder: ConversationRecorder,
        conversation: Conversation,
        *,
        keep_unanswered: bool = True,
        batch_s: float = BATCH_S,
    ) -> None:
        """Create a session. `keep_unanswered` keeps questions that fail before their answer begins.

        `batch_s` is the pause after each batch of text.
        """
        self.context = context
        self.setup = setup
        self.conversation = conversation
        self.recorder = recorder
        self.status = EngineStatus(model=setup.model.name)
        self.changes: dict[str, str] = {}
        self.overflow: Overflow | None = None
        """Choices of the last prompt that was too long."""
        self.tools = SessionTools(self)
        self.restored = ""
        """Sentence about the files that the last undo restored."""
        self._unread: set[str] = set()
        """Kinds of attachments that the model cannot read."""
        self._turn: ToolTurn | None = None
        """Tools of the answers to the current question."""
        self._engines = engines
        self.view = view
        self._keep_unanswered = keep_unanswered
        self._batch_s = batch_s
        self._stream: Stream | None = None
        self._stopping = False
        self._running = False
        self._unanswered: Node | None = None
        """A question to remove if it fails before the first token of its answer."""
        self._shown_once: set[str] = set()
        self._remarks = Remarks(self.notice, view.remove)
        self._notice_numbers = itertools.count(1)
        self._new_summary = ""
        """Id of the summary to show open."""
        self._failure_notice = ""
        """Id of the notice about the last failed answer."""
        self._metrics_due = False
        self._metrics_shown_s = float("-inf")
        recorder.hold(conversation)

    @property
    def busy(self) -> bool:
        """Whether an answer or a summary is being generated."""
        return self._running

    @property
    def can_continue(self) -> bool:
        """Whether the last message is an answer that ended early."""
        if self._running:
            return False
        answer = self.last_answer()
        if answer is None or self.conversation.head is None:
            return False
        if self.conversation.nodes[self.conversation.head].message.role == "tool":
            return True
        return answer.id == self.conversation.head and answer.state != "whole"

    async def engine(self) -> Engine:
        """Return the engine once it is open. Raises LocalchatError."""
        return await self._engines.engine()

    async def wait_until_ready(self) -> None:
        """Wait for the engine, and show its notes. Failures become notices."""
        try:
            engine = await self._engines.engine()
            info = await asyncio.to_thread(engine.info)
        except EngineClosed:
            return  # The user chose another model meanwhile.
        except LocalchatError as problem:
            if not self._running:
                from localchat.session.memory_offers import load_offers

                self.status.finish(broken=True)
                self.show_error(problem, await load_offers(self.context, self.setup, problem))
                self.view.status_changed()
            return
        self._engine_known(info)
        if not self._running:
            self.status.finish()
        self.view.status_changed()

    async def fetch_stats(self) -> None:
        """Update the engine's own metrics. None after it has exited."""
        self.status.stats = await self._engines.stats()

    def _engine_known(self, info: EngineInfo) -> None:
        self.status.info = info
        remote = self.setup.model.remote
        if remote is not None and not remote.model:
            self.status.model = f"{info.model} on {remote.name}"
        warnings = [sentence for sentence in (info.warning, info.loss) if sentence]
        for sentence in info.notes:
            if sentence not in warnings:
                self.remark(sentence, "info")
        for sentence in warnings:
            self.remark(sentence, "warning")

    def notice(
        self, text: str, kind: NoticeKind = "info", offers: Sequence[Offer] = (), name: str = ""
    ) -> str:
        """Show a notice in the transcript, and return the id of its block.

        A `name` becomes the id. The notice then replaces an earlier one of that name.
        """
        id_ = name or f"notice/{next(self._notice_numbers)}"
        if name:
            self.view.remove(name)
        self.view.put(NoticeBlock(id_, text, kind, tuple(offers)))
        return id_

    def remark(self, sentence: str, kind: NoticeKind = "info", *, passing: bool = False) -> None:
        """Show a notice that is not about the current answer, once and below it.

        A `passing` remark describes the moment only, so it may appear again.
        """
        if sentence in self._shown_once:
            return
        if not passing:
            self._shown_once.add(sentence)
        self._remarks.add(Remark(sentence, kind, passing))

    def show_error(self, problem: LocalchatError, offers: Sequence[Offer] = ()) -> str:
        """Show an error with its hint, as `notice` does."""
        return self.notice(str(problem), "error", offers)

    def show(self) -> None:
        """Show the whole conversation again."""
        blocks = transcript_blocks(self.conversation)
        self.view.show([self._opened(block) for block in blocks])
        self.view.status_changed()

    def _opened(self, block: Block) -> Block:
        """Return the block, open if it is a summary that the user has not seen."""
        if isinstance(block, SummaryBlock):
            return block._replace(is_new=block.id == self._new_summary)
        return block

    def last_question(self) -> Node | None:
        """Return the last message of the user on the shown path."""
        return self._last("user")

    def last_answer(self) -> Node | None:
        """Return the last message of a model on the shown path."""
        return self._last("assistant")

    def _last(self, role: str) -> Node | None:
        path = self.conversation.path()
        return next((node for node in reversed(path) if node.message.role == role), None)

    def undo(self) -> Node:
        """Remove the last question and everything after it from the path. Raises UsageError.

        Files that tools changed since then are restored, and a notice lists them.
        """
        question = self.last_question()
        if question is None:
            raise UsageError("there is nothing to undo")
        self.restored = self.tools.undo(question)
        self.conversation.back_to(question.parent)
        self.recorder.changed()
        self.show()
        if self.restored:
            self.notice(self.restored)
        return question

    def switch_version(self, id_: str, step: int) -> str | None:
        """Show the next (1) or previous (-1) version of a message. Return its id, or None."""
        versions = [node.id for node in self.conversation.siblings(id_)]
        index = versions.index(id_) + step
        if not 0 <= index < len(versions):
            return None
        self.conversation.show(versions[index])
        self.recorder.changed()
        self.show()
        return versions[index]

    def start_new(self, *, system: str | None = None) -> None:
        """Start an empty conversation. Without `system`, it has the instructions of the settings.

        Raises HistoryUnusable if the current one cannot be saved.
        """
        if system is None:
            system = self.setup.settings.system or ""
        self.resume(Conversation(model=self.setup.model.word, system=system))

    def resume(self, conversation: Conversation) -> None:
        """Continue another conversation. Raises HistoryUnusable if the current one cannot be saved."""
        self.recorder.hold(conversation)
        self.conversation = conversation
        self.status.forget_answer()
        self.show()

    def set_instructions(self, text: str) -> None:
        """Set the system message of the conversation."""
        self.conversation.system = text
        self.recorder.changed()

    def send_everything(self) -> None:
        """Send messages again that were left out or summarized."""
        from localchat.chat.compaction import without_summary

        self.conversation.policy = Policy()
        for node in without_summary(self.conversation):
            self.recorder.changed(node)
        self.recorder.changed()
        self.show()

    async def ask(self, question: Question) -> Outcome:
        """Add a question to the shown path and answer it. Raises UsageError during another answer."""
        self._refuse_second()
        self._failure_notice = self._new_summary = ""
        unknown_name = self._unknown_first_mention(question)
        node = self.conversation.add(
            question.message, parent=self.conversation.head, inclusions=question.inclusions
        )
        for block in node_blocks(self.conversation, node):
            self.view.put(block)
        if unknown_name:
            sentence = f"there are no documents @{unknown_name}, so the name is sent as text"
            self.remark(sentence, "warning")
        self.recorder.changed(node)
        if not self._keep_unanswered:
            self._unanswered = node
        try:
            return await self.answer(node.id)
        finally:
            if self._unanswered is node:
                self._unanswered = None
                with suppress(HistoryUnusable):  # `recorder.trouble` reports it
                    await asyncio.to_thread(self.recorder.withdraw, node)
                self.conversation.remove_last(node.id)

    def _unknown_first_mention(self, question: Question) -> str:
        """Return the unknown name at the start of a question, or an empty string.

        Raises UsageError for one that resembles a collection's.
        """
        text = question.text
        start = len(text) - len(text.lstrip())
        is_file = any(item.start <= start < item.end for item in question.inclusions)
        if is_file or not text.startswith("@", start):
            return ""
        library = self.context.library
        library.check_first_mention(text)
        return library.unknown_first_mention(text)

    async def edit(self, id_: str, question: Question) -> None:
        """Send another version of a question. The first one stays as a branch."""
        self._refuse_second()
        parent = self.conversation.nodes[id_].parent
        node = self.conversation.add(
            question.message, parent=parent, inclusions=question.inclusions
        )
        self.recorder.changed(node)
        self.show()
        await self.answer(node.id)

    async def regenerate(self, question: Node | None = None) -> Outcome:
        """Answer a question again, by default the last one. The old answer stays as a branch.

        Raises UsageError if there is no question.
        """
        question = question or self.last_question()
        if question is None:
            raise UsageError("there is no question to answer again")
        old_head = self.conversation.head
        self.conversation.back_to(question.id)
        self.show()
        outcome = await self.answer(question.id)
        if outcome.node is None and not self._keep_unanswered:
            self.conversation.back_to(old_head)
        return outcome

    async def retry(self) -> None:
        """Answer the last question again on the same branch, after a failure."""
        question = self.last_question()
        if question is None:
            await self.wait_until_ready()
            return
        self.conversation.back_to(question.id)
        self.show()
        await self.answer(question.id)

    async def continue_answer(self) -> None:
        """Continue an answer that was stopped or interrupted, even before its first token.

        Raises UsageError if there is no such answer.
        """
        self._refuse_second()
        question = self.last_question()
        if question is not None and question.id == self.conversation.head:
            await self.retry()
            return
        head = self.conversation.head
        if head is not None and self.conversation.nodes[head].message.role == "tool":
            await self.answer(head)  # the calls were stopped
            return
        node = self.last_answer()
        if not self.can_continue or node is None or node.parent is None:
            raise UsageError("there is no stopped answer to continue")
        if not node.message.content:
            await self.regenerate()
            return
        parent = node.parent
        with suppress(HistoryUnusable):  # `recorder.trouble` reports it
            await asyncio.to_thread(self.recorder.check_unchanged, node)
        self._refuse_second()
        node = drop_repeats(self, node)
        # The answer continues, so its error is out of date.
        for id_ in (error_id(node.id), self._failure_notice):
            self.view.remove(id_)
        await self.answer(parent, continued=node)

    def stop(self) -> bool:
        """Stop generating and keep the text so far. Return False if nothing is being generated."""
        if not self._running:
            return False
        self._stopping = True
        self.tools.stop()
        if self._stream is not None:
            self._stream.close()
        return True

    async def stop_and_wait(self) -> bool:
        """Stop generating, and wait until the answer has ended.

        Return False if nothing was being generated.
        """
        was_busy = self.stop()
        while self.busy:
            await asyncio.sleep(_STOP_POLL_S)
        return was_busy

    async def answer(self, parent: str, *, continued: Node | None = None) -> Outcome:
        """Answer the message `parent`. Failures become notices and are part of the outcome."""
        with self._exclusive():
            outcome, _ = await asyncio.gather(
                self._answer_with_tools(parent, continued), self.report_other_windows()
            )
        if outcome.end == "too_long":
            from localchat.session.too_long import offer_choices

            overflow = await offer_choices(self, outcome.error)
            self.overflow = overflow or self.overflow
            return outcome._replace(overflow=overflow)
        if outcome.end == "complete":
            if outcome.node is not None:
                report_empty(self, outcome.node)
            await self._remember()
        elif isinstance(outcome.error, DoesNotFit) and outcome.node is None:
            from localchat.session.memory_offers import load_offers

            offers = await load_offers(self.context, self.setup, outcome.error)
            self.notice("What you can do:", "info", offers)
        return outcome

    async def report_other_windows(self) -> None:
        """Report new messages of other programs in this conversation."""
        with suppress(HistoryUnusable):  # `recorder.trouble` reports it
            if await asyncio.to_thread(self.recorder.has_grown_elsewhere):
                self.remark(_OTHER_WINDOW, "warning", passing=True)

    async def _answer_with_tools(self, parent: str, continued: Node | None) -> Outcome:
        """Answer a message, run the tool calls of the answer, and answer again until there are none."""
        try:
            self._turn = await self.tools.begin()
        except EngineClosed:
            return self._stopped_early()
        except LocalchatError as problem:
            self._failed(problem)
            return Outcome("failed", error=problem)
        while True:
            outcome = await self._answer_fitting(parent, continued)
            if self._turn is None or outcome.end != "complete" or outcome.node is None:
                return outcome
            continued = None
            if self._turn.must_answer(outcome.node.message):
                self.conversation.back_to(parent)
            elif self._turn.must_call(outcome.node.message):
                continued = outcome.node
            else:
                result = await self.tools.run(self._turn, outcome.node)
                if result is None:
                    return outcome
                parent = result.id
            if self._stopping:
                self.status.finish()
                return Outcome("stopped", outcome.node)
            self.status.begin()

    async def _answer_fitting(self, parent: str, continued: Node | None) -> Outcome:
        """Answer a message, and leave out older ones if the policy allows that."""
        outcome = await self._attempt(parent, continued)
        if outcome.end == "too_long":
            from localchat.session.too_long import make_room_by_policy

            if await make_room_by_policy(self, outcome.error):
                outcome = await self._attempt(parent, continued)
        return outcome

    async def _attempt(self, parent: str, continued: Node | None) -> Outcome:
        from localchat.session.answer_builder import AnswerBuilder

        builder = AnswerBuilder(self.conversation, self.view, parent, continued)
        try:
            await self._consume(builder, parent, continued)
        except ContextExceeded as problem:
            if builder.node is None or continued is not None:
                return Outcome("too_long", error=problem)  # nothing was sent
            return self._ended(builder, problem)
        except LocalchatError as problem:
            if builder.node is None and self._leave_out_media(problem):
                return await self._attempt(parent, continued)
            return self._ended(builder, problem)
        return self._ended(builder, None)

    def _leave_out_media(self, problem: LocalchatError) -> bool:
        """Leave out what the model cannot read of earlier questions. Return False if that does not help."""
        from localchat.chat.prompt_messages import MEDIA_LEFT_OUT, unread_kind

        kind = unread_kind(self.conversation, problem)
        if not kind or kind in self._unread:
            return False
        self._unread.add(kind)
        self.remark(MEDIA_LEFT_OUT, "warning")
        return True

    async def _consume(self, builder: "AnswerBuilder", parent: str, continued: Node | None) -> None:
        from localchat.chat.prompt_messages import sent_messages
        from localchat.session.answer_builder import joined
        from localchat.session.documents import include_documents

        engine = await self._engines.engine()
        await include_documents(self, parent, engine)
        settings = self.setup.settings
        messages = Messages(
            sent_messages(self.conversation, self._unread),
            thinking=settings.think,
            think_budget=settings.think_budget,
            continue_last=continued is not None,
        )
        if self._turn is not None:
            messages = self._turn.offer(messages)
        request = self.context.owned(settings, messages, self.conversation)
        request = msgspec.structs.replace(request, n=1)
        if self._turn is not None and self._turn.answer_pattern:
            grammar = Grammar("regex", self._turn.answer_pattern)
            request = msgspec.structs.replace(request, grammar=grammar)
        saving = asyncio.create_task(self._save(builder))
        try:
            # `generate` returns once the engine process has rendered the prompt, which may be long.
            stream = await asyncio.to_thread(engine.generate, request)
            with self._streaming(stream):
                async for batch in stream.batches():
                    writing = any(isinstance(event, Text | Reasoning) for event in batch)
                    for event in joined(batch):
                        if not self.status.loaded and isinstance(event, Text | Reasoning):
                            self._engine_known(await asyncio.to_thread(engine.info))
                            self.view.status_changed()
                        self.track(event)
                        builder.take(event)
                    if writing:
                        self._remarks.release()
                    if writing and not stream.ended:
                        await asyncio.sleep(self._batch_s)
        finally:
            saving.cancel()

    async def _save(self, builder: "AnswerBuilder") -> None:
        """Record the growing answer at regular times.

        Otherwise a model that pauses in the middle of an answer would delay its last text and metrics.
        """
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self._show_metrics(SAVE_EVERY_S)
            node = builder.take_snapshot()
            if node is not None:
                self._record_answer(node)

    def _record_answer(self, node: Node | None) -> None:
        self._unanswered = None
        if node is not None:
            self.recorder.changed(node)

    def _ended(self, builder: "AnswerBuilder", problem: LocalchatError | None) -> Outcome:
        """Record the answer, and show why it ended unless it is complete."""
        info = self.status.info
        if problem is None:
            answered = builder.end(info)
            outcome = Outcome("complete", answered)
            offer_ways_on(self, answered)
        elif isinstance(problem, EngineClosed) and self._stopping:
            if builder.node is None:
                return self._stopped_early()
            self.status.finish()
            outcome = Outcome("stopped", builder.end(info, "stopped"))
        else:
            node = builder.node and builder.end(info, "failed", problem.message)
            outcome = Outcome("failed", node, problem)
            self._failed(problem)
        if outcome.node is not None:
            self._record_answer(outcome.node)
        return outcome

    def _stopped_early(self) -> Outcome:
        """Show that an answer was stopped before any of it arrived."""
        self.status.finish()
        self.notice("stopped before the first token", "info", (Offer("ask again", RETRY),))
        self._record_answer(None)
        return Outcome("stopped")

    def _failed(self, problem: LocalchatError) -> None:
        broken = problem.code == "engine_died"
        self.status.finish(broken=broken)
        if broken:
            self.status.info = None
        if problem.details.get("attached") and self._engines.reopens:
            problem.hint = "the next question loads the model in a process of this program"
            self._engines.open(self.setup.open_engine)
        self._failure_notice = self.show_error(problem, (Offer("try again", RETRY),))

    async def _remember(self) -> None:
        """Save the model and its speed in a thread, so that questions need not wait."""
        status = self.status
        try:
            await asyncio.to_thread(
                self.context.remember, self.setup.model, status.info, status.done
            )
        except (OSError, LocalchatError) as problem:
            self.remark(f"cannot save the model and its speed: {problem}", "warning")

    @contextmanager
    def _exclusive(self, task: str = "") -> Iterator[None]:
        """Run one answer or task. Raises UsageError during another one."""
        self._refuse_second()
        self._running = True
        self._stopping = False
        self._remarks.begin_answer()
        self.status.begin()
        self._set_task(task)
        try:
            yield
        finally:
            if self.status.busy:
                self.status.finish()
            self._running = False
            self._remarks.release()
            self._set_task("")

    def _refuse_second(self) -> None:
        if self._running:
            raise AnswerUnderWay

    @contextmanager
    def _streaming(self, stream: Stream) -> Iterator[Stream]:
        """Let `stop` close this stream."""
        self._stream = stream
        try:
            with stream:
                if self._stopping:
                    raise EngineClosed("stopped")
                yield stream
        finally:
            self._stream = None

    def track(self, event: Event) -> None:
        """Update the status from an event.

        Snapshots arrive ten times a second and are shown less often, because drawing takes CPU time from the
        engine.
        """
        if self.status.update(event):
            self._metrics_due = True
            if isinstance(event, MetricsSnapshot):
                self._show_metrics(_METRICS_EVERY_S)
            else:
                self._show_metrics(0.0)

    def _show_metrics(self, gap_s: float) -> None:
        """Show a pending change of the status, at most once in `gap_s` seconds."""
        now_s = time.monotonic()
        if self._metrics_due and now_s - self._metrics_shown_s >= gap_s:
            self._metrics_due = False
            self._metrics_shown_s = now_s
            self.view.status_changed()

    def _set_task(self, task: str) -> None:
        """Set the text that the status shows instead of the engine's state."""
        self.status.task = task
        self.view.status_changed()

    async def take_offer(self, action: str) -> None:
        """Make room by an offer of a notice, and send the question. Raises LocalchatError."""
        from localchat.session.too_long import apply_choice

        await apply_choice(self, action)
        await self.retry()

    async def compact(self) -> SummaryResult:
        """Let the model summarize the older part, and send the summary instead.

        Raises LocalchatError, or EngineClosed after `stop`. Nothing has changed then.
        """
        from localchat.chat.compaction import Compaction
        from localchat.chat.overflow import counter, known_context

        with self._exclusive("summarizing"):
            engine = await self.engine()
            info = await asyncio.to_thread(engine.info)
            context = known_context(info, self.overflow)
            run = await asyncio.to_thread(Compaction, self.conversation, counter(engine), context)
            while (request := await asyncio.to_thread(run.request)) is not None:
                pieces: list[str] = []
                speculation = self.setup.settings.speculation
                request = msgspec.structs.replace(request, speculation=speculation)
                stream = await asyncio.to_thread(engine.generate, request)
                with self._streaming(stream):
                    async for event in stream:
                        self.track(event)
                        run.observe(event)
                        if (task := f"summarizing {run.progress:.0%}") != self.status.task:
                            self._set_task(task)
                        if isinstance(event, Text):
                            pieces.append(event.text)
                run.take("".join(pieces))
            nodes = run.finish(info)
            self._new_summary = nodes[0].id
            for node in nodes:
                self.recorder.changed(node)
            self.recorder.changed()
        self.show()
        return SummaryResult(nodes[0].message.content, len(run.replaced))

    def prepare_change(self, model_name: str | None, changes: Mapping[str, str]) -> SetupChange:
        """Resolve another model, or this one with other parameters. Raises LocalchatError.

        Nothing changes before the result is applied. If it reloads, no answer may be running then.
        """
        changes = {**self.changes, **changes}
        setup = self.context.resolve(model_name or self.setup.model.word, changes)
        reload = setup.options != self.setup.options

        def apply() -> None:
            self.changes = dict(changes)
            self.setup = setup
            self.conversation.model = setup.model.word
            self.status.model = setup.model.name
            self.recorder.changed()
            if setup.model.notice:
                self.remark(setup.model.notice)
            if reload:
                self._unread.clear()
                self.status.info = self.status.stats = None
                self.status.forget_answer()
                self.status.state = "starting"
                self._engines.open(setup.open_engine)
            self.view.status_changed()

        return SetupChange(apply, reload)
