"""Letters that Textual takes for keys without one, because Python calls them not printable: the joiners of
Persian and of emoji, the wide space of Japanese, the space that does not break."""

import unicodedata

from localchat.sanitize import sanitize


def is_unseen_letter(character: str | None) -> bool:
    """Whether a key brings such a letter. What could turn or hide a text is none."""
    return (
        character is not None
        and len(character) == 1
        and not character.isprintable()
        and unicodedata.category(character) in ("Cf", "Zs")
        and sanitize(character) == character
    )
