"""Answers of the guide as the screen shows them: commands of the shell become keys and slash commands.

The guide's texts name commands of the shell, because it answers in all front ends. A user of the screen cannot
type them there.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from localchat.session.blocks import Offer
from localchat.tui.keymap import key_names

ASK_PREFIX: Final = "ask "
"""First part of the action that sends a question."""
OFFERS_ID: Final = "guide/offers"
"""Id of the notice with offers below an answer of the guide."""
_LIST: Final = (
    "Ask it in these words, or send its number next (`localchat -c NUMBER` from the shell)."
)
_REWRITES: Final = (
    (re.escape(f" {_LIST}") + r"[\s\d]*\Z", ""),
    (re.escape(f" {_LIST}"), ""),
    (r" \(short: `localchat ls`\)", ""),
    (r"`localchat run` without a name", "`{models}`"),
    (r"`localchat (?:run|list|ls|models)`", "`{models}`"),
    (r"`localchat pull`", "`/pull`"),
    (r"`localchat run ((?:\./|remote:|ollama/)[^\s`]+|MODEL)`", r"`/model \1`"),
    (r"`localchat (?:run|pull) ([^\s`-][^\s`]*)`", r"`/pull \1`"),
    (r"`localchat fit ([^\s`-][^\s`]*)`", r"`/fit \1`"),
    (r"`localchat --remote ([^\s`]+)`", r"`/set remote \1`"),
    (r"`localchat history(?: list| search WORDS)?`", "`{history}`"),
)
"""Forms in the guide's answers, and what they are on the screen."""
_KEYS: Final = {"models": "screen.models", "history": "screen.history"}
_STAYS: Final = re.compile(r"\bshell\b|\|")
"""Text before a command that keeps it as it is: about the shell, or in a table."""
_QUESTION: Final = re.compile(r"^\d\. (.+)$", re.MULTILINE)


class GuideAnswer(NamedTuple):
    """An answer of the guide for the screen."""

    text: str
    questions: tuple[str, ...] = ()
    """Questions that the guide offers instead of an answer."""
    needs_model: bool = False
    """A model other than the guide is what the user needs."""


def for_screen(answer: str, keys: Mapping[str, str]) -> GuideAnswer:
    """Rewrite an answer of the guide. `keys`: the keymap of the settings."""
    from localchat.engine.guide.rules import OFFER, REFUSALS

    questions: tuple[str, ...] = ()
    if answer.startswith(OFFER):
        questions = tuple(_QUESTION.findall(answer))
        answer = OFFER
    names = {name: key_names(id_, keys).partition(", ")[0] for name, id_ in _KEYS.items()}
    text = answer
    for pattern, form in _REWRITES:
        text = re.sub(pattern, lambda match: _form(match, form, names), text)  # noqa: B023 - used at once
    needs_model = answer.startswith(REFUSALS) or f"`{names['models']}`" in text or "`/pull" in text
    return GuideAnswer(text, questions, needs_model)


def offers_for(answer: GuideAnswer, models: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return the offers below an answer. `models`: downloads that suit this computer."""
    questions = tuple(Offer(text, f"{ASK_PREFIX}{text}") for text in answer.questions)
    if not answer.needs_model:
        return questions
    if questions:
        models = ()
    return (*questions, Offer("choose a model", "model"), *models)


def complete_part(text: str) -> str:
    """Return the part of a growing answer that cannot change any more: before an open code span."""
    if text.count("`") % 2:
        text = text[: text.rindex("`")]
    return text


def _form(match: re.Match[str], form: str, names: Mapping[str, str]) -> str:
    line = match.string[: match.start()].rpartition("\n")[2]
    sentence = re.split(r"[.;:] ", line)[-1]
    if form and _STAYS.search(sentence):
        return match[0]
    return match.expand(form).format_map(names)
