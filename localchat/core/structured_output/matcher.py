"""Grammar matcher of one choice: masks for sampled tokens, and forced tokens that need no sampling.

*Forced* tokens are the only continuation that the grammar allows, in the vocabulary's own tokenization
(llguidance's fast-forward tokens). They are determined after each sampled token, with and without drafts
alike, so drafts never change the text. If sampling cannot be skipped, for log probabilities or for the first
token of an answer, a forced token is sampled under a mask with only its bit.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from localchat.core.structured_output.length_guard import ClosingState, LengthGuard

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_FORCED = 256
"""Most forced tokens at once, because a grammar may force an endless text."""

Words = Callable[[], bytes]
"""Returns the words of a mask, after waiting until they are computed."""


class GrammarMatcher:
    """State of a grammar after the tokens of one choice.

    Used by the engine core's thread alone. `workers` compute masks, and every other call waits for them.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        vocab_size: int,
        ends: frozenset[int],
        workers: Executor,
        length_guard: LengthGuard,
        *,
        room: int,
        ignore_ends: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`matcher`: new, and owned by this object. `ends`: tokens that end a generation, allowed where the
        text may end. `ignore_ends`: they are allowed only if nothing else may follow. `room`: token limit of
        the text. `min_tokens`: ends are ignored before this many tokens.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._workers = workers
        self._length_guard = length_guard
        self._room = room
        self._ignore_ends = ignore_ends
        self._min_tokens = min_tokens
        self._generated = 0
        # An answer that ends in the first half of its room never needs the guard.
        self._closing_state = ClosingState(check_at=room // 2)
        self._closing_states: dict[int, ClosingState] = {}
        self._narrowed: set[int] = set()
        """Positions at which the length guard excluded tokens that would have continued the text."""
        self._shortened = False
        self._pending: Future[list[bytes]] | None = None
        # The matcher has consumed the generated tokens and these.
        self._forced = deque(self._take_forced())

    @property
    def error(self) -> str:
        """Reason why the grammar cannot continue, as llguidance states it. Empty while it can."""
        return first_line(self._synchronized().get_error())

    @property
    def shortened(self) -> bool:
        """Whether the length guard chose a token or the end, so that the text fits."""
        return self._shortened or self._generated in self._narrowed

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        matcher = self._synchronized()
        return not self._forced and matcher.is_stopped() and not matcher.is_error()

    @property
    def forced(self) -> int | None:
        """The next token, if the grammar allows only one."""
        if not self._forced:
            return None
        return self._forced[0]

    def accept(self, token: int) -> bool:
        """Consume the next token. False: the grammar forbids it, and the matcher becomes unusable."""
        matcher = self._synchronized()
        if self._forced:
            if self._forced.popleft() != token:
                return False
        elif not matcher.consume_token(token):
            return False
        # The text before this position is the same, so the state computed for it is valid.
        self._closing_state = self._closing_states.get(self._generated, self._closing_state)
        self._shortened = self.shortened
        self._generated += 1
        if not self._forced:
            self._forced.extend(self._take_forced())
        return True

    def allowed_drafts(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the leading part of `drafts` that the grammar allows."""
        self._synchronized()
        kept = sum(1 for _ in self._walk(drafts)) - 1
        return tuple(drafts[:kept])

    def masks(self, drafts: Sequence[int]) -> list[Words]:
        """Return a mask for the next token, and one after each of `drafts`. A worker computes them.

        The grammar must allow all drafts (`allowed_drafts`).
        """
        self._synchronized()
        future = self._pending = self._workers.submit(self._compute, tuple(drafts))
        return [partial(_result, future, index) for index in range(len(drafts) + 1)]

    def _synchronized(self) -> "LLMatcher":
        """Return the matcher as soon as no worker uses it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self._matcher

    def _take_forced(self) -> list[int]:
        """Consume and return the forced tokens that follow."""
        matcher = self._matcher
        forced: list[int] = []
        while len(forced) < _MAX_FORCED and not matcher.is_stopped():
            more = matcher.compute_ff_tokens()
            if not more or not matcher.consume_tokens(more):
                break
            forced += more
        return forced

    def _walk(self, drafts: Sequence[int]) -> Iterator[int | None]:
        """Yield the forced token, or None, before each allowed draft and after the last.

        The matcher's state follows the drafts, and is restored at the end.
        """
        matcher = self._matcher
        forced = deque(self._forced)
        consumed = 0
        for draft in (*drafts, None):
            yield forced[0] if forced else None
            if draft is None:
                break
            if forced:
                if forced.popleft() != draft:
                    break
            elif draft in self._ends or not matcher.validate_tokens([draft]):
                break
            else:
                matcher.consume_token(draft)
                consumed += 1
            if not forced:
                more_forced = self._take_forced()
                consumed += len(more_forced)
                forced.extend(more_forced)
        if consumed:
            matcher.rollback(consumed)

    def _compute(self, drafts: tuple[int, ...]) -> list[bytes]:
        self._closing_states = {}
        self._narrowed = set()
        schedule = self._closing_state
        words = []
        for position, forced in enumerate(self._walk(drafts), self._generated):
            if forced is not None:
                words.append(self._mask_of(forced))
                continue
            if not schedule.closing and position >= schedule.check_at:
                schedule = self._length_guard.check(self._matcher, position, self._room - position)
            self._closing_states[position] = schedule
            allowed = self._without_ends(self._length_guard.allowed(self._matcher), position)
            if schedule.closing:
                closing = self._length_guard.closing_tokens(allowed)
                if self._length_guard.narrows(allowed, closing):
                    self._narrowed.add(position)
                allowed = self._length_guard.closing_mask(allowed)
            words.append(allowed)
        return words

    def _mask_of(self, token: int) -> bytes:
        words = bytearray(4 * ((self._vocab_size + 31) // 32))
        words[token >> 3] = 1 << (token & 7)
        return bytes(words)

    def _without_ends(self, words: bytes, position: int) -> bytes:
        """Return a mask without the ends, if they are ignored after `position` tokens."""
        if not self._ignore_ends and position >= self._min_tokens:
            return words
        changed = np.frombuffer(words, np.uint8).copy()
        for token in self._ends:
            changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if not changed.any():
            return words
        return changed.tobytes()


_STATE = re.compile(r"\n<(state|non-verbose/)>")
_NO_TEXT = "NoExtensionBias"
"""llguidance's error for a grammar that allows neither a next token nor the end."""


def first_line(error: str) -> str:
    """Return the fault without llguidance's dump of its state."""
    message = _STATE.split(error, maxsplit=1)[0].strip()
    if message == _NO_TEXT:
        return "no text satisfies it"
    return message


def _result(future: "Future[list[bytes]]", index: int) -> bytes:
    return future.result()[index]
