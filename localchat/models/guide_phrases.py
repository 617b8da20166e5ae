"""Replaces the model names in the guide's fixed answers by those that suit this machine."""

from collections.abc import Callable
from functools import cache, partial

from localchat.config.paths import Paths

_PHRASES = {
    "`localchat run qwen2.5:3b`": "`localchat run {balanced}`",
    "`localchat pull qwen2.5:3b-q4_k_m`": "`localchat pull {fast}`",
    "fetches one that runs on nearly any machine": "fetches one that suits this machine",
    "Start with `localchat pull qwen2.5:7b-q4_k_m`": "Start with `localchat pull {best}`",
    "gets a model (3B for less than 8 GB)": "gets a model; here, {balanced} is a good choice",
    "`localchat run qwen2.5:14b` offers": "`localchat run {best}` offers",
}


def guide_phrases(paths: Paths) -> dict[str, Callable[[], str]]:
    """Return a function for each phrase that returns its replacement.

    The first call takes about a second. Phrases stay as they are if no model is recommended."""

    @cache
    def names() -> list[str]:
        from localchat.backend_api.registry import usable_machine
        from localchat.models.recommended_models import recommended_names

        return recommended_names(paths, usable_machine())

    def replacement(phrase: str) -> str:
        if not names():
            return phrase
        return _PHRASES[phrase].format(
            best=names()[0], balanced=names()[len(names()) // 2], fast=names()[-1]
        )

    return {phrase: partial(replacement, phrase) for phrase in _PHRASES}
