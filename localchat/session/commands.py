"""Table of slash commands for completion and help."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from localchat.errors import UsageError
from localchat.suggestions import did_you_mean
from localchat.verbs import ALIASES, VERBS, slash_advice

FrontEnd: TypeAlias = Literal["screen", "line"]
"""The screen, or the line mode of `localchat run -i`."""


class Command(NamedTuple):
    """A slash command."""

    name: str
    arguments: str
    """Arguments as the help shows them."""
    about: str
    required: bool = False
    """Whether the command needs an argument."""
    aliases: tuple[str, ...] = ()
    line_advice: str = ""
    """Advice for the line mode. Empty for a command that works there."""


COMMANDS: Final = (
    Command(
        "model",
        "[NAME]",
        "Choose the model; the conversation continues.",
        line_advice="leave, and continue with another model: localchat -c -i -m MODEL",
    ),
    Command("new", "", "Begin a new conversation; this one stays in the history."),
    Command("clear", "", "The same as /new, with the same instructions."),
    Command(
        "system", "[TEXT|off]", "Set the instructions that come first; without TEXT, show them."
    ),
    Command(
        "set",
        "[KEY VALUE]",
        "Change a parameter; without one, list all of them.",
        line_advice="leave, and continue with a flag, such as: localchat -c -i --temp 0.2",
    ),
    Command(
        "think",
        "[on|off|auto]",
        "Let the model reason before it answers, or not.",
        line_advice="leave, and continue with a flag: localchat -c -i --think or --no-think",
    ),
    Command("tools", "[NAMES|off]", "Tools that the model may call; without NAMES, list them."),
    Command("regen", "", "Answer the last question again; the old answer stays as a branch."),
    Command(
        "edit",
        "",
        "Change the last question and send it as a new branch.",
        line_advice="/undo takes the last question back, and you type it again",
    ),
    Command("undo", "", "Undo the last question, its answer and its writes to files."),
    Command("compact", "", "Summarize the conversation, and send the summary instead."),
    Command("everything", "", "Send all messages again that were left out or summarized."),
    Command(
        "copy",
        "[N|code [N]]",
        "Copy the last answer, N messages, or code by its number.",
        line_advice="/export writes the conversation to a file",
    ),
    Command("export", "[FILE]", "Write the conversation to a file: Markdown, or JSON by its name."),
    Command("history", "", "Find, open, rename and delete conversations."),
    Command("stats", "", "The metrics of the last answer, and the panel."),
    Command(
        "fit",
        "[MODEL]",
        "Check whether a model fits in memory.",
        line_advice="in the shell there is `localchat fit`",
    ),
    Command(
        "pull",
        "NAME",
        "Download a model in the background.",
        required=True,
        line_advice="in the shell there is `localchat pull`",
    ),
    Command("help", "", "Keys and commands.", aliases=("?",)),
    Command("quit", "", "Quit; everything is saved.", aliases=("exit", "bye")),
)
"""Commands of the screen."""

LINE_COMMANDS: Final = (
    *(command for command in COMMANDS if not command.line_advice),
    Command("send", "", "Send the question that could not be sent."),
)
"""Commands of the line mode."""


class ShellQuestion(NamedTuple):
    """A question that a command of the shell answers."""

    question: str
    commands: tuple[str, ...]
    """Command lines without the name of the program, in the order to run them."""


QUESTIONS: Final = (
    ShellQuestion("Does it fit?", ("fit MODEL",)),
    ShellQuestion("Which quantization should I take?", ("fit MODEL", "quality A B")),
    ShellQuestion("Is the smaller one still good?", ("quality A B",)),
    ShellQuestion("How many users can it serve?", ("bench MODEL",)),
    ShellQuestion("Why is it slow?", ("doctor", "bench MODEL")),
    ShellQuestion("Is my build good?", ("doctor",)),
)

_BY_NAME: Final = {
    name: command
    for command in (*COMMANDS, *LINE_COMMANDS)
    for name in (command.name, *command.aliases)
}


class CommandCall(NamedTuple):
    """A command and its argument."""

    command: Command
    argument: str
    """Stripped; may be empty."""


def is_command(text: str) -> bool:
    """Return True if a message is a command.

    A message that starts with a path, such as a pasted error, is text.
    """
    if not text.startswith("/"):
        return False
    name = text.split(maxsplit=1)[0]
    return "/" not in name[1:]


def is_known(name: str) -> bool:
    """Return True if a name with its slash is a command of the screen."""
    command = _BY_NAME.get(name.removeprefix("/").lower())
    return command in COMMANDS


def instead(name: str, commands: Sequence[Command] = COMMANDS) -> str:
    """Return a hint for a name without its slash that is not a command."""
    # Imported late: the first frame needs the commands, but no settings.
    from localchat.config.parameters import PARAMETERS
    from localchat.config.settings import find_key

    name = name.lower()
    if advice := slash_advice(name):
        return f"use {advice}"
    if name in VERBS or name in ALIASES:
        verb = " ".join(ALIASES.get(name, (name,)))
        return f"in the shell there is `localchat {verb}`"
    keys = [key for key in PARAMETERS if key.startswith(name)]
    if len(name) > 1 and len(keys) == 1 and not matching(name):
        return f"use /set {keys[0]} VALUE"
    try:
        return f"use /set {find_key(name, '')} VALUE"
    except UsageError:
        return did_you_mean(f"/{name}", [f"/{command.name}" for command in commands])


def parse(line: str, front_end: FrontEnd = "screen") -> CommandCall:
    """Parse a line that begins with a slash. Raises UsageError with the nearest command."""
    commands: Sequence[Command] = COMMANDS
    if front_end != "screen":
        commands = LINE_COMMANDS
    name, _, argument = line.removeprefix("/").partition(" ")
    if "\n" in name:
        name, _, argument = line.removeprefix("/").partition("\n")
    command = _BY_NAME.get(name.strip().lower())
    if command in COMMANDS and command not in commands:
        raise UsageError(
            f"/{name} is a command of the screen",
            hint=f"{command.line_advice}\n/help lists the commands that work here",
        )
    if command is None or command not in commands:
        raise UsageError(
            f"there is no command /{name}",
            hint=f"{instead(name, commands)}\n"
            "to send a text that begins with a slash, put a space before it",
        )
    argument = argument.strip()
    if command.required and not argument:
        raise UsageError(f"/{command.name} needs {command.arguments}", hint=command.about)
    return CommandCall(command, argument)


def matching(prefix: str) -> tuple[Command, ...]:
    """Return the commands of the screen that begin with `prefix`, in table order."""
    prefix = prefix.lower()
    return tuple(
        command
        for command in COMMANDS
        if any(name.startswith(prefix) for name in (command.name, *command.aliases))
    )
