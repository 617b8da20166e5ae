"""Several tries at one answer: votes, the best of several, and a critique with a correction."""
