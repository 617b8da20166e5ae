"""Line mode: a conversation on a plain terminal, for `-i`, dumb terminals and slow connections.

The chat session runs on an event loop of the main thread, one call at a time. Between two calls, the line mode
reads the keyboard. Ctrl+C during a call stops the answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from localchat.chat import ID_DIGITS
from localchat.chat.answer_end import end_advice, end_sentence
from localchat.chat.conversation import NO_QUESTION, Conversation, Node, Question, ToolRun
from localchat.chat.overflow import Overflow, OverflowChoice, unsent_sentence
from localchat.chat.prompt_messages import left_out
from localchat.cli.chat.conversation_options import open_for_session
from localchat.cli.chat.json_report import context_line
from localchat.cli.chat.memory_advice import add_load_steps, with_prompt_steps
from localchat.cli.chat.prompt import with_named_files
from localchat.cli.chat.session_context import session_context
from localchat.cli.chat.terminal_consent import TerminalConsent, open_consent
from localchat.cli.output import table
from localchat.cli.resolve import Setup, model_label, opened_engine, remember
from localchat.cli.signals import calling, deferred, immediate
from localchat.cli.streams import Terminal
from localchat.engine.interface import Engine
from localchat.engine.stats_line import stats_line
from localchat.errors import (
    ContextExceeded,
    DoesNotFit,
    EngineClosed,
    ExitCode,
    HistoryUnusable,
    LocalchatError,
    NetworkError,
)
from localchat.history.store import History
from localchat.models.resolve import GUIDE
from localchat.sanitize import sanitize_line
from localchat.session.blocks import (
    OVERFLOW_PREFIX,
    AnswerBlock,
    Block,
    NoticeBlock,
    ReasoningBlock,
    ToolCallBlock,
    UserBlock,
)
from localchat.session.command_runner import (
    AskQuestion,
    CommandRunner,
    Hint,
    LeaveConversation,
    LongCommand,
    NewConversation,
    OpenPart,
    Output,
    QuestionUndone,
    Quit,
    Reply,
    SetupChanged,
)
from localchat.session.commands import LINE_COMMANDS, is_command
from localchat.session.engine_holder import EngineHolder
from localchat.session.outcome import Outcome
from localchat.session.progress import progress_words
from localchat.session.recorder import ConversationRecorder
from localchat.session.session import ChatSession
from localchat.units import counted

if TYPE_CHECKING:
    from localchat.tools.tool import Effect

_T = TypeVar("_T")
_SHOWN_CHARACTERS: Final = 200
"""Longest part of an unsent question that is shown again."""
_SHOWN_CONVERSATIONS: Final = 10
_KEYS_HELP: Final = (
    ('"""', "Begin and end a text of several lines."),
    ("Ctrl+C", "Stop the answer and keep the text so far."),
    ("Ctrl+D", "Leave, as /quit does."),
)
_LINE_HELP: Final = {
    "history": "List the latest conversations.",
    "stats": "Show the metrics of the last answer.",
    "help": "Show this list.",
}
"""Help of commands that do less here than on the screen."""


def chat(
    setup: Setup,
    read: Callable[[], str | None],
    conversation: Conversation,
    first: Question = NO_QUESTION,
    *,
    allowed: "frozenset[Effect]" = frozenset(),
) -> int:
    """Run the conversation until the user leaves, and return the exit code. Raises LocalchatError.

    `read` returns the next message, or None at the end, and raises KeyboardInterrupt. `first` is an optional
    first message, with the files that it includes. `allowed`: effects of tools that need no question.
    """
    with open_for_session(setup) as history, opened_engine(setup) as engine:
        if not first and not conversation.nodes:
            _greet(setup)
        with deferred():
            consent = open_consent(setup.terminal)
            repl = Repl(setup, engine, history, conversation, consent=consent, allowed=allowed)
            try:
                return repl.run(read, first)
            finally:
                repl.close()


def _greet(setup: Setup) -> None:
    """Tell a user who only has the guide how to get a model."""
    if setup.model.word != GUIDE or not setup.terminal.animated:
        return
    from localchat.models.onboarding import is_first_run

    try:
        if is_first_run(setup.paths, setup.app.environ):
            setup.terminal.notify(
                "the built-in guide answers; localchat run lists models for this computer"
            )
    except LocalchatError:
        return  # localchat list says what is wrong with the files


class TerminalView:
    """Prints answers and the status of a session to the terminal.

    Of the notices only warnings are printed, because the others name keys and screens. The line mode prints
    outcomes instead.
    """

    def __init__(self, terminal: Terminal, *, reasoning: bool, print_text: bool = True) -> None:
        """`reasoning`: print the reasoning of the model. `print_text`: print the answer."""
        self._terminal = terminal
        self._print_text = print_text
        self._reasoning = reasoning
        self._session: ChatSession | None = None
        self._reasoning_id = ""
        self._engine_shown = False
        self._left_out = 0

    def attach(self, session: ChatSession) -> None:
        """Show the status and the policy of this session."""
        self._session = session
        self._left_out = len(session.conversation.policy.left_out)

    def show(self, blocks: Sequence[Block]) -> None:
        """Print how much is no longer sent, if that grew. The terminal already shows the messages."""
        assert self._session is not None
        conversation = self._session.conversation
        before = self._left_out
        self._left_out = len(conversation.policy.left_out)
        if self._left_out > before:
            messages = len(left_out(conversation))
            sentence = unsent_sentence(messages, conversation.policy.left_out_tokens)
            self._terminal.print_line(f"localchat: {sentence}", dim=True)

    def put(self, block: Block) -> None:
        if isinstance(block, ReasoningBlock):
            self._reasoning_id = block.id
        elif isinstance(block, UserBlock):
            for fold in block.folds:
                if fold.label.startswith("@"):  # documents, which are known only now
                    self._terminal.notify(fold.label)
        elif isinstance(block, ToolCallBlock) and block.run is not None:
            self._show_call(block, block.run)
        elif isinstance(block, NoticeBlock) and block.kind == "warning" and not block.offers:
            self._terminal.warn(block.text)  # such as: a tool server did not start

    def _show_call(self, block: ToolCallBlock, run: ToolRun) -> None:
        """Print a call once it has ended, on one line. Until then it is the progress line."""
        name = sanitize_line(f"{block.name} {run.title or block.arguments}"[:_SHOWN_CHARACTERS])
        if run.state in ("asking", "running"):
            self._terminal.progress(name)
            return
        if run.state == "done":
            size = counted(run.characters, "character")
            outcome = f"done · {run.seconds:.1f} s · {size}"
        else:
            reason = block.result.removeprefix("Error: ").partition("\n")[0]
            outcome = f"{run.state}: {sanitize_line(reason[:_SHOWN_CHARACTERS])}"
        self._terminal.print_line(f"  ◆ {name} · {outcome}", dim=True)

    def append_text(self, id_: str, text: str) -> None:
        if id_ != self._reasoning_id:
            if self._print_text:
                self._terminal.answer(text)
        elif self._reasoning:
            self._terminal.reasoning(text)

    def finish(self, block: Block) -> None:
        if isinstance(block, AnswerBlock):
            self._terminal.end_answer(empty=False)

    def remove(self, id_: str) -> None:
        """Do nothing, because a terminal keeps what it has printed."""

    def status_changed(self) -> None:
        assert self._session is not None
        status = self._session.status
        if status.info is not None and not self._engine_shown:
            self._engine_shown = True
            self._terminal.progress("")
            self._terminal.note(context_line(status.info))
        line = status.task
        if not line and status.state in ("queued", "loading", "prefill"):
            line = progress_words(status, time.monotonic())
        self._terminal.progress(line)


class Repl:
    """Reads messages and commands, passes them to a chat session, and prints the outcomes.

    If the engine process ends, the next question starts it again.
    """

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        history: History,
        conversation: Conversation,
        *,
        print_text: bool = True,
        consent: TerminalConsent | None = None,
        allowed: "frozenset[Effect]" = frozenset(),
    ) -> None:
        """`consent` asks about tool calls, except those whose effects are `allowed`."""
        self._setup = setup
        self._terminal = setup.terminal
        self._engine = engine
        self._history = history
        self._offered: Overflow | None = None
        """Choices that the user can take by their number."""
        self._history_failed = False
        settings = msgspec.structs.replace(setup.settings, n=1)
        view = TerminalView(
            setup.terminal,
            reasoning=print_text and not (settings.hide_reasoning or settings.quiet),
            print_text=print_text,
        )
        recorder = ConversationRecorder()
        recorder.attach(history)
        context, model_setup = session_context(setup)
        self._session = ChatSession(
            context,
            EngineHolder.holding(engine),
            model_setup._replace(settings=settings),
            view,
            recorder,
            conversation,
            keep_unanswered=False,
            batch_s=0.0,
        )
        view.attach(self._session)
        self._session.tools.consent = consent
        self._session.tools.allowed = allowed
        self._asked = NO_QUESTION
        """The last question, with its attachments."""
        self._runner = CommandRunner(self._session, "line")
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        """Save what is not saved yet. A failure is printed."""
        try:
            self._loop.run_until_complete(self._session.tools.close())
            self._session.recorder.close()
        except HistoryUnusable as problem:
            self._report_history(problem)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def run(self, read: Callable[[], str | None], first: Question) -> int:
        """Run the conversation until the user leaves, and return the exit code."""
        question = first
        if not question:
            self._terminal.notify(
                f"{model_label(self._setup, self._engine)}; /help lists the commands, Ctrl+D leaves"
            )
            self._show_past()
        while True:
            try:
                if question:
                    first_question = question
                    question = NO_QUESTION  # first, so that Ctrl+C does not ask it again
                    self._ask(first_question)
                with immediate():
                    line = read()
                if line is None:
                    self._terminal.print_line("")
                    return ExitCode.OK
                if not self._enter(line):
                    return ExitCode.OK
            except KeyboardInterrupt:
                self._terminal.print_line("\n(Ctrl+D leaves)")
            except LocalchatError as problem:
                self._print_error(problem)

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run one call of the session. Ctrl+C stops the answer, and a second one ends the call."""
        # Create the task before the handler, so that a deferred Ctrl+C stops an answer that has started.
        task = self._loop.create_task(coroutine)
        try:
            with calling(lambda: self._loop.call_soon_threadsafe(self._session.stop)):
                return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            raise

    def _enter(self, line: str) -> bool:
        """Run a command, take an offered choice by its number, or ask a question. Return False to leave."""
        if is_command(line):
            return self._run_command(line) != "quit"
        choices: dict[str, OverflowChoice] = {}
        if self._offered is not None:
            choices = {
                str(number): choice for number, choice in enumerate(self._offered.choices, 1)
            }
        if line in choices:
            self._choose(choices[line])
        elif line:
            self._ask_line(line)
        return True

    def _ask_line(self, line: str) -> None:
        documents = self._session.context.library.names()
        self._ask(with_named_files(line, self._terminal.notify, documents=documents))

    def _ask(self, question: Question) -> None:
        text = question.text
        self._asked = question
        if text == self._runner.unsent:
            self._runner.unsent = ""
            self._session.recorder.draft("")
        self._offered = None
        is_first = not self._session.conversation.path()
        outcome = self._call(self._session.ask(question))
        self._report(outcome, text, is_first=is_first)

    def ask_once(self, question: Question) -> Outcome:
        """Ask one question, and print what arrives. The caller prints how the answer ended."""
        outcome = self._call(self._session.ask(question))
        self._terminal.end_answer(empty=False)
        self._report_history(self._session.recorder.trouble)
        return outcome

    def _regenerate(self) -> None:
        question = self._session.last_question()
        outcome = self._call(self._session.regenerate())
        assert question is not None  # or regenerating would have failed
        is_first = self._session.conversation.path()[0].id == question.id
        self._report(outcome, question.message.content, is_first=is_first)

    def _report(self, outcome: Outcome, question: str, *, is_first: bool) -> None:
        """Print how an answer ended. `is_first`: the question begins the conversation."""
        node = outcome.node
        problem = outcome.error
        text = node.message.content if node is not None else ""
        self._terminal.end_answer(empty=outcome.end == "complete" and not text)
        match outcome.end:
            case "too_long":
                assert isinstance(problem, ContextExceeded)
                self._report_overflow(problem, outcome.overflow, question, is_first=is_first)
                return
            case "failed":
                assert problem is not None
                if isinstance(problem, DoesNotFit):
                    add_load_steps(problem, self._setup)
                self._print_error(problem)
                if node is None:
                    self._store_unsent(question, problem)
                    return
            case "stopped":
                remember(self._setup)
                if text:
                    self._terminal.notify("stopped; the text so far is kept")
                else:
                    self._terminal.notify("stopped before the first token")
            case "complete":
                self._print_early_end(node)
                self._print_stats()
                if self._setup.settings.screen_reader:
                    self._terminal.print_line("End of answer.")
        self._report_history(self._session.recorder.trouble)

    def _print_early_end(self, node: Node | None) -> None:
        """Print the limit or the repetition that ended an answer."""
        if node is None or node.end is None:
            return
        max_tokens = 0
        if node.metrics is not None and node.metrics.done is not None:
            max_tokens = node.metrics.done.usage.completion_tokens
        limits = (max_tokens, self._engine.info().context_tokens)
        advice = end_advice(node.end, *limits)
        self._terminal.print_line(f"localchat: {end_sentence(node.end, *limits)} {advice}")

    def _store_unsent(self, question: str, problem: LocalchatError) -> None:
        """Store a question that did not reach its engine. A rejected one would be rejected again."""
        if isinstance(problem, NetworkError) and question:
            self._runner.unsent = question
            self._session.recorder.draft(question)
            self._terminal.print_line("  the question is stored; /send sends it again")

    def _print_stats(self) -> None:
        done = self._session.status.done
        if self._setup.settings.stats and done is not None:
            self._terminal.print_line(stats_line(done))
            self._terminal.print_line(self._engine.info().why)

    def _print_error(self, problem: LocalchatError) -> None:
        self._terminal.print_line(f"localchat: {problem.message}")
        for line in problem.hint.splitlines():
            self._terminal.print_line(f"  {line}")

    def _report_history(self, problem: LocalchatError | None) -> None:
        """Print once that the history cannot be saved. The conversation continues."""
        if problem is not None and not self._history_failed:
            self._history_failed = True
            self._terminal.print_line(
                f"localchat: this conversation is not saved: {problem.message}"
            )

    def _show_past(self) -> None:
        conversation = self._session.conversation
        if not conversation.nodes:
            return
        messages = counted(len(conversation.path()), "message")
        self._terminal.notify(f"continuing {conversation.title!r}, {messages}")
        self._runner.unsent = self._history.draft(conversation.id)
        if self._runner.unsent:
            line = " ".join(self._runner.unsent[:_SHOWN_CHARACTERS].split())
            if line != self._runner.unsent:
                line += "…"
            self._terminal.print_line(f"not sent yet: {line}")
            self._terminal.print_line("  /send sends it")

    def _report_overflow(
        self, problem: ContextExceeded, overflow: Overflow | None, question: str, *, is_first: bool
    ) -> None:
        """Print the choices for a question that is too long, and store the question."""
        if is_first:
            self._print_error(with_prompt_steps(problem, self._engine))
            return
        if overflow is None or not overflow.choices:
            self._print_error(with_prompt_steps(problem, self._engine))
            self._terminal.print_line("  or start a new conversation: /clear")
            return
        self._offered = overflow
        self._runner.unsent = question
        self._session.recorder.draft(question)
        for line in offer_lines(overflow):
            self._terminal.print_line(line)

    def _choose(self, choice: OverflowChoice) -> None:
        """Apply a choice, and ask the stored question."""
        from localchat.session.too_long import apply_choice

        question = self._asked
        if question.text != self._runner.unsent:
            question = Question(self._runner.unsent)
        match choice.action:
            case "leave_out_oldest":
                self._call(apply_choice(self._session, f"{OVERFLOW_PREFIX}{choice.action}"))
            case "compact":
                if self._run_command("/compact") == "failed":
                    return
            case _:  # the choice needs another load
                self._terminal.print_line("leave with Ctrl+D and run the command of the choice")
                return
        self._ask(question)

    def _run_command(self, line: str) -> Literal["done", "failed", "quit"]:
        try:
            reply = self._runner.run(line)
            if isinstance(reply, Quit):
                return "quit"
            self._print_reply(reply)
        except EngineClosed:
            self._terminal.print_line("stopped; nothing was changed")
            return "failed"
        except LocalchatError as problem:
            self._print_error(problem)
            return "failed"
        return "done"

    def _print_reply(self, reply: Reply) -> None:
        write = self._terminal.print_line
        match reply:
            case Output(text):
                write(text)
            case Hint(text, detail):
                write(text)
                if detail:
                    write(detail, dim=True)
            case QuestionUndone(_, hint):
                write(hint)
                if restored := self._session.restored:
                    write(restored)
            case NewConversation(hint):
                self._offered = None
                write(hint)
            case SetupChanged() | LeaveConversation():
                pass  # only /tools changes the setup here, and describes it
            case AskQuestion("" as text):
                self._regenerate()
            case AskQuestion(text):
                self._ask(Question(text))
            case LongCommand(replies):
                question = self._call(self._print_replies(replies))
                if question is not None:
                    self._print_reply(question)
            case OpenPart("help"):
                self._print_help()
            case OpenPart("history"):
                self._print_history()
            case OpenPart("metrics", text):
                write(text)
                write(self._engine.info().why)
            case _:
                raise AssertionError(f"{reply} is for the screen only")

    async def _print_replies(self, replies: AsyncIterator[Reply]) -> AskQuestion | None:
        """Print replies. Return a question, because asking it runs the event loop again."""
        async for reply in replies:
            if isinstance(reply, AskQuestion):
                return reply
            self._print_reply(reply)
        return None

    def _print_help(self) -> None:
        rows = [
            (f"/{row.name} {row.arguments}".rstrip(), _LINE_HELP.get(row.name, row.about))
            for row in LINE_COMMANDS
        ]
        rows += _KEYS_HELP
        for line in table((), rows):
            self._terminal.print_line(line)

    def _print_history(self) -> None:
        with suppress(HistoryUnusable):  # `recorder.trouble` reports it
            self._session.recorder.flush()
        conversations = self._history.list(_SHOWN_CONVERSATIONS)
        for row in conversations:
            self._terminal.print_line(f"{row.id[:ID_DIGITS]}  {sanitize_line(row.title)}")
        if conversations:
            self._terminal.print_line(
                "localchat --conversation ID continues one, localchat history search WORDS finds one"
            )
        else:
            self._terminal.print_line("there are no conversations yet")


def offer_lines(overflow: Overflow) -> Iterator[str]:
    """Yield numbered choices for a prompt that is too long."""
    yield f"localchat: {overflow.sentence}; the question is stored. Type a number, or continue otherwise:"
    for number, choice in enumerate(overflow.choices, start=1):
        yield f"  {number}. {choice.label}{_command_for(choice)}"
    yield "  or start a new conversation: /clear"


def _command_for(choice: OverflowChoice) -> str:
    """Return the command for a choice that needs another load. It continues the conversation."""
    if choice.flags:
        return f": leave, then localchat -c {choice.flags}"
    return ""
