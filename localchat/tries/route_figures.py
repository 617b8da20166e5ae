"""Figures of a route: how often the small model was enough, and what that saved."""

import msgspec


class RouteFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of a route. Tokens are those that were generated."""

    small: int = 0
    """Answers of the small model. The same for `large`."""
    large: int = 0
    small_tokens: int = 0
    large_tokens: int = 0
    discarded_tokens: int = 0
    """Of the small model, in answers that the large one gave again, and in verdicts."""

    @property
    def share(self) -> float:
        """Part of the answers that the small model gave."""
        return self.small / max(self.small + self.large, 1)

    def saved(self, small_bytes: int, large_bytes: int) -> float:
        """Part of the reads of weights that the large model alone would have made. Negative: it cost more."""
        alone = (self.small_tokens + self.large_tokens) * large_bytes
        made = (self.small_tokens + self.discarded_tokens) * small_bytes
        made += self.large_tokens * large_bytes
        return 1 - made / alone if alone else 0.0

    def __add__(self, other: "RouteFigures") -> "RouteFigures":
        names = self.__struct_fields__
        return RouteFigures(**{name: getattr(self, name) + getattr(other, name) for name in names})
