"""Recognize misspelled verbs, and verbs of other programs.

Everything else stays a prompt, such as `help me write a mail`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from localchat.errors import UsageError
from localchat.verbs import ALIASES, VERBS, shell_advice

ALSO: Final = "chat [MODEL], ask PROMPT, models (list), ls (list), help [VERB], version"
"""Other words that the command line accepts, as the help lists them."""

_HELP: Final = ("help", "version")
_LONG_ALIASES: Final = tuple(alias for alias in ALIASES if len(alias) > 3)
"""Aliases that are long enough to be recognized with a typo."""
_LONG_WORD: Final = "models"
"""The only word of `translate` that is long enough to be recognized with a typo."""


def without_alias(args: list[str]) -> list[str]:
    """Replace an alias at the beginning by its verb."""
    if args and args[0] in ALIASES:
        return [*ALIASES[args[0]], *args[1:]]
    return args


class Translation(NamedTuple):
    """Meaning of words of other programs."""

    args: list[str]
    """Arguments of a verb, or of a prompt."""
    is_prompt: bool = False


def translate(args: Sequence[str]) -> Translation | None:
    """Translate words of other programs, such as `ollama` and `llm`. None if there is nothing to translate."""
    first, *others = args
    has_only_flags = all(arg.startswith("-") for arg in others)
    match first, others:
        case ["help", []]:
            return Translation(["--help"])
        case ["help", [verb]] if verb in VERBS or verb in ALIASES:
            return Translation([verb, "--help"])
        case ["help", [("history" | "config") as verb, *subcommands]]:
            return Translation([verb, *subcommands, "--help"])
        case ["version", []]:
            return Translation(["--version"])
        case ["models", _] if has_only_flags:
            return Translation(["list", *others])
        case ["chat", [model]] if _is_word(model):
            return Translation(["run", model])
        case ["chat", [model, *_]] if _is_word(model) and any(sign in model for sign in ":/."):
            return Translation(["run", *others])
        case ["chat", _] if has_only_flags or others[0].startswith("-"):
            return Translation(others, is_prompt=True)
        case ["ask", [] | [_]]:
            return Translation(others if has_only_flags else ["--", *others], is_prompt=True)
        case ["ask", [prompt, *_]] if not _is_word(prompt):
            return Translation(others, is_prompt=True)
    return None


def _is_word(arg: str) -> bool:
    """Return True for an argument that is neither a flag nor a quoted sentence."""
    return not arg.startswith("-") and not arg.split()[1:]


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

    names = [*VERBS, *_LONG_ALIASES, *_HELP]
    if alone:
        names.append(_LONG_WORD)
    # Half of all short words resemble a short verb (`it` and `fit`). Long words contain verbs (`important`).
    candidates = [
        name
        for name in names
        if abs(len(name) - len(typed)) <= 2 and (len(name) > 3 or typed[:1].lower() == name[0])
    ]
    typos = [name for name in candidates if _is_typo(typed.lower(), name)]
    if typos:
        return typos[0]
    if not alone:
        return None
    # `hello` resembles `help` as much as a typo resembles a longer verb.
    candidates = [name for name in candidates if name not in _HELP]
    return next(iter(closest(typed, candidates, min_similarity=0.66)), None)


def _is_typo(typed: str, verb: str) -> bool:
    """Return True if one letter is missing, added, changed or swapped with its neighbor."""
    if typed == verb:
        return True
    index = 0
    while index < min(len(typed), len(verb)) and typed[index] == verb[index]:
        index += 1
    typed_tail = typed[index:]
    verb_tail = verb[index:]
    return (
        typed_tail[1:] == verb_tail
        or typed_tail == verb_tail[1:]
        or typed_tail[1:] == verb_tail[1:]
        or (typed_tail[:2] == verb_tail[1::-1] and typed_tail[2:] == verb_tail[2:])
    )
