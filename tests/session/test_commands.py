"""Slash commands that are not there: what is named instead."""

import pytest

from localchat.errors import UsageError
from localchat.session.commands import COMMANDS, instead, is_known, parse
from localchat.verbs import VERBS


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("models", "use /model"),
        ("Settings", "use /set"),
        ("theme", "use F2"),
        ("title", "use /history"),
        ("temp", "use /set temperature VALUE"),
        ("ctx", "use /set context_length VALUE"),
        ("bench", "in the shell there is `localchat bench`"),
        ("modle", "did you mean /model?"),
    ],
)
def test_a_word_of_another_place_leads_on(word: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"there is no command /{word}") as refused:
        parse(f"/{word} 1")
    assert refused.value.hint.startswith(f"{hint}\n")


def test_another_word_gets_the_names_without_their_aliases() -> None:
    assert instead("xyz") == f"valid names: {', '.join(sorted(f'/{one.name}' for one in COMMANDS))}"


def test_every_verb_of_the_shell_leads_on() -> None:
    for verb in VERBS:
        assert is_known(f"/{verb}") or instead(verb).startswith(("use ", "in the shell")), verb
