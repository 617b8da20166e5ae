"""Drafts of one sequence: its sources, and what its drafts cost and saved."""

from localchat.core.spec_decode.ngram_proposer import NgramProposer


class SequenceDrafts:
    """Draft sources and counters of one sequence."""

    def __init__(self, ngrams: NgramProposer, *, uses_model: bool = False) -> None:
        """`uses_model`: the draft model may draft for this sequence too."""
        self.ngrams = ngrams
        self.uses_model = uses_model
        self.model_start = 0
        """Position of the first token that the draft model reads."""
        self.model_read = 0
        """Number of tokens that the draft model has read."""
        self.by_model = False
        """The last drafted tokens came from the draft model."""
        self.stated: tuple[float, ...] = ()
        """Probabilities that the draft model gave to its last drafted tokens."""
        self.drafted = 0
        self.accepted = 0
        self.plain_s = 0.0
        """Time of plain steps for the tokens so far."""
        self.spent_s = 0.0
        """Time of the steps that generated these tokens, with the time for drafting them."""
        self.off = ""
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
