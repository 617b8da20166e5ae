"""Suggests similar names for an unknown one ("did you mean ...?")."""

from collections.abc import Iterable, Sequence


def closest(
    name: str, names: Iterable[str], count: int = 1, min_similarity: float = 0.6
) -> tuple[str, ...]:
    """Return up to `count` names, most similar first, ignoring case.

    min_similarity: from 0 to 1, as in `difflib.SequenceMatcher.ratio`.
    """
    from difflib import get_close_matches

    by_lower = {valid.lower(): valid for valid in sorted(names)}
    matches = get_close_matches(name.lower(), by_lower, n=count, cutoff=min_similarity)
    return tuple(by_lower[match] for match in matches)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name.

    It contains the only valid name with this start, the most similar name, or all names.
    """
    ordered = sorted(names)
    matches: Sequence[str] = [valid for valid in ordered if valid.startswith(name.lower())]
    if len(matches) != 1:
        matches = closest(name, ordered)
    if matches:
        return f"did you mean {matches[0]}?"
    return f"valid names: {', '.join(ordered)}"
