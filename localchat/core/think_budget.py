"""Thinking budget of one choice: counts the tokens of its reasoning and closes it when they are used up.

The engine writes the closing tag in place of the next token, as it writes tokens that a grammar forces: the
reasoning has exactly the tokens of the budget, or fewer where the model ends it itself.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol


class ReasoningTracker(Protocol):
    """Reads the text of an answer and knows whether it is inside reasoning."""

    @property
    def thinking(self) -> bool: ...

    def feed(self, text: str) -> object:
        """Take the next piece of text."""
        ...


class ThinkBudget:
    """Used by the engine core's thread alone."""

    def __init__(
        self,
        tokens: int,
        tracker: ReasoningTracker,
        piece: Callable[[int], bytes],
        closings: Sequence[Sequence[int]],
        *,
        reopens: bool = False,
    ) -> None:
        """`tokens`: most tokens of reasoning. `piece`: bytes of a token, markup included. `closings`: tokens
        that close the reasoning, the first time and every further time. `reopens`: the model may reason again
        after it has begun to answer."""
        self._tokens = tokens
        self._tracker = tracker
        self._piece = piece
        self._closings = [tuple(closing) for closing in closings]
        self._reopens = reopens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced: deque[int] = deque()
        self._over = False
        self.used = 0
        """Tokens of reasoning so far, without its tags."""

    @property
    def left(self) -> int | None:
        """Tokens that may come before the engine has to close the reasoning, at least; None: it need not."""
        return None if self._over else max(0, self._tokens - self.used)

    @property
    def forced(self) -> int | None:
        """The next token, where the budget is used up."""
        if not self._forced and not self._over and self._tracker.thinking and not self.left:
            self._forced.extend(self._closings[0])
            self._closings = self._closings[1:] or self._closings
        return self._forced[0] if self._forced else None

    def push(self, token: int) -> None:
        """Take the next token of the answer, forced or not."""
        if self._over:
            return
        if self._forced:
            self._forced.popleft()
        thought = self._tracker.thinking
        self._tracker.feed(self._decoder.decode(self._piece(token)))
        if thought and self._tracker.thinking:
            self.used += 1
        self._over = thought and not (self._tracker.thinking or self._reopens or self._forced)
