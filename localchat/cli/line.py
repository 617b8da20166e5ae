"""A conversation, line by line: for terminals of every kind, for -i, and over a slow connection."""

from typing import Final

import msgspec

from localchat.cli.advice import with_advice
from localchat.cli.answer import Answer, Display, take
from localchat.cli.converse import tell_engine
from localchat.cli.keyboard import Keyboard
from localchat.cli.setup import Setup, opened_engine, remember, request_for
from localchat.engine.engine import Engine
from localchat.engine.request import Message, Messages
from localchat.errors import ContextExceeded, ExitCode, LocalchatError
from localchat.figures import stats_line

_HELP: Final = """\
/help           this list
/clear          forget the conversation, keep the instructions
/system TEXT    instructions that come before the conversation; without TEXT, show them
/stats          the figures of the last answer
/quit           leave (also Ctrl+D)
\"\"\"             begins and ends a text of several lines
Ctrl+C          stops the answer and keeps what was said"""


def chat(setup: Setup, keyboard: Keyboard, first: str = "") -> int:
    """Talk until the person leaves; returns the exit code. `first`: a message that is there already."""
    with opened_engine(setup) as engine:
        conversation = LineConversation(setup, engine)
        if not first:
            setup.terminal.say(f"{setup.model.name}; /help lists the commands, Ctrl+D leaves")
        while True:
            try:
                if first:
                    asked, first = first, ""
                    conversation.ask(asked)
                line = keyboard.read()
                if line is None or line in ("/quit", "/exit", "/bye"):
                    if line is None:
                        setup.terminal.insist("")
                    return ExitCode.OK
                if line.startswith("/"):
                    conversation.command(line)
                elif line:
                    conversation.ask(line)
            except KeyboardInterrupt:
                # Wherever it comes, also between an answer and the next line: nothing said is lost.
                setup.terminal.insist("\n(Ctrl+D leaves)")


class LineConversation:
    """The messages so far, and the engine that answers them. They outlive an engine that dies: it starts
    again with the next question."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self._setup = setup
        self._settings = msgspec.structs.replace(setup.settings, n=1)
        self._terminal = setup.terminal
        self._engine = engine
        self._told = False
        self._system = setup.settings.system or ""
        self._messages: list[Message] = []
        self._last: Answer | None = None

    def ask(self, text: str) -> None:
        """Answer `text` and keep both. A refusal is said, and the conversation stays as it was."""
        settings, terminal = self._settings, self._terminal
        question = Message("user", text)
        system = (Message("system", self._system),) if self._system else ()
        messages = Messages((*system, *self._messages, question), thinking=settings.think)
        display = Display(
            terminal,
            reasoning=not (settings.hide_reasoning or settings.quiet),
            begun=self._tell_engine,
        )
        try:
            answer = take(self._engine.generate(request_for(settings, messages)), display)
        except LocalchatError as problem:
            self._refused(problem)
            return
        terminal.end_answer(empty=not answer.interrupted)
        self._messages += [
            question,
            Message("assistant", answer.texts[0], reasoning=answer.reasoning[0]),
        ]
        self._last = answer
        remember(self._setup)
        if answer.interrupted:
            terminal.say("stopped; what was said stays")
        elif settings.stats and answer.done:
            terminal.insist(stats_line(answer.done))

    def command(self, line: str) -> None:
        """A line that begins with a slash."""
        name, _, rest = line.partition(" ")
        say = self._terminal.insist
        match name:
            case "/help" | "/?":
                say(_HELP)
            case "/clear" | "/new":
                self._messages.clear()
                say("the conversation is empty")
            case "/system" if rest.strip():
                self._system = rest.strip()
                say("the instructions are set")
            case "/system":
                say(self._system or "there are no instructions")
            case "/stats":
                done = self._last.done if self._last else None
                say(stats_line(done) if done else "there are no figures yet")
            case _:
                say(f"there is no command {name}; /help lists them")

    def _refused(self, problem: LocalchatError) -> None:
        self._terminal.end_answer(empty=False)
        if isinstance(problem, ContextExceeded):
            problem = with_advice(problem, self._engine)
        self._terminal.insist(f"localchat: {problem.message}")
        for line in problem.hint.splitlines():
            self._terminal.insist(f"  {line}")
        if isinstance(problem, ContextExceeded) and self._messages:
            self._terminal.insist("  or begin anew: /clear")

    def _tell_engine(self) -> None:
        if not self._told:
            self._told = True
            tell_engine(self._terminal, self._engine)
