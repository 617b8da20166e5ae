"""Vote: the answer that most tries agree on, and whether the rest can still change it."""

from collections import Counter


class Vote:
    """Counts the answers of a known number of tries."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self.answers: dict[int, str | None] = {}
        """Of the tries that have ended; None: a try without an answer."""

    def add(self, number: int, answer: str | None) -> None:
        """Record what a try says. `number`: of the try, from 0."""
        self.answers[number] = answer

    @property
    def counts(self) -> Counter[str]:
        """Votes by answer."""
        return Counter(answer for answer in self.answers.values() if answer is not None)

    @property
    def open(self) -> int:
        """Tries that have not ended."""
        return self.tries - len(self.answers)

    @property
    def decided(self) -> bool:
        """Whether no other answer can reach the leader any more, however the open tries end."""
        if not self.open:
            return True
        (_, most), (_, second) = [*self.counts.most_common(2), ("", 0), ("", 0)][:2]
        return most > second + self.open

    @property
    def leader(self) -> str | None:
        """The answer with the most votes; of several, that of the lowest try. None without any vote."""
        counts = self.counts
        if not counts:
            return None
        most = max(counts.values())
        return next(
            answer
            for _, answer in sorted(self.answers.items())
            if answer is not None and counts[answer] == most
        )

    @property
    def chosen(self) -> int:
        """The lowest try that gives the leading answer; without any vote the lowest that ended, or 0."""
        leader = self.leader
        return min((n for n, answer in self.answers.items() if answer == leader), default=0)
