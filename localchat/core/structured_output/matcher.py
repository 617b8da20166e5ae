"""Grammar matcher of one choice: masks for sampled tokens, and forced tokens that need no sampling.

*Forced* tokens are those that every text of the grammar has next, spelled as the vocabulary would spell that
text (llguidance's fast-forward tokens). They are decided after a sampled token and are then generated
exactly so, with drafts and without: drafts change no text. Where sampling may not be skipped (log
probabilities are asked, the first token of an answer), a forced token is sampled under a mask that has its
one bit.
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
"""Decided at once: a grammar may force a text without end."""

Words = Callable[[], bytes]
"""The words of a mask; waits until they are computed."""


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
        """`matcher`: fresh, this object's own. `ends`: tokens that end a generation; they are allowed
        where the text may end, and with `ignore_ends` not even there as long as anything else may follow.
        `room`: tokens that the text may have. `min_tokens`: so many tokens are generated as with
        `ignore_ends`."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._workers = workers
        self._length_guard = length_guard
        self._room = room
        self._ignore_ends = ignore_ends
        self._min_tokens = min_tokens
        self._generated = 0
        self._closing_state = ClosingState()
        self._closing_states: dict[int, ClosingState] = {}
        self._narrowed: set[int] = set()
        """Places at which the length guard forbade tokens that would have gone on."""
        self._shortened = False
        self._pending: Future[list[bytes]] | None = None
        # The matcher has consumed the generated tokens and these.
        self._forced = deque(self._take_forced())

    @property
    def error(self) -> str:
        """Why the grammar cannot continue, in llguidance's words; empty while it can."""
        return first_line(self._synchronized().get_error())

    @property
    def shortened(self) -> bool:
        """Whether the length guard chose a token or the end, to end the text while there is room."""
        return self._shortened or self._generated in self._narrowed

    @property
    def ended(self) -> bool:
        """The text is complete, and nothing can follow."""
        matcher = self._synchronized()
        return not self._forced and matcher.is_stopped() and not matcher.is_error()

    @property
    def forced(self) -> int | None:
        """The next token, where the grammar leaves no choice."""
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> bool:
        """Consume the next token. False: the grammar does not allow it, and the matcher is unusable from
        now on."""
        matcher = self._synchronized()
        if self._forced:
            if self._forced.popleft() != token:
                return False
        elif not matcher.consume_token(token):
            return False
        # The state that was computed for this place holds: the text before it is the same.
        self._closing_state = self._closing_states.get(self._generated, self._closing_state)
        self._shortened = self.shortened
        self._generated += 1
        if not self._forced:
            self._forced.extend(self._take_forced())
        return True

    def allowed_drafts(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """The beginning of `drafts` that the grammar allows."""
        self._synchronized()
        kept = sum(1 for _ in self._walk(drafts)) - 1
        return tuple(drafts[:kept])

    def masks(self, drafts: Sequence[int]) -> list[Words]:
        """A mask for the next token and one after each of `drafts`. A worker computes them.

        The grammar must allow all drafts (`allowed_drafts`).
        """
        self._synchronized()
        future = self._pending = self._workers.submit(self._compute, tuple(drafts))
        return [partial(_result, future, place) for place in range(len(drafts) + 1)]

    def _synchronized(self) -> "LLMatcher":
        """The matcher, as soon as no worker uses it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self._matcher

    def _take_forced(self) -> list[int]:
        """Consume and return the forced tokens that follow now."""
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

        The matcher stands there meanwhile, and afterwards where it was.
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
                taken = self._take_forced()
                consumed += len(taken)
                forced.extend(taken)
        if consumed:
            matcher.rollback(consumed)

    def _compute(self, drafts: tuple[int, ...]) -> list[bytes]:
        self._closing_states = {}
        self._narrowed = set()
        schedule = self._closing_state
        words = []
        for place, forced in enumerate(self._walk(drafts), self._generated):
            if forced is not None:
                words.append(self._mask_of(forced))
                continue
            if not schedule.closing and place >= schedule.check_at:
                schedule = self._length_guard.check(self._matcher, place, self._room - place)
            self._closing_states[place] = schedule
            allowed = self._without_ends(self._length_guard.allowed(self._matcher), place)
            if schedule.closing:
                closing = self._length_guard.closing_tokens(allowed)
                if self._length_guard.narrows(allowed, closing):
                    self._narrowed.add(place)
                allowed = closing
            words.append(allowed)
        return words

    def _mask_of(self, token: int) -> bytes:
        words = bytearray(4 * ((self._vocab_size + 31) // 32))
        words[token >> 3] = 1 << (token & 7)
        return bytes(words)

    def _without_ends(self, words: bytes, place: int) -> bytes:
        """A mask without the ends, where they are to be ignored. `place`: tokens before it."""
        if not self._ignore_ends and place >= self._min_tokens:
            return words
        changed = np.frombuffer(words, np.uint8).copy()
        for token in self._ends:
            changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return changed.tobytes() if changed.any() else words


_STATE = re.compile(r"\n<(state|non-verbose/)>")
_NO_TEXT = "NoExtensionBias"
"""llguidance's word for a grammar that allows neither a next token nor the end."""


def first_line(error: str) -> str:
    """The fault, without llguidance's dump of its state."""
    message = _STATE.split(error, maxsplit=1)[0].strip()
    if message == _NO_TEXT:
        return "no text satisfies it"
    return message


def _result(future: "Future[list[bytes]]", place: int) -> bytes:
    return future.result()[place]
