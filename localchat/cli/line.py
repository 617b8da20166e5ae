"""A conversation, line by line: for terminals of every kind, for -i, and over a slow connection."""

from localchat.chat.conversation import Conversation
from localchat.cli.conversation_options import opened_for_writing
from localchat.cli.dialogue import Dialogue
from localchat.cli.line_commands import run_command
from localchat.cli.line_input import Keyboard
from localchat.cli.resolve import Setup, opened_engine
from localchat.cli.signals import deferred, immediate
from localchat.errors import ExitCode, LocalchatError
from localchat.history.store import History
from localchat.models.resolve import GUIDE
from localchat.session.commands import is_command


def chat(setup: Setup, keyboard: Keyboard, conversation: Conversation, first: str = "") -> int:
    """Talk until the person leaves; returns the exit code. `first`: a message that is there already."""
    history = opened_for_writing(setup.paths, setup.terminal, wanted=setup.settings.history)
    with history or History.open(None) as kept, opened_engine(setup) as engine:
        if not first and not conversation.nodes:
            _greet(setup)
        with deferred():
            dialogue = Dialogue(setup, engine, kept, conversation)
            try:
                return _talk(setup, keyboard, dialogue, first)
            finally:
                dialogue.close()


def _greet(setup: Setup) -> None:
    """Who has no model but the guide is shown what would run here. The engine loads meanwhile."""
    if setup.model.word != GUIDE or setup.settings.quiet or not setup.terminal.animated:
        return
    from localchat.cli.first_run import welcome
    from localchat.models.onboarding import first_run, is_first_run

    environ = setup.door.environ
    try:
        if is_first_run(setup.paths, environ):
            for line in welcome(first_run(setup.paths, environ)):
                setup.terminal.insist(line)
    except LocalchatError as problem:
        setup.terminal.say(f"what could run here is not known: {problem.message}")


def _talk(setup: Setup, keyboard: Keyboard, dialogue: Dialogue, first: str) -> int:
    if not first:
        setup.terminal.say(f"{setup.model.name}; /help lists the commands, Ctrl+D leaves")
        dialogue.tell_past()
    while True:
        try:
            if first:
                asked, first = first, ""
                dialogue.ask(asked)
            with immediate():
                line = keyboard.read()
            if line is None or line in ("/quit", "/exit", "/bye"):
                if line is None:
                    setup.terminal.insist("")
                return ExitCode.OK
            if is_command(line):
                run_command(dialogue, line)
            elif line:
                dialogue.say(line)
        except KeyboardInterrupt:
            setup.terminal.insist("\n(Ctrl+D leaves)")
