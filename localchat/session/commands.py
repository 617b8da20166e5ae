"""Table of slash commands for completion, help and the command palette."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from localchat.errors import UsageError
from localchat.suggestions import did_you_mean
from localchat.verbs import ALIASES, VERBS, slash_advice


class Command(NamedTuple):
    """One slash command."""

    name: str
    arguments: str
    """As help shows them."""
    about: str
    required: bool = False
    """It does nothing without an argument."""
    aliases: tuple[str, ...] = ()


COMMANDS: Final = (
    Command("model", "[NAME]", "Choose the model; the conversation continues."),
    Command("new", "", "Begin a new conversation; this one stays in the history."),
    Command("clear", "", "The same as /new, with the same instructions."),
    Command("system", "[TEXT]", "Set the instructions that come first; without TEXT, show them."),
    Command("set", "[KEY VALUE]", "Change a parameter; without one, all of them with their cost."),
    Command("think", "[on|off|auto]", "Let the model reason before it answers, or not."),
    Command(
        "tries", "HOW", "For the next message: vote N, best N [judge], or critique.", required=True
    ),
    Command("regen", "", "Answer the last question again; the old answer stays as a branch."),
    Command("edit", "", "Change the last question and send it as a new branch."),
    Command("undo", "", "Undo the last question and its answer."),
    Command("compact", "", "Summarize the conversation, and send the summary instead."),
    Command("everything", "", "Send all messages again that were left out or summarized."),
    Command("copy", "[N|code [N]]", "Copy the last answer, N messages, or code by its number."),
    Command("export", "[FILE]", "Write the conversation to a file: Markdown, or JSON by its name."),
    Command("search", "[TEXT]", "Find text in this conversation."),
    Command("history", "", "Find, open, rename and delete conversations."),
    Command("stats", "", "The metrics of the last answer, and the panel."),
    Command("fit", "[MODEL]", "Check whether a model fits in memory."),
    Command("pull", "NAME", "Download a model in the background.", required=True),
    Command("help", "", "Keys and commands.", aliases=("?",)),
    Command("quit", "", "Quit; everything is saved.", aliases=("exit", "bye")),
)


class ShellQuestion(NamedTuple):
    """A question that a command of the shell answers."""

    asked: str
    commands: tuple[str, ...]
    """Without the name of the program, in the order to run them."""


QUESTIONS: Final = (
    ShellQuestion("Does it fit?", ("fit MODEL",)),
    ShellQuestion("Which quantization should I take?", ("fit MODEL", "quality A B")),
    ShellQuestion("Is the smaller one still good?", ("quality A B",)),
    ShellQuestion("How many users can it serve?", ("bench MODEL", "plan MODEL --users N")),
    ShellQuestion("Why is it slow?", ("doctor", "bench MODEL", "tune MODEL")),
    ShellQuestion("Is my build good?", ("doctor",)),
)

_BY_NAME: Final = {
    word: command for command in COMMANDS for word in (command.name, *command.aliases)
}


class CommandCall(NamedTuple):
    """A command with its argument, which is stripped and may be empty."""

    command: Command
    argument: str


def is_command(text: str) -> bool:
    """Whether a message is a command. One that begins with a path, as a pasted error may, is text."""
    word = text.split(maxsplit=1)[0] if text.startswith("/") else ""
    return bool(word) and "/" not in word[1:]


def is_known(word: str) -> bool:
    """Whether a word with its slash is a complete command."""
    return word.removeprefix("/").lower() in _BY_NAME


def instead(word: str, names: Sequence[str] = ()) -> str:
    """A hint for a word without its slash that is no command. names: those there are; none: the screen's."""
    from localchat.config.settings import KEYS, find_key  # the questions are shown without settings

    meant = word.lower()
    if advice := slash_advice(meant):
        return f"use {advice}"
    if meant in VERBS or meant in ALIASES:
        verb = " ".join(ALIASES.get(meant, (meant,)))
        return f"in the shell there is `localchat {verb}`"
    keys = [key for key in KEYS if key.startswith(meant)] if len(meant) > 1 else []
    if len(keys) == 1 and not matching(meant):
        return f"use /set {keys[0]} VALUE"
    try:
        return f"use /set {find_key(meant, '')} VALUE"
    except UsageError:
        return did_you_mean(meant, names or [one.name for one in COMMANDS])


def parse(line: str) -> CommandCall:
    """Parse a line that begins with a slash. Raises UsageError with the nearest command."""
    word, _, rest = line.removeprefix("/").partition(" ")
    if "\n" in word:
        word, _, rest = line.removeprefix("/").partition("\n")
    command = _BY_NAME.get(word.strip().lower())
    if command is None:
        raise UsageError(
            f"there is no command /{word}",
            hint=f"{instead(word)}; to send a text that begins with a slash, put a space before it",
        )
    argument = rest.strip()
    if command.required and not argument:
        raise UsageError(f"/{command.name} needs {command.arguments}", hint=command.about)
    return CommandCall(command, argument)


def matching(prefix: str) -> tuple[Command, ...]:
    """The commands that begin with `prefix` (without its slash), in the order of the table."""
    start = prefix.lower()
    return tuple(
        command
        for command in COMMANDS
        if any(word.startswith(start) for word in (command.name, *command.aliases))
    )
