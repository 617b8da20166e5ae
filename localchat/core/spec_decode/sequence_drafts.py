"""Drafts of one sequence: its sources, and what its drafts cost and saved."""

from dataclasses import dataclass

from localchat.core.spec_decode.ngram_proposer import NgramProposer


@dataclass(slots=True, eq=False)
class SequenceDrafts:
    """Draft sources and counters of one sequence."""

    ngrams: NgramProposer
    uses_model: bool = False
    """The draft model may draft for this sequence too."""
    model_start: int = 0
    """Position of the first token that the draft model reads."""
    model_read: int = 0
    """Number of tokens that the draft model has read."""
    by_model: bool = False
    """The last drafted tokens came from the draft model."""
    stated: tuple[float, ...] = ()
    """Probabilities that the draft model gave to its last drafted tokens."""
    drafted: int = 0
    accepted: int = 0
    plain_s: float = 0.0
    """Time of plain steps for the tokens so far."""
    spent_s: float = 0.0
    """Time of the steps that generated these tokens, with the time for drafting them."""
    off: str = ""
    """Reason why nothing is drafted for now. Empty while drafts are on."""

    @property
    def speedup(self) -> float | None:
        """Time of plain steps over the time spent. None before the first draft."""
        if not self.drafted or not self.spent_s:
            return None
        return self.plain_s / self.spent_s

    def fork(self) -> "SequenceDrafts":
        """Return the drafts of another choice with the same prompt.

        Only n-grams draft for it, because a draft model would need its own time for each choice.
        """
        return SequenceDrafts(self.ngrams.fork())
