"""Copies text to the clipboard of the user's terminal, also over ssh and inside tmux.

The terminal does not answer, so success cannot be known.
"""

import base64
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Final

_TMUX: Final = ("tmux", "load-buffer", "-w", "-")
_TIMEOUT_S: Final = 2.0


def osc_52(text: str) -> str:
    """The escape sequence that puts `text` into the terminal's clipboard."""
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    return f"\x1b]52;c;{encoded}\x1b\\"


def send(
    text: str, write: Callable[[str], None], environment: Mapping[str, str] | None = None
) -> None:
    """Copy `text` through tmux where it runs, else through `write`. Blocks for at most 2 s.

    By default tmux drops OSC 52 from programs; its own buffer reaches the outer terminal.
    """
    environment = os.environ if environment is None else environment
    if environment.get("TMUX") and _to_tmux(text):
        return
    write(osc_52(text))


def _to_tmux(text: str) -> bool:
    try:
        done = subprocess.run(
            _TMUX,
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
