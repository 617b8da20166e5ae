"""Several tries at one answer: votes, the best of several, and a critique with a correction."""

from typing import Final

MAX_TRIES: Final = 16
