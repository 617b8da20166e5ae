"""Recognize misspelled verbs, and words of other programs.

Everything else stays a prompt, such as `help me write a mail`.
"""

from collections.abc import Sequence
from typing import Final

from localchat.errors import UsageError
from localchat.verbs import ALIASES, VERBS, shell_advice

ALSO: Final = "ls (list), help [VERB], version"
"""Other words that the command line accepts, as the help lists them."""

_HELP: Final = ("help", "version")
_MIN_LETTERS: Final = 3
_MAX_ADDED_LETTERS: Final = 2
"""Limits on a typo: half of all shorter words resemble a verb, and long words contain verbs."""


def without_alias(args: list[str]) -> list[str]:
    """Replace an alias at the beginning by its verb."""
    if args and args[0] in ALIASES:
        return [*ALIASES[args[0]], *args[1:]]
    return args


def translate(args: list[str]) -> list[str]:
    """Return the flags that `help`, `help VERB` and `version` stand for, or the arguments themselves."""
    match args:
        case ["help"]:
            return ["--help"]
        case ["help", verb] if verb in VERBS or verb in ALIASES:
            return [verb, "--help"]
        case ["help", ("history" | "config") as verb, *subcommands]:
            return [verb, *subcommands, "--help"]
        case ["version"]:
            return ["--version"]
    return args


def refuse_meant_verb(words: Sequence[str], as_prompt: str) -> None:
    """Raise UsageError if one or two words were certainly meant as a verb.

    `as_prompt` is the command line that sends the words as a prompt.
    """
    hint = f"To ask the model: {as_prompt}"
    first = words[0]
    if len(words) > 2 or any(arg.split()[1:] for arg in words):
        return
    if first in _HELP:
        if len(words) == 2 and (verb := similar_verb(words[1], alone=False)):
            raise UsageError(
                f"there is no verb {words[1]!r}; did you mean localchat help {verb}?", hint=hint
            )
        return
    if advice := shell_advice(first.lower()):
        raise UsageError(f"there is no verb {first!r}", hint=f"{advice}\n{hint}")
    verb = similar_verb(first, alone=len(words) == 1)
    if verb is not None:
        verb = " ".join(ALIASES.get(verb, (verb,)))
        raise UsageError(f"there is no verb {first!r}; did you mean {verb}?", hint=hint)


def similar_verb(typed: str, *, alone: bool = True) -> str | None:
    """Return the verb that a word probably stands for, or None.

    `alone`: nothing follows the word, so that less similarity is enough.
    """
    from localchat.suggestions import closest

    if len(typed) < _MIN_LETTERS:
        return typed if typed in VERBS else None
    # `hello` resembles `help` as much as a typo resembles a short verb.
    verb_similarity = 0.75
    if alone:
        verb_similarity = 0.66
    for names, similarity in ((_HELP, 0.75), (VERBS, verb_similarity)):
        near = [
            name
            for name in names
            if name[0] == typed[:1].lower() and abs(len(name) - len(typed)) <= _MAX_ADDED_LETTERS
        ]
        if similar := closest(typed, near, min_similarity=similarity):
            return similar[0]
    return None
