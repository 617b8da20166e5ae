"""Updates of the guide: what has changed in localchat since its training (localchat/guide/updates.toml)."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

_PACKAGE: Final = "localchat"


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A phrase that the guide was trained to say, and its replacement."""

    trained: str
    now: str


class RecentFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A feature that is newer than the training: how people ask about it, and the answer."""

    questions: tuple[str, ...]
    """Regular expressions. One that is found in a question suffices."""
    answer: str


class Updates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of the file."""

    correction: tuple[Correction, ...] = ()
    feature: tuple[RecentFeature, ...] = ()

    @property
    def phrases(self) -> Mapping[str, str]:
        """The replacements by phrase."""
        return {entry.trained: entry.now for entry in self.correction}


@cache
def read_updates() -> Updates:
    """Read the file of the package."""
    from tomllib import loads

    text = files(_PACKAGE).joinpath("guide/updates.toml").read_text("utf-8")
    return msgspec.convert(loads(text), Updates)


def recent_answer(question: str) -> str:
    """Return the answer about a recent feature. Empty if the question is about something else."""
    for feature in read_updates().feature:
        if any(re.search(pattern, question) for pattern in feature.questions):
            return feature.answer
    return ""
