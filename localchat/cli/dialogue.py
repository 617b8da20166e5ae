"""What a conversation by lines does: asks, keeps, and finds room when it outgrew the context."""

import time
from contextlib import suppress
from typing import Final

import msgspec

from localchat.chat.compaction import Compaction
from localchat.chat.conversation import Conversation, Node, NodeState
from localchat.chat.overflow import (
    Overflow,
    counter,
    examine,
    known_context,
    leave_out,
    unsent_sentence,
)
from localchat.cli.context_advice import with_advice
from localchat.cli.conversation_options import figures_of, state_of
from localchat.cli.converse import tell_engine
from localchat.cli.outgrown import offer_lines, take_fitting
from localchat.cli.render_answer import Answer, Display, take
from localchat.cli.resolve import Setup, remember
from localchat.engine.interface import Engine
from localchat.engine.request import Message
from localchat.engine.stats_line import stats_line
from localchat.errors import (
    ContextExceeded,
    HistoryUnusable,
    LocalchatError,
    NetworkError,
    UsageError,
)
from localchat.history.autosave import Autosave
from localchat.history.store import History

_SHOWN: Final = 200
"""Characters of a long question that are repeated on the screen."""
_GROWS_EVERY_S: Final = 0.2
"""How often a growing answer is handed to the autosave."""


class Dialogue:
    """A conversation and the engine that answers it. It outlives an engine that dies: that starts again with
    the next question."""

    def __init__(
        self, setup: Setup, engine: Engine, history: History, conversation: Conversation
    ) -> None:
        self.conversation = conversation
        self.last: Answer | None = None
        self.settings = msgspec.structs.replace(setup.settings, n=1)
        self.terminal = setup.terminal
        self._setup = setup
        self._engine = engine
        self._history = history
        self._save = Autosave(history, conversation)
        self._told = False
        self._troubled = False
        self._waiting = ""
        """A question that did not fit, while it is offered what to do."""
        self._overflow: Overflow | None = None

    def close(self) -> None:
        """Keep what was said. Trouble is said; there is nothing else to be done about it."""
        try:
            self._save.close()
        except HistoryUnusable as problem:
            self._trouble(problem)

    def tell_past(self) -> None:
        """What a conversation that goes on holds already, in a line."""
        if not self.conversation.nodes:
            return
        count = len(self.conversation.path())
        self.terminal.say(f"going on with {self.conversation.title!r}, {count} messages")
        self._waiting = self._history.draft(self.conversation.id)
        if self._waiting:
            line = " ".join(self._waiting[:_SHOWN].split())
            self.terminal.insist(f"not sent yet: {line}{'…' if line != self._waiting else ''}")
            self.terminal.insist("  /send sends it")

    # ------------------------------------------------------------------ asking

    def say(self, line: str) -> None:
        """A line of the person: a number takes an offer, everything else is a question."""
        overflow = self._overflow
        if overflow is not None and line.isdecimal() and len(line) < 3:
            number = int(line)
            if 1 <= number <= len(overflow.choices):
                self._choose(overflow, number - 1)
                return
        self.ask(line)

    def ask(self, text: str) -> None:
        """Answer `text` and keep both. A refusal is said, and the conversation stays as it was."""
        if text == self._waiting:
            self._waiting = ""
            self._save.draft("")
        self._overflow = None
        question = self.conversation.add(Message("user", text), parent=self.conversation.head)
        if not self._answer(question):
            self.conversation.take_back(question.id)

    def send(self) -> None:
        """Ask the question that could not be sent."""
        if not self._waiting:
            raise UsageError("no question waits to be sent")
        self.ask(self._waiting)

    def again(self) -> None:
        """Answer the last question once more, beside the answer that is there."""
        path = self.conversation.path()
        question = next((node for node in reversed(path) if node.message.role == "user"), None)
        if question is None:
            raise UsageError("there is no question yet")
        before = self.conversation.head
        self.conversation.back_to(question.id)
        if not self._answer(question):
            self.conversation.back_to(before)

    def why(self) -> str:
        """Why this backend, and where the layers are: one sentence."""
        return self._engine.info().why

    def undo(self) -> None:
        """Go back before the last question. It stays in the history, on a branch of its own."""
        path = self.conversation.path()
        question = next((node for node in reversed(path) if node.message.role == "user"), None)
        if question is None:
            raise UsageError("there is no question yet")
        self.conversation.back_to(question.parent)
        self.changed()

    def clear(self) -> None:
        """Begin a new conversation; the old one stays in the history."""
        self.close()
        self._overflow, self._waiting, self.last = None, "", None
        old = self.conversation
        self.conversation = Conversation(model=old.model, system=old.system)
        self._save = Autosave(self._history, self.conversation)

    def changed(self, *nodes: Node) -> None:
        """Something of the conversation is to be kept."""
        self._save.changed()
        for node in nodes:
            self._save.changed(node)

    def _answer(self, question: Node) -> bool:
        """Whether the question was taken. Everything else is said."""
        terminal, settings = self.terminal, self.settings
        growing = _Growing(self, question)
        display = Display(
            terminal,
            reasoning=not (settings.hide_reasoning or settings.quiet),
            begun=self._begun,
            grown=growing.grown,
        )
        answer = Answer()
        error: LocalchatError | None = None
        try:
            take_fitting(self._engine, self.conversation, settings, display, answer)
        except ContextExceeded as problem:
            self._outgrown(problem, question)
            return False
        except LocalchatError as problem:
            error = problem
            terminal.end_answer(empty=False)
            self._say_error(problem)
            if growing.node is None:
                self._keep_waiting(question, problem)
                return False
        else:
            terminal.end_answer(empty=not answer.interrupted)
        growing.end(answer, self._engine, error)
        self.last = answer
        if error is None:
            remember(self._setup, self._engine, answer.done)
        if answer.interrupted:
            terminal.say("stopped; what was said stays")
        elif settings.stats and answer.done:
            terminal.insist(stats_line(answer.done))
            terminal.insist(self.why())
        self._trouble(self._save.problem)
        return True

    def _keep_waiting(self, question: Node, problem: LocalchatError) -> None:
        """A question that did not reach its engine is not lost; one that was refused would be again."""
        if isinstance(problem, NetworkError) and question.message.content:
            self._waiting = question.message.content
            self._save.draft(self._waiting)
            self.terminal.insist("  the question is kept: /send sends it again")

    def _begun(self) -> None:
        if not self._told:
            self._told = True
            tell_engine(self.terminal, self._engine)

    def _trouble(self, problem: HistoryUnusable | None) -> None:
        """Once: an answer is worth more than a history."""
        if problem is not None and not self._troubled:
            self._troubled = True
            self.terminal.insist(f"localchat: this conversation is not kept: {problem.message}")

    def _say_error(self, problem: LocalchatError) -> None:
        self.terminal.insist(f"localchat: {problem.message}")
        for line in problem.hint.splitlines():
            self.terminal.insist(f"  {line}")

    # ------------------------------------------------------------------ too long

    def _outgrown(self, problem: ContextExceeded, question: Node) -> None:
        """Say what happened, and offer what helps."""
        self.terminal.end_answer(empty=False)
        if len(self.conversation.path()) == 1:
            self._say_error(with_advice(problem, self._engine))
            return
        overflow: Overflow | None = None
        with suppress(LocalchatError):  # an engine that cannot count, or is gone
            overflow = examine(
                self.conversation,
                counter(self._engine),
                self._engine.info(),
                max_tokens=self.settings.max_tokens,
                thinking=self.settings.think,
                refusal=problem,
            )
        if overflow is None or not overflow.choices:
            self._say_error(with_advice(problem, self._engine))
            self.terminal.insist("  or begin anew: /clear")
            return
        self._overflow, self._waiting = overflow, question.message.content
        self._save.draft(self._waiting)
        for line in offer_lines(overflow):
            self.terminal.insist(line)

    def _choose(self, overflow: Overflow, number: int) -> None:
        """Take an offer, and ask the question that waited for it."""
        waiting = self._waiting
        match overflow.choices[number].action:
            case "leave_out_oldest":
                assert overflow.cut is not None
                leave_out(self.conversation, overflow.cut)
                told = unsent_sentence(overflow.cut.messages, overflow.cut.tokens)
                self.terminal.insist(f"localchat: {told}", dim=True)
                self.changed()
            case "compact":
                if not self.compact():
                    return
            case _:
                self.terminal.insist("leave with Ctrl+D and start localchat as the offer says")
                return
        self.ask(waiting)

    def compact(self) -> bool:
        """Have the model sum up what came before the last exchanges; whether it did. Says why it did not."""
        self.terminal.insist("summing up; Ctrl+C stops", dim=True)
        try:
            count = counter(self._engine)
            context = known_context(self._engine.info(), self._overflow)
            run = Compaction(self.conversation, count, context)
            while (request := run.request()) is not None:
                self.terminal.progress(f"summing up, {run.progress:.0%} read")
                asked = msgspec.structs.replace(request, speculation=self.settings.speculation)
                answer = take(self._engine.generate(asked), Display(self.terminal, live=False))
                if answer.interrupted:
                    self.terminal.insist("stopped; nothing was changed")
                    return False
                run.take(answer.texts[0])
        except LocalchatError as problem:
            self._say_error(problem)
            return False
        nodes = run.finish()
        self.changed(*nodes)
        told = f"{len(run.replaced)} messages are sent as this summary from now on"
        self.terminal.insist(f"{told} (/everything takes it back):")
        self.terminal.insist(nodes[0].message.content, dim=True)
        return True


class _Growing:
    """The answer in the conversation while it comes; it enters with its first word."""

    def __init__(self, dialogue: Dialogue, question: Node) -> None:
        self._dialogue = dialogue
        self._question = question
        self._next_s = 0.0
        self.node: Node | None = None

    def grown(self, answer: Answer) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _GROWS_EVERY_S
            self._put(answer, "open")

    def end(self, answer: Answer, engine: Engine, error: LocalchatError | None) -> None:
        state: NodeState = "failed" if error is not None else state_of(answer)
        node = self._put(answer, state)
        node = msgspec.structs.replace(
            node,
            figures=figures_of(answer, engine),
            error=error.message if error is not None else "",
        )
        self._dialogue.conversation.put(node)
        self._dialogue.changed(node)

    def _put(self, answer: Answer, state: NodeState) -> Node:
        conversation = self._dialogue.conversation
        message = Message("assistant", answer.texts[0], reasoning=answer.reasoning[0])
        if self.node is None:
            self.node = conversation.add(message, parent=self._question.id, state=state)
            self._dialogue.changed(self._question)
        else:
            self.node = msgspec.structs.replace(self.node, message=message, state=state)
            conversation.put(self.node)
        self._dialogue.changed(self.node)
        return self.node
