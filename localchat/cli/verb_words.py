"""Understands words that other programs or a slip of the keyboard put where a verb stands.

Everything that is not surely such a word stays a prompt: `help me write a mail` is one.
"""

from collections.abc import Sequence
from typing import Final

from localchat.errors import UsageError
from localchat.verbs import ALIASES, VERBS, shell_advice

ALSO: Final = "chat [MODEL], ask PROMPT, models (list), ls (list), help [VERB], version"
"""What is understood beside the verbs, for the help."""

_HELP: Final = ("help", "version")
_LONG_ALIASES: Final = tuple(alias for alias in ALIASES if len(alias) > 3)
"""Aliases that are long enough to be recognized behind a slip."""
_SPOKEN: Final = "models"
"""Of what `spoken` understands, the word that is long enough to be told from a prompt by a slip."""


def without_alias(args: list[str]) -> list[str]:
    """Replace an alias at the beginning by its verb."""
    if args and args[0] in ALIASES:
        return [*ALIASES[args[0]], *args[1:]]
    return args


def translate(args: Sequence[str]) -> tuple[list[str] | None, list[str] | None]:
    """Return the arguments of a verb or those of a prompt that words of other programs stand for.

    Both are None if the arguments already mean what they say.
    """
    first, *rest = args
    flags_only = all(arg.startswith("-") for arg in rest)
    match first, rest:
        case ["help", []]:
            return ["--help"], None
        case ["help", [verb]] if verb in VERBS or verb in ALIASES:
            return [verb, "--help"], None
        case ["help", [("history" | "config" | "preset") as verb, *subcommands]]:
            return [verb, *subcommands, "--help"], None
        case ["version", []]:
            return ["--version"], None
        case ["models", _] if flags_only:
            return ["list", *rest], None
        case ["chat", [model]] if not model.startswith("-") and not model.split()[1:]:
            return ["run", model], None
        case ["chat", [model, *_]] if _names_a_model(model):
            return ["run", *rest], None
        case ["chat", _] if flags_only or rest[0].startswith("-"):
            return None, rest
        case ["ask", [] | [_]]:
            return None, rest if flags_only else ["--", *rest]
        case ["ask", [prompt, *_]] if prompt.startswith("-") or prompt.split()[1:]:
            return None, rest
    return None, None


def _names_a_model(word: str) -> bool:
    return not word.startswith("-") and not word.split()[1:] and any(sign in word for sign in ":/.")


def refuse_meant_verb(words: Sequence[str], as_prompt: str) -> None:
    """Raise UsageError if the words of a prompt were surely meant as a verb: one word, or one and its
    argument. `as_prompt`: the command line that sends them as a prompt."""
    to_ask = f"To ask the model: {as_prompt}"
    first = words[0]
    if len(words) > 2 or any(word.split()[1:] for word in words):
        return
    if first in _HELP:
        verb = similar_verb(words[-1], alone=False) if len(words) == 2 else None
        if verb is not None:
            raise UsageError(
                f"there is no verb {words[1]!r}; did you mean localchat help {verb}?",
                hint=to_ask,
            )
        return
    if advice := shell_advice(first.lower()):
        raise UsageError(f"there is no verb {first!r}", hint=f"{advice}\n{to_ask}")
    verb = similar_verb(first, alone=len(words) == 1)
    if verb is not None:
        meant = " ".join(ALIASES.get(verb, (verb,)))
        raise UsageError(f"there is no verb {first!r}; did you mean {meant}?", hint=to_ask)


def similar_verb(word: str, *, alone: bool = True) -> str | None:
    """The verb that a word was probably meant to be. `alone`: nothing follows it; less likeness is enough."""
    from localchat.suggestions import closest

    # Short verbs are like half of all short words (`it` and `fit`), and long words contain verbs (`important`).
    candidates = [
        verb
        for verb in (*VERBS, *_LONG_ALIASES, *_HELP, *((_SPOKEN,) if alone else ()))
        if abs(len(verb) - len(word)) <= 2 and (len(verb) > 3 or word[:1].lower() == verb[0])
    ]
    slips = [verb for verb in candidates if _is_slip(word.lower(), verb)]
    if slips or not alone:
        return slips[0] if slips else None
    # `hello` is as like `help` as a slip of a longer verb is.
    candidates = [verb for verb in candidates if verb not in _HELP]
    return next(iter(closest(word, candidates, min_similarity=0.66)), None)


def _is_slip(word: str, verb: str) -> bool:
    """Whether one letter was left out, added, changed or exchanged with its neighbour."""
    if word == verb:
        return True
    same = next(
        (n for n, pair in enumerate(zip(word, verb, strict=False)) if pair[0] != pair[1]), -1
    )
    at = min(len(word), len(verb)) if same < 0 else same
    mine = word[at:]
    its = verb[at:]
    return (
        mine[1:] == its
        or mine == its[1:]
        or mine[1:] == its[1:]
        or (mine[:2] == its[1::-1] and mine[2:] == its[2:])
    )
