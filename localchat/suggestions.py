"""Suggests the known words that are most like one that is not known ("did you mean ...?")."""

from collections.abc import Iterable


def closest(
    word: str, known: Iterable[str], count: int = 1, min_similarity: float = 0.6
) -> tuple[str, ...]:
    """Up to `count` known words, the most similar first, whatever the letters' case.

    `min_similarity`: from 0 to 1, as `difflib.SequenceMatcher.ratio` measures it.
    """
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in sorted(known)}
    found = get_close_matches(word.lower(), by_lower, n=count, cutoff=min_similarity)
    return tuple(by_lower[name] for name in found)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that names the only known word that begins so, the most similar one, or all of them."""
    names = sorted(known)
    begun = [name for name in names if name.startswith(word.lower())]
    found = begun if len(begun) == 1 else closest(word, names)
    if found:
        return f"did you mean {found[0]}?"
    return f"valid names: {', '.join(names)}"
