"""Thinking budget of one choice: counts the tokens of its reasoning and closes it when they are used up.

The engine forces the closing tag in place of the next tokens, as it forces tokens of a grammar. So the
reasoning has exactly the tokens of the budget, or fewer if the model closes it.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from localchat.chat_format.harmony_parser import ChannelParser
from localchat.chat_format.reasoning_parser import ReasoningParser


class ThinkBudget:
    """Used by the engine core's thread alone."""

    def __init__(
        self,
        tokens: int,
        tracker: ReasoningParser | ChannelParser,
        piece: Callable[[int], bytes],
        closings: Sequence[Sequence[int]],
        *,
        reopens: bool = False,
    ) -> None:
        """`tokens`: limit of reasoning tokens. `piece`: bytes of a token, markup included.

        `closings`: tokens that close the reasoning, the first time and every further time. `reopens`: the model
        may reason again after it has started to answer.
        """
        self._tokens = tokens
        self._tracker = tracker
        self._piece = piece
        self._closings = [tuple(closing) for closing in closings]
        self._reopens = reopens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced: deque[int] = deque()
        self._over = False
        self.used = 0
        """Tokens of reasoning so far, without tags."""

    @property
    def left(self) -> int | None:
        """Lower bound on the tokens before the engine closes the reasoning. None: it will not."""
        if self._over:
            return None
        return max(0, self._tokens - self.used)

    @property
    def forced(self) -> int | None:
        """The next token, if the budget is used up."""
        if not self._forced and not self._over and self._tracker.thinking and not self.left:
            self._forced.extend(self._closings[0])
            self._closings = self._closings[1:] or self._closings
        if not self._forced:
            return None
        return self._forced[0]

    def push(self, token: int) -> None:
        """Push the next token of the answer, forced or not."""
        if self._over:
            return
        if self._forced:
            self._forced.popleft()
        thought = self._tracker.thinking
        self._tracker.feed(self._decoder.decode(self._piece(token)))
        if thought and self._tracker.thinking:
            self.used += 1
        self._over = thought and not (self._tracker.thinking or self._reopens or self._forced)
