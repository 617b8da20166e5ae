"""Record a one-shot prompt: the question at once, and the answer while it grows.

A thread opens the history (sqlite) and records the answer at fixed intervals. So no answer waits for the
history or fails with it, and a killed process loses the last second at most.
"""

import threading
from contextlib import suppress

from localchat.chat.conversation import Conversation, Node, NodeState
from localchat.cli.chat.conversation_options import open_to_record
from localchat.cli.chat.received_answer import ReceivedAnswer
from localchat.cli.resolve import Setup
from localchat.engine.interface import Engine
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
        history = open_to_record(self._setup)
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
        for choice in self._answer.choices:
            node = choice.take_snapshot()
            if node is not None:
                self._changed(node)

    def finish(self, engine: Engine, error: LocalchatError | None = None) -> None:
        """Record the end of the answer. Remove a question that failed or was stopped without an answer."""
        self._ended.set()
        self._thread.join()
        if answered := any(choice.node for choice in self._answer.choices):
            self._record_end(engine, error)
        try:
            if not answered and (error is not None or self._answer.interrupted):
                self._recorder.withdraw(self._question)
            self._recorder.close()
        except HistoryUnusable as problem:
            self._setup.terminal.notify(f"this conversation is not saved: {problem.message}")

    def _record_end(self, engine: Engine, error: LocalchatError | None) -> None:
        info = None
        with suppress(LocalchatError):  # the engine has ended
            info = engine.info()
        for number, choice in enumerate(self._answer.choices):
            if number and choice.node is None:
                continue
            state: NodeState | None = None
            if choice.finished is None:
                state = "stopped"
            error_message = ""
            if error is not None:
                state = "failed"
                error_message = error.message
            self._changed(choice.end(info, state, error_message))

    def _changed(self, node: Node) -> None:
        # `--continue` goes on from the head, so it must be the first choice, as in `--json`.
        answers = (choice.node for choice in self._answer.choices)
        self._conversation.head = next(answer.id for answer in answers if answer is not None)
        self._recorder.changed(node)
