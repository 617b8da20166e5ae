"""What a running decode asks between two operations: whether it should end.

llama.cpp calls back after every node of its graph: 190 times a step of the guide, a thousand times a step of a
larger model. A callback in Python takes the interpreter's lock each time while the other threads wait at the
barrier (measured: 70 to 140 µs of the guide's 1,400 a step). So C's own `strlen` is the callback: it gets the
address of a text of one character or of none, and its length is the answer, 1 or 0.
"""

import ctypes
from typing import Any


class StopFlag:
    """`set` may be called from any thread; it holds until `clear`."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self) -> None:
        self._text[0] = b"\1"

    def clear(self) -> None:
        self._text[0] = b"\0"

    def callback(self, kind: Any) -> tuple[Any, ctypes.c_void_p]:  # noqa: ANN401 - a type of the binding
        """A `bool (*)(void *)` as a pointer of this `kind`, and what it is called with. Both must outlive their
        use."""
        pointer = ctypes.cast(ctypes.CDLL(None).strlen, kind)
        return pointer, ctypes.c_void_p(ctypes.addressof(self._text))
