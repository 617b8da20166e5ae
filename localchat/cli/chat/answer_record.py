"""Record a one-shot prompt: the question at once, and the answer while it grows.

A thread opens the history (sqlite) and records the answer at fixed intervals. So no answer waits for the
history or fails with it, and a killed process loses the last second at most.
"""

import threading

import msgspec

from localchat.chat.answer_end import ended_early
from localchat.chat.conversation import (
    END_STATES,
    AnswerMetrics,
    Conversation,
    Node,
    NodeState,
)
from localchat.cli.chat.conversation_options import open_to_record
from localchat.cli.chat.render_answer import ReceivedAnswer
from localchat.cli.resolve import Setup
from localchat.engine.events import Finished
from localchat.engine.interface import Engine
from localchat.engine.request import Message
from localchat.errors import HistoryUnusable, LocalchatError
from localchat.session.recorder import SAVE_EVERY_S, ConversationRecorder

_RECORDED_AT_ONCE = 64 << 10
"""Longest question, in characters, that is recorded before the engine accepts it."""


class AnswerRecord:
    """Records one question and its answer. Each choice is a version of the answer."""

    def __init__(
        self, setup: Setup, conversation: Conversation, question: Node, answer: ReceivedAnswer
    ) -> None:
        """Start to record. `answer` grows while it is received."""
        self._setup = setup
        self._conversation = conversation
        self._question = question
        self._answer = answer
        self._nodes: dict[int, Node] = {}
        """Recorded answers by choice."""
        self._size = 0
        self._recorder = ConversationRecorder()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answer record", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._record()
        except OSError as problem:  # such as the limit on open files
            self._setup.terminal.notify(f"this conversation is not saved: {problem.strerror}")

    def _record(self) -> None:
        if not self._wait_for_acceptance():
            return
        enabled = self._setup.settings.history
        history = open_to_record(self._setup.paths, self._setup.terminal, enabled=enabled)
        if history is None:
            return
        self._recorder.attach(history)
        self._recorder.hold(self._conversation)
        self._recorder.changed(self._question)
        while not self._ended.wait(SAVE_EVERY_S):
            self._record_growth()

    def _wait_for_acceptance(self) -> bool:
        """Wait until the engine accepts a large question. Return False if the engine refused it.

        A small question is recorded at once, so that it survives a kill of this process during the load.
        """
        message = self._question.message
        if len(message.content) <= _RECORDED_AT_ONCE and not message.attachments:
            return True
        while self._answer.accepted is None:
            if self._ended.wait(SAVE_EVERY_S):
                return self._answer.accepted is not None
        return True

    def _record_growth(self) -> None:
        # The main thread adds to the answer meanwhile, and `dict` copies it in one step.
        texts = dict(self._answer.texts)
        reasoning = dict(self._answer.reasoning)
        size = sum(map(len, texts.values())) + sum(map(len, reasoning.values()))
        if size == self._size:
            return
        self._size = size
        for choice in sorted({*texts, *reasoning}):
            self._put(choice, texts.get(choice, ""), reasoning.get(choice, ""), "open")

    def finish(self, engine: Engine, error: LocalchatError | None = None) -> None:
        """Record the end of the answer. Remove a question that failed or was stopped without an answer."""
        self._ended.set()
        self._thread.join()
        if answered := bool(self._answer.texts or self._answer.reasoning):
            self._record_end(engine, error)
        try:
            if not answered and (error is not None or self._answer.interrupted):
                self._recorder.withdraw(self._question)
            self._recorder.close()
        except HistoryUnusable as problem:
            self._setup.terminal.notify(f"this conversation is not saved: {problem.message}")

    def _record_end(self, engine: Engine, error: LocalchatError | None) -> None:
        metrics = _metrics(self._answer, engine)
        for choice in sorted({0, *self._answer.texts, *self._answer.reasoning}):
            state = END_STATES[self._answer.reasons.get(choice, "cancelled")]
            error_message = ""
            if error is not None:
                state = "failed"
                error_message = error.message
            self._put(
                choice,
                self._answer.texts[choice],
                self._answer.reasoning[choice],
                state,
                metrics,
                error_message,
                self._answer.ends.get(choice),
            )

    def _put(
        self,
        choice: int,
        text: str,
        reasoning: str,
        state: NodeState,
        metrics: AnswerMetrics | None = None,
        error: str = "",
        end: Finished | None = None,
    ) -> None:
        if not ended_early(end):
            end = None
        message = Message("assistant", text, reasoning=reasoning)
        node = self._nodes.get(choice)
        if node is None:
            node = self._conversation.add(message, parent=self._question.id, state=state)
        node = msgspec.structs.replace(
            node,
            message=message,
            state=state,
            metrics=metrics,
            error=error,
            end=end,
        )
        self._nodes[choice] = node
        self._conversation.put(node)
        # `--continue` goes on from the head, so it must be the first choice, as in `--json`.
        self._conversation.head = self._nodes[min(self._nodes)].id
        self._recorder.changed(node)


def _metrics(answer: ReceivedAnswer, engine: Engine) -> AnswerMetrics | None:
    """Return the metrics for the history, or None if the engine has ended."""
    try:
        info = engine.info()
    except LocalchatError:
        return None
    seed = answer.accepted.seed if answer.accepted else 0
    return AnswerMetrics.of(info, seed, answer.status.done)
