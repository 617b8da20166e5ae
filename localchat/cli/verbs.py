"""The verbs and where each lives, so that `--help` names them all without importing one."""

from typing import Final, NamedTuple


class Verb(NamedTuple):
    """`module` holds the click command as `command`; `about` is its line in the overview."""

    module: str
    about: str


VERBS: Final = {
    "run": Verb("localchat.cli.run", "Chat with a model, or ask it one thing."),
    "serve": Verb("localchat.cli.serve", "Serve models to editors and programs."),
    "pull": Verb("localchat.cli.pull", "Fetch a model, or the rest of it."),
    "list": Verb("localchat.cli.list", "List the models on this machine."),
    "show": Verb("localchat.cli.show", "Say what a model is and what it can do."),
    "fit": Verb("localchat.cli.fit", "Say whether a model fits into memory, and what would help."),
    "cp": Verb("localchat.cli.cp", "Give a model another name."),
    "rm": Verb("localchat.cli.rm", "Remove models, aliases and imported links."),
    "import": Verb(
        "localchat.cli.import_", "Use a model file under a name, or all models of a folder."
    ),
    "history": Verb("localchat.cli.history", "List, search, show and export conversations."),
    "ps": Verb("localchat.cli.ps", "List the models that a running server has loaded."),
    "stop": Verb("localchat.cli.stop", "End the running server, or unload one of its models."),
    "doctor": Verb("localchat.cli.doctor", "Say what this machine and this build can do."),
    "config": Verb("localchat.cli.config", "Show and change settings."),
    "completion": Verb("localchat.cli.completion", "Print the completion script of a shell."),
}

ALIASES: Final = {"ls": "list"}
"""Other words for verbs, as other programs call them."""


def meant(word: str) -> str | None:
    """The verb that a lone word was probably meant to be: within two letters of it.

    A verb of three letters or fewer is that near to half of all short words (`hi` and `fit`), so there
    one letter counts, or two behind the same first letter.
    """
    distances = {verb: _distance(word.lower(), verb) for verb in VERBS}
    near = [
        verb
        for verb, distance in distances.items()
        if distance <= (2 if len(verb) > 3 or (len(verb) == 3 and word[:1] == verb[0]) else 1)
    ]
    return min(near, key=lambda verb: distances[verb], default=None)


def _distance(one: str, other: str) -> int:
    """Letters to insert, delete or replace (Levenshtein), row by row."""
    row = list(range(len(other) + 1))
    for done, letter in enumerate(one, start=1):
        diagonal, row[0] = row[0], done
        for column, wanted in enumerate(other, start=1):
            replaced = diagonal + (letter != wanted)
            diagonal = row[column]
            row[column] = min(replaced, row[column] + 1, row[column - 1] + 1)
    return row[-1]
