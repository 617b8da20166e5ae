"""What a render may use: wall time, the size of any one value, memory in all.

A template is a program from a stranger that runs in a thread, and a thread cannot be killed. So
nothing in it may take long without asking: the compiler (sandbox.py) puts a `tick` into every body
and around every operation, and no value may grow beyond a size at which one operation on it is
short. Hence:

- every operation checks the clock, and costs at most about its operands' size;
- the size of a container is *deep*: what printing it would give, so that ten lists of ten lists of
  … count for what they unfold to; nesting is bounded too, because C code recurses into it;
- where a result can be far larger than its operands (`*`, `center`, `join`, …) guards.py foresees
  it;
- memory is charged when it is made and never given back, so what is alive is at most what was
  charged.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from localchat.errors import TemplateError

Value: TypeAlias = Any
"""Whatever a template computes with."""

MOST_DEPTH = 128
MOST_BITS = 16_384
"""Integers beyond this have no printable form anyway (Python prints 4,300 digits)."""

_KEEP = 1024
"""Containers above this deep size are remembered; smaller ones are measured again where they
stand."""

_ENTRY_BYTES = 200
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, *_VIEWS)
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one render. The two sizes grow with the input: a long conversation may give a long
    text.

    seconds: of the thread that renders. value: characters of the text and deep size of any value, plus
    `value_per_input` for each input character. memory_bytes: all that is ever made, plus
    `memory_per_input` bytes for each input character, never above `most_memory_bytes`. source:
    characters of a template. compile_seconds, compiled: the same, and characters of the Python code
    that it becomes (half a second per million).
    """

    seconds: float = 2.0
    value: int = 4 << 20
    value_per_input: int = 4
    memory_bytes: int = 256 << 20
    memory_per_input: int = 32
    most_memory_bytes: int = 1 << 30
    source: int = 256 << 10
    compile_seconds: float = 5.0
    compiled: int = 4 << 20


class Measure(NamedTuple):
    """Deep size (characters, plus 8 for each element) and levels of nesting."""

    size: int
    depth: int


_SCALAR = Measure(8, 0)


class Meter:
    """Counts for one render or one compilation. Every method may raise TemplateError
    (`reason=limit`)."""

    def __init__(
        self,
        limits: Limits,
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._clock = clock
        # Five times as dear as the clock of the wall, and asked only when that one says that it is late.
        self._busy = time.thread_time if clock is time.monotonic else clock
        self._seconds = limits.seconds if seconds is None else seconds
        self._end = clock() + self._seconds
        self._busy_end = self._busy() + self._seconds
        self._bytes_left = limits.memory_bytes
        self._known: dict[int, tuple[object, Measure]] = {}
        self.most = limits.value

    def tick(self) -> None:
        """The clock, asked everywhere. A template is not to blame for what the system does instead: counted is
        what this thread computes."""
        if self._clock() > self._end:
            left_s = self._busy_end - self._busy()
            if left_s < 0:
                raise exceeded(f"takes longer than {self._seconds:g} s")
            self._end = self._clock() + left_s

    def take_input(self, value: Value) -> None:
        """Measure what the caller hands in, and widen the limits by it. Refuses what is not plain
        data."""
        limits = self._limits
        self.most = limits.most_memory_bytes
        size = self.measure(value, plain=True).size
        self.most = limits.value + limits.value_per_input * size
        self._bytes_left = min(
            limits.memory_bytes + limits.memory_per_input * size, limits.most_memory_bytes
        )

    def charge(self, size_bytes: int) -> None:
        """Count memory that was made, or is about to be."""
        self._bytes_left -= size_bytes
        if self._bytes_left < 0:
            raise exceeded("takes too much memory")

    def foresee(self, size: int) -> None:
        """Refuse a result of `size` before it is made."""
        if size > self.most:
            raise exceeded(f"makes a value of {size:,} characters; {self.most:,} are allowed")

    def made(self, value: Value, measure: Measure | None = None) -> Value:
        """Count a new value and hand it on. `measure`: where it is known without looking."""
        self.tick()
        if isinstance(value, (str, bytes)):
            self.foresee(len(value))
            self.charge(sys.getsizeof(value))
        elif isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                raise exceeded("makes a number too long to print")
        elif isinstance(value, _CONTAINERS):
            self.charge(sys.getsizeof(value))
            if measure is None:
                self.measure(value)
            else:
                self._keep(value, measure)
        return value

    def measure(self, value: Value, *, plain: bool = False) -> Measure:
        """Deep size and nesting of any value. `plain`: TemplateError for what JSON does not
        know."""
        if isinstance(value, (str, bytes)):
            return Measure(len(value) + 8, 0)
        if not isinstance(value, _CONTAINERS):
            if plain and not isinstance(value, _PLAIN):
                raise TemplateError(
                    f"A chat template takes plain data, not {type(value).__name__}.", reason="input"
                )
            return _SCALAR
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        self.tick()
        size, depth = 8, 0
        for part in _parts(value):
            if type(part) is str:
                size += len(part) + 8
            else:
                below = self.measure(part, plain=plain)
                size += below.size
                depth = max(depth, below.depth)
            self.foresee(size)
        return self._keep(value, Measure(size, depth + 1))

    def watched(self, items: Iterable[Any], *, new: bool = False) -> Iterator[Any]:
        """The same items, the clock asked for each. `new`: they are made on the way, so count
        them."""
        for item in items:
            self.tick()
            yield self.made(item) if new else item

    def joined(self, pieces: Iterable[str]) -> str:
        """The pieces as one string, stopped before it grows too large."""
        kept: list[str] = []
        total = 0
        for piece in pieces:
            total += len(piece)
            self.foresee(total)
            kept.append(piece)
        text = "".join(kept)
        self.made(text)
        return text

    def _keep(self, value: object, measure: Measure) -> Measure:
        if measure.size > self.most:
            self.foresee(measure.size)
        if measure.depth > MOST_DEPTH:
            raise exceeded(f"nests values more than {MOST_DEPTH} levels deep")
        if measure.size > _KEEP:
            self.charge(_ENTRY_BYTES)
            self._known[id(value)] = (value, measure)
        return measure


def _parts(value: Value) -> Iterator[Any]:
    if isinstance(value, (dict, type({}.items()))):
        pairs = value.items() if isinstance(value, dict) else value
        for key, item in pairs:
            yield key
            yield item
    else:
        yield from value


def exceeded(what: str) -> TemplateError:
    """The error of a render that was stopped."""
    return TemplateError(
        f"The model's chat template was stopped: it {what}.",
        hint="Shorten the conversation, or use a file of this model with a sound template.",
        reason="limit",
    )
