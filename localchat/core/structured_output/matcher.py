"""What a grammar allows next, for one choice: masks for what is sampled, tokens that need no sampling.

*Forced* tokens are those that every text of the grammar has next, spelled as the vocabulary would spell that
text (llguidance's fast-forward tokens). They are decided behind a sampled token and are then said exactly so,
with drafts and without: drafts change no text. Where sampling may not be skipped (log probabilities are asked,
the first token of an answer), a forced token is sampled under a mask that has its one bit.
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

_MOST_FORCED = 256
"""Decided at once: a grammar may force a text without end."""

Words = Callable[[], bytes]
"""The words of a mask; waits until they are computed."""


class GrammarMatcher:
    """State of a grammar behind the tokens of one choice. For one thread, the loop's. Masks are computed by
    `workers`, and every other call waits for them.

    `ends`: tokens that end a generation; they are allowed where the text may end. `ignore_ends`: not even
    there, as long as anything else may follow. `room`: tokens that the text may have.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        vocab_size: int,
        ends: frozenset[int],
        workers: Executor,
        endings: LengthGuard,
        *,
        room: int,
        ignore_ends: bool = False,
    ) -> None:
        """`matcher`: fresh, this object's own."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._workers = workers
        self._endings = endings
        self._room = room
        self._ignore_ends = ignore_ends
        self._said = 0
        self._schedule = ClosingState()
        self._looked: dict[int, ClosingState] = {}
        self._pending: Future[list[bytes]] | None = None
        # The matcher stands behind what was said and behind these.
        self._forced = deque(self._run())

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, in llguidance's words; empty while it can."""
        return first_line(self._idle().get_error())

    @property
    def ended(self) -> bool:
        """The text is complete, and nothing can follow."""
        matcher = self._idle()
        return not self._forced and matcher.is_stopped() and not matcher.is_error()

    @property
    def forced(self) -> int | None:
        """The next token, where the grammar leaves no choice."""
        return self._forced[0] if self._forced else None

    def take(self, token: int) -> bool:
        """The next token was said. False: the grammar does not allow it, and is of no use any more."""
        matcher = self._idle()
        if self._forced:
            if self._forced.popleft() != token:
                return False
        elif not matcher.consume_token(token):
            return False
        # What was decided for this place holds: the text before it is what it was.
        self._schedule = self._looked.get(self._said, self._schedule)
        self._said += 1
        if not self._forced:
            self._forced.extend(self._run())
        return True

    def allowed_drafts(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """The beginning of `drafts` that the grammar allows."""
        self._idle()
        kept = sum(1 for _ in self._walk(drafts)) - 1
        return tuple(drafts[:kept])

    def masks(self, drafts: Sequence[int]) -> list[Words]:
        """A mask for the next token and one behind each of `drafts`, which were cut before. A worker computes
        them from now on."""
        self._idle()
        job = self._pending = self._workers.submit(self._compute, tuple(drafts))
        return [partial(_nth, job, place) for place in range(len(drafts) + 1)]

    # ------------------------------------------------------------------------ the matcher

    def _idle(self) -> "LLMatcher":
        """The matcher, as soon as no worker uses it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self._matcher

    def _run(self) -> list[int]:
        """The forced tokens that follow now; the matcher takes them."""
        matcher = self._matcher
        run: list[int] = []
        while len(run) < _MOST_FORCED and not matcher.is_stopped():
            more = matcher.compute_ff_tokens()
            if not more or not matcher.consume_tokens(more):
                break
            run += more
        return run

    def _walk(self, drafts: Sequence[int]) -> Iterator[int | None]:
        """Before each draft that is allowed, and once behind the last of them: the token that is forced there,
        or None. The matcher stands there meanwhile, and at the end where it was."""
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
                run = self._run()
                consumed += len(run)
                forced.extend(run)
        if consumed:
            matcher.rollback(consumed)

    def _compute(self, drafts: tuple[int, ...]) -> list[bytes]:
        self._looked = {}
        schedule = self._schedule
        words = []
        for place, forced in enumerate(self._walk(drafts), self._said):
            if forced is not None:
                words.append(self._only(forced))
                continue
            if not schedule.closing and place >= schedule.look_at:
                schedule = self._endings.look(self._matcher, place, self._room - place)
            self._looked[place] = schedule
            allowed = self._open(self._endings.allowed(self._matcher))
            words.append(self._endings.soonest(allowed) if schedule.closing else allowed)
        return words

    def _only(self, token: int) -> bytes:
        words = bytearray(4 * ((self._vocab_size + 31) // 32))
        words[token >> 3] = 1 << (token & 7)
        return bytes(words)

    def _open(self, words: bytes) -> bytes:
        """A mask without the ends, where they are to be ignored."""
        if not self._ignore_ends:
            return words
        changed = np.frombuffer(words, np.uint8).copy()
        for token in self._ends:
            changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return changed.tobytes() if changed.any() else words


_STATE = re.compile(r"\n<(state|non-verbose/)>")
_NO_TEXT = "NoExtensionBias"
"""llguidance's word for a grammar that allows no next token and not the end either."""


def first_line(error: str) -> str:
    """What is wrong, without llguidance's picture of its state."""
    said = _STATE.split(error, maxsplit=1)[0].strip()
    return "no text satisfies it" if said == _NO_TEXT else said


def _nth(job: "Future[list[bytes]]", place: int) -> bytes:
    return job.result()[place]
